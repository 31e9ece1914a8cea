"""Every name of a run's own numbers is reserved: no metric may have it."""

import ast
import json
from pathlib import Path

import pytest

from maml.evaluate import main as evaluate
from maml.learners.objectives import is_taken
from maml.run.files import TESTED
from tests.launching import REPO
from tests.runs import metrics, result, sinusoid, train

METRICS = {"accuracy", "precision@1", "precision@5", "return", "return_before", "episodes"}
"""The metrics of this project's learners."""


@pytest.mark.usefixtures("no_pictures")
def test_all_that_a_run_writes_is_taken(tmp_path: Path) -> None:
    """A run without metrics: its rows of all kinds, result, evaluations and tasks."""
    train(sinusoid(eval_every=1, test_tasks=2), tmp_path)
    assert evaluate([str(tmp_path), "--tasks", "2"]) == 0
    evaluated = json.loads((tmp_path / "evaluations.jsonl").read_text())
    (header, *_) = (tmp_path / TESTED).read_text().splitlines()
    rows = [*metrics(tmp_path), evaluated, result(tmp_path)]
    assert len(rows) == 7
    names = set(header.split(",")).union(*rows)
    # A regression's result has it as None; elsewhere it is a metric.
    assert {name for name in names if not is_taken(name)} == {"accuracy"}


def test_all_that_records_say_is_taken() -> None:
    for path in (REPO / "launch" / "records").glob("*/*/result.json"):
        names = json.loads(path.read_text())
        assert {name for name in names if not is_taken(name)} <= METRICS, path


def test_all_that_a_strategy_reports_is_taken() -> None:
    """Read the keys from each ``report``'s source: to see them at run time needs processes."""
    names: set[str] = set()
    for path in REPO.glob("maml/**/strategies/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "report":
                for inner in ast.walk(node):
                    keys = inner.keys if isinstance(inner, ast.Dict) else []
                    if isinstance(inner, ast.Subscript):
                        keys = [inner.slice]
                    names |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    assert {"wire_bytes", "missed_tasks"} <= names
    assert {name for name in names if not is_taken(name)} == set()
