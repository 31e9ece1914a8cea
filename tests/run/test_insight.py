"""What a validation tells of the inner loop."""

from pathlib import Path
from typing import Any

import pytest

from maml.config import Config
from tests.runs import glyphs, metrics, sinusoid, supervised, train

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_validations_tell_of_the_inner_loop(tmp_path: Path) -> None:
    """Of each step; of many steps three are looked at; where rates are learned, of them, too."""
    values = {"iterations": 1, "eval_every": 1}
    config = glyphs(learner="metasgd", eval_inner_steps=3, **values)
    (row,) = train_and_read(config, tmp_path / "few")
    assert list(row["after"]) == ["0", "1", "2", "3"]
    assert all(0 <= accuracy <= 1 for accuracy in row["after"].values())
    assert {name.partition("/")[0] for name in row["rates"]} == {"1"}
    (row,) = train_and_read(sinusoid(eval_inner_steps=20, **values), tmp_path / "many")
    assert list(row["after"]) == ["0", "10", "20"] and "rates" not in row
    assert row["after"]["0"] > 0
    (row,) = train_and_read(supervised(**values), tmp_path / "supervised")
    assert "after" not in row


def train_and_read(config: Config, run_dir: Path) -> list[dict[str, Any]]:
    train(config, run_dir)
    return [row for row in metrics(run_dir) if row.get("split") == "validation"]
