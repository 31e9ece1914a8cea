"""Run the code of a page of documentation, from top to bottom, as its reader does.

The language of a fenced block decides:

- ``python`` and ``yaml``: write a file if the first line is a comment with its name; else run
  Python, in one namespace with the blocks before it, as in a notebook;
- ``bash``: run commands, one a line. They run in this process, by their modules' ``main``, which
  saves seconds of imports for each. Trainings and evaluations are made small. Python after them
  has a new namespace, because a reader leaves Python to give commands;
- any other, or none: run nothing. ``py`` is Python that cannot run here.
"""

import importlib
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from maml.config.cli import parse
from maml.config.presets import with_values
from maml.trainer import Trainer
from tests.launching import REPO

BLOCK = re.compile(r"^```(python|yaml|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml))\n")
SMALL: dict[str, Any] = {
    "iterations": 2, "meta_batch_size": 2, "eval_every": 0, "test_tasks": 4, "eval_tasks": 4,
    "log_every": 1, "threads": 1, "logger": "none", "compile": "off",
}  # fmt: skip
PACKAGES = ("maml", "maml.plots")
FEW = {"maml.evaluate": ["--tasks", "4"], "maml.plots": ["--tasks", "4"]}


def run_page(
    page: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    instead: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a page's blocks in ``folder``; return the names that its Python has made.

    Args:
        page: Its path in the repository.
        folder: The current directory while the page runs.
        monkeypatch: Restores what is changed.
        instead: Texts of the page that take long, with their replacements; all must occur.
    """
    text = (REPO / page).read_text()
    for long, short in (instead or {}).items():
        assert long in text, f"{page}: no {long!r}"
        text = text.replace(long, short)
    monkeypatch.chdir(folder)
    # The page's modules. Imported modules stay in the process, so each page has its own names.
    monkeypatch.syspath_prepend(folder)
    # A sweep's trials start the program by this name.
    (folder / "train_maml.py").symlink_to(REPO / "train_maml.py")
    names: dict[str, Any] = {}
    session: dict[str, Any] = {}
    for language, code in BLOCK.findall(text):
        file = FILE.match(code)
        if language == "bash":
            session = {}
            for line in code.splitlines():
                _run(shlex.split(line))
        elif file is not None:
            (folder / file[1]).write_text(code)
        else:
            assert language == "python", f"{page}: a block of YAML without its file's name"
            exec(compile(code, page, "exec"), session)
            names |= session
    return names


def _run(words: list[str]) -> None:
    if words[:2] == ["python", "train_maml.py"]:
        code = Trainer(with_values(parse(words[2:]), **SMALL)).run()
    else:
        assert words[:2] == ["python", "-m"], words
        if words[2].startswith("launch."):  # a name of `maml PROGRAM`
            words = [*words[:2], "maml", words[2].removeprefix("launch."), *words[3:]]
        name = words[2] + ".__main__" * (words[2] in PACKAGES)
        module = importlib.import_module(name)
        code = module.main([*words[3:], *FEW.get(words[2], [])])
    assert not code, f"{shlex.join(words)}: exit code {code}"
    sys.stdout.flush()
