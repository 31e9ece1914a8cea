"""Each component and each field states its facts once, and only about things that exist."""

import re
import sys
from pathlib import Path

import pytest

from datasets.components import scan
from maml.config import FLAGS, OF_A_HOST, registry
from maml.config.fields import FACTS, MUST_MATCH, OF_THE_RESULT
from maml.config.flags import WAY
from maml.config.presets import PRESETS
from tests.launching import REPO, run

ALL = [(kind, name) for kind in registry.KINDS for name in registry.known(kind)]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_facts_are_of_what_there_is(kind: str, name: str) -> None:
    found = registry.find(kind, name)
    assert re.fullmatch(r"[A-Za-z0-9].*[a-z0-9)]", found.help)
    assert set(found.reads) | found.ignores.keys() | found.refuses.keys() <= set(FLAGS)
    for field, refused in found.refuses.items():
        assert getattr(PRESETS["maml-glyphs-5way-1shot"], field) not in refused
    assert callable(found.load())


def test_a_component_is_a_file_and_nothing_else(tmp_path: Path) -> None:
    """A file is read as text: it is not imported, so errors in it do not matter."""
    first, second = tmp_path / "some", tmp_path / "where" / "else"
    (first / "inner").mkdir(parents=True)
    second.mkdir(parents=True)
    (first / "inner" / "mine.py").write_text(
        'import no_such_module\n\nCOMPONENTS = {"mine": {"attribute": "Mine", "help": "of mine"}}\n'
    )
    (first / "other.py").write_text("raise SystemExit\n")
    (second / "two.py").write_text(
        '\nCOMPONENTS = {"b": {"attribute": "B", "help": "b"}, "c": {"like": "b", "help": "c"}}\n'
    )
    found = scan([second, first], tmp_path, registry.Component)
    assert list(found) == ["mine", "b", "c"]
    assert (found["c"].attribute, found["c"].help) == ("B", "c")
    assert (found["mine"].module, found["mine"].attribute) == ("some.inner.mine", "Mine")
    assert found["b"].module == "where.else.two"


def test_a_role_says_what_depends_on_a_field() -> None:
    """Where and how tasks run does not change the result; the tasks themselves do."""
    assert FACTS.keys() - set(FLAGS) == {"preset", "source", "published", "claim"}
    assert {"inner_lr", "data", "ways", "seed"} <= set(MUST_MATCH)
    assert {"data_root", "device", "threads", "run_dir", "logger"} <= set(OF_A_HOST)
    assert {"ps_mode", "iterations", "eval_inner_steps", "test_tasks"} <= set(OF_THE_RESULT)
    for name in ("strategy", "partition", "kernels", "meta_gradient", "timeout"):
        assert FACTS[name].role is WAY


def test_mypy_sees_every_field(tmp_path: Path) -> None:
    mistakes = {
        "config.iner_steps": "attr-defined", "Config(nonsense=3)": "call-arg",
        'Config(ways="five")': "arg-type", "with_values(config, nonsense=3)": "call-arg",
    }  # fmt: skip
    right = [f"Config({name}=config.{name})" for name in FACTS]
    lines = ["from maml.config.fields import Config, with_values", "config = Config()"]
    (tmp_path / "use.py").write_text("\n".join([*lines, *mistakes, *right]))
    # Without what the configuration imports: torch alone would take a minute.
    options = ["--follow-imports=skip", f"--cache-dir={tmp_path}"]
    command = [sys.executable, "-m", "mypy", *options, tmp_path / "use.py", REPO / "maml/config"]
    said = run(list(map(str, command)), timeout=120, expect=1).stdout
    errors = re.findall(r"use.py:(\d+): error: .*\[(.*)\]", said)
    assert errors == [(str(line), code) for line, code in enumerate(mistakes.values(), 3)], said
