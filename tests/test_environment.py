"""launch/environment.sh makes the environment once and whole, or says why not in one line.

The interpreter and uv are stand-ins on PATH that note how they are called.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launching import REPO

# Every fake interpreter tells the version that the file `version` has.
PYTHON = """#!/bin/sh
case "$*" in
  *version_info*) cat {root}/version ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"pip install"*) echo "pip $*" >>{root}/calls ;;
esac
"""
UV = """#!/bin/sh
case "$1" in
  --version) echo uv ;;
  venv) mkdir -p "$VENV/bin" && cp {root}/bin/python3 "$VENV/bin/python" ;;
  pip) echo "uv $*" >>{root}/calls; echo half >"$VENV/half"; . {root}/installing; rm "$VENV/half" ;;
esac
"""


class Machine:
    """A repository with launch/environment.sh, and stand-ins first on PATH."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / "venv"
        (root / "repo/launch").mkdir(parents=True)
        shutil.copy(REPO / "launch/environment.sh", root / "repo/launch")
        self.write("repo/requirements.txt", "numpy==1\nlearn2learn==0 ; python_version < '3.13'\n")
        self.write("calls", "")
        self.write("version", "3.12")
        self.write("installing", "")
        for name, text in (("python3", PYTHON), ("uv", UV)):
            self.write(f"bin/{name}", text.format(root=root)).chmod(0o755)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def calls(self) -> list[str]:
        return [line.split()[0] for line in (self.root / "calls").read_text().splitlines()]

    def start(self, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-euc", ". repo/launch/environment.sh; command -v python"],
            cwd=self.root,
            env={"PATH": f"{self.root}/bin:/usr/bin:/bin", "VENV": str(self.venv), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def make(self, **variables: str) -> str:
        """Make the environment; return what was said."""
        process = self.start(**variables)
        found, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
        assert found == f"{self.venv}/bin/python\n"
        assert not (self.venv / "half").exists()
        return said

    def refusal(self, **variables: str) -> str:
        """Fail to make the environment; return the one line that says why."""
        process = self.start(**variables)
        said = process.communicate(timeout=300)[1]
        assert process.returncode == 1
        assert said.count("\n") == 1
        return said


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_interrupted_environment_is_made_again(machine: Machine) -> None:
    """After Ctrl-C nothing goes on, and what is half there is never taken for whole."""
    machine.write("installing", "sleep 1000")
    process = machine.start()
    deadline = time.monotonic() + 300
    while not (machine.venv / "half").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=300)  # the installer is ended too: nobody holds the pipe
    assert process.returncode != 0

    machine.write("installing", "")
    assert "ready" in machine.make()
    assert machine.make() == ""  # made once
    assert machine.calls() == ["uv", "uv"]


def test_what_does_not_fit_is_made_again(machine: Machine) -> None:
    """Other requirements, and another Python under it."""
    machine.make()
    machine.write("repo/requirements.txt", "numpy==2\n")
    assert "ready" in machine.make()
    machine.write("version", "3.13")
    assert "Python 3.13" in machine.make()
    assert machine.calls() == ["uv"] * 3


def test_pip_takes_over_from_uv(machine: Machine) -> None:
    machine.write("installing", "exit 2")
    machine.make()
    assert machine.calls() == ["uv", "pip"]


def test_refusals(machine: Machine) -> None:
    machine.write("version", "3.10")
    assert "PYTHON=python3 is Python 3.10: 3.11 to 3.14" in machine.refusal(PYTHON="python3")
    assert "no such Python" in machine.refusal(PYTHON="python9")
    machine.write("version", "3.11")
    mine = machine.write("venv/mine", "precious")
    assert "was not made by this script" in machine.refusal()
    assert mine.exists()
