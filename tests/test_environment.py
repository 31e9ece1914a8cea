"""launch/environment.sh makes the environment once and whole, or says why not in one line.

The interpreter and uv are stand-ins on PATH that note how they are called.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import REPO, run

# Every fake interpreter tells the version that the file `version` has.
PYTHON = """#!/bin/sh
case "$*" in
  *version_info*) cat {root}/version ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"pip install"*) echo "pip $*" >>{root}/calls ;;
  launch/lacking.py*) cat {root}/lacking ;;
  *launch.flags_first*) echo "$*" >>{root}/flags; exit $(cat {root}/wrong) ;;
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
        self.write("lacking", "")
        self.write("wrong", "0")
        for name, text in (("python3", PYTHON), ("uv", UV)):
            self.write(f"bin/{name}", text.format(root=root)).chmod(0o755)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def calls(self) -> list[str]:
        return [line.split()[0] for line in (self.root / "calls").read_text().splitlines()]

    def start(self, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *("bash", "-euc"),
                "flags_of=launch.some; . repo/launch/environment.sh; command -v python",
                *("script", "--flag", "value"),
            ],
            cwd=self.root,
            env={"PATH": f"{self.root}/bin:/usr/bin:/bin", "VENV": str(self.venv), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def make(self, found: Path | None = None, **variables: str) -> str:
        """Have an environment, in its place or ``found``; return what was said."""
        process = self.start(**variables)
        python, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
        assert python == f"{found or self.venv}/bin/python\n"
        assert not (self.venv / "half").exists()
        return said

    def refusal(self, **variables: str) -> str:
        """Fail to make the environment; return the one line that says why."""
        process = self.start(**variables)
        said = process.communicate(timeout=300)[1]
        assert process.returncode == 1
        assert said.count("\n") == 1
        return said

    def interrupt(self) -> None:
        """Begin to install, and be stopped by Ctrl-C when it is half there."""
        self.write("installing", "sleep 1000")
        process = self.start()
        deadline = time.monotonic() + 300
        while not (self.venv / "half").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=300)  # the installer is ended too: nobody holds the pipe
        assert process.returncode != 0
        self.write("installing", "")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_interrupted_environment_is_made_again(machine: Machine) -> None:
    """After Ctrl-C nothing goes on, and what is half there is never taken for whole."""
    machine.interrupt()
    assert "ready" in machine.make()
    assert machine.make() == ""  # made once
    assert machine.calls() == ["uv", "uv"]


def test_other_requirements_are_installed_in_place(machine: Machine) -> None:
    """What a user has installed there stays, even where an update was cut off."""
    machine.make()
    mine = machine.write("venv/mine", "precious")
    machine.write("repo/requirements.txt", "numpy==2\n")
    said = machine.make()
    assert f"requirements.txt has changed: updating {machine.venv} in place" in said
    assert machine.make() == ""
    machine.write("repo/requirements.txt", "numpy==3\n")
    machine.interrupt()
    assert "in place" in machine.make()
    assert mine.exists()
    calls = (machine.root / "calls").read_text().splitlines()
    assert ["--reinstall" in call for call in calls] == [False, False, False, True]
    # A Python that does not fit is the one thing that cannot be mended.
    machine.write("version", "3.13")
    assert "Python 3.13" in machine.make()
    assert not mine.exists()


def test_an_environment_of_one_s_own(machine: Machine) -> None:
    """Activated, or named: it is used where it lacks nothing, and never changed."""
    own = machine.write("own/bin/python", (machine.root / "bin/python3").read_text())
    own.chmod(0o755)
    theirs = {"VENV": "", "VIRTUAL_ENV": str(own.parents[1])}
    said = f"environment: {own.parents[1]}, your own\n"
    assert machine.make(own.parents[1], **theirs) == said
    assert machine.make(own.parents[1], VENV=str(own.parents[1])) == said
    machine.write("lacking", "torch>=2")
    found = machine.make(machine.root / "repo/.venv", **theirs)
    assert f"{own.parents[1]} is not used: it lacks torch>=2" in found
    assert "ready" in found
    assert [path.name for path in own.parents[1].rglob("*")] == ["bin", "python"]


def test_flags_are_checked_before_anything_is_installed(machine: Machine) -> None:
    machine.write("wrong", "2")
    process = machine.start()
    process.communicate(timeout=300)
    assert process.returncode == 2
    assert (
        machine.root / "flags"
    ).read_text() == "-m launch.flags_first launch.some --flag value\n"
    assert not machine.venv.exists()


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


def test_flags_need_no_package() -> None:
    """So a wrong one is told before anything is installed."""
    bare = [sys.executable, "-S", "-m", "launch.flags_first", "launch.workers"]
    done = run([*bare, "maml-glyphs-5way-1shot", "--wayz", "3"], timeout=60, expect=2)
    assert done.stderr == "error: unknown flag --wayz: did you mean --ways?\n"
    run([*bare, "maml-glyphs-5way-1shot", "--ways", "3", "--workers", "2"], timeout=60)
