"""launch/environment.sh makes the environment once and whole, or says why not in one line.

The interpreter and uv are stand-ins on PATH that note how they are called.
"""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launching import REPO, until

# Every stand-in for Python has the version that the file `version` names.
PYTHON = """#!/bin/sh
case "$*" in
  "-m launch.workers "*) echo "$PWD $PYTHONPATH $7" ;;
  *"venv, ensurepip"* | *"import sys; exit"*) grep -q "3.1[1-4]" {root}/version ;;
  *version_info*) echo "# Python $(cat {root}/version) in $3" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *--dry-run*) [ ! -s {root}/lacking ] || {{ cat {root}/lacking; exit 1; }} ;;
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
        self.write("repo/requirements.lock", "qpth==0\n")
        self.write("calls", "")
        self.write("version", "3.12")
        self.write("installing", "")
        self.write("lacking", "")
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
            ["bash", "-euc", ". repo/launch/environment.sh; command -v python"],
            cwd=self.root,
            env={"PATH": f"{self.root}/bin:/usr/bin:/bin", "VENV": str(self.venv), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def make(self, found: Path | None = None, **variables: str) -> str:
        """Get an environment, in its usual place or at ``found``; return the script's messages."""
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
        """Begin to install, and send Ctrl-C when half is installed."""
        self.write("installing", "sleep 1000")
        process = self.start()
        until((self.venv / "half").exists, 60)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=300)  # the installer has ended too, and closed the pipe
        assert process.returncode != 0
        self.write("installing", "")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_interrupted_environment_is_made_again(machine: Machine) -> None:
    machine.interrupt()
    assert "ready" in machine.make()
    assert machine.make() == ""  # made once
    assert machine.calls() == ["uv", "uv"]


def test_other_requirements_are_installed_in_place(machine: Machine) -> None:
    machine.make()
    mine = machine.write("venv/mine", "precious")
    machine.write("repo/requirements.txt", "numpy==2\n")
    said = machine.make()
    assert f"the requirements have changed: updating {machine.venv} in place" in said
    assert machine.make() == ""
    machine.write("repo/requirements.lock", "qpth==1\n")
    assert "in place" in machine.make()
    assert mine.exists()
    # Another Python makes it anew, and so does half an update: a package may be incomplete.
    machine.write("version", "3.13")
    assert "installing requirements.txt" in machine.make()
    assert not mine.exists()
    machine.write("repo/requirements.txt", "numpy==3\n")
    machine.interrupt()
    assert "installing requirements.txt" in machine.make()


def test_an_environment_of_one_s_own(machine: Machine) -> None:
    """An activated or named environment is used if it lacks nothing, and never changed."""
    own = machine.write("own/bin/python", (machine.root / "bin/python3").read_text())
    own.chmod(0o755)
    theirs = {"VENV": "", "VIRTUAL_ENV": str(own.parents[1])}
    said = f"environment: {own.parents[1]}, your own\n"
    assert machine.make(own.parents[1], **theirs) == said
    assert machine.make(own.parents[1], VENV=str(own.parents[1])) == said
    machine.write("lacking", "Collecting\nERROR: no torch==2\n")
    found = machine.make(machine.root / "repo/.venv", **theirs)
    assert f"{own.parents[1]} is not used: ERROR: no torch==2\n" in found
    assert "ready" in found
    assert [path.name for path in own.parents[1].rglob("*")] == ["bin", "python"]


def test_pip_takes_over_from_uv(machine: Machine) -> None:
    """If both fail, one line names the log, and the same command can begin again."""
    machine.write("installing", "echo 'error: no such package'; kill $PPID")
    said = machine.start().communicate(timeout=300)[1].splitlines()
    log = machine.venv / ".install.log"
    assert said[1:] == [f"the installation failed: error: no such package; the whole log is {log}"]
    machine.write("installing", 'rm "$VENV/half"; exit 2')
    machine.write("calls", "")
    assert "ready" in machine.make()
    uv, pip = (machine.root / "calls").read_text().splitlines()
    assert uv.startswith("uv ") and pip.startswith("pip ")
    assert all("--constraint requirements.lock" in call for call in (uv, pip))


def test_the_quickstart_runs_in_the_folder_of_the_caller(machine: Machine) -> None:
    machine.make()
    shutil.copy(REPO / "launch/quickstart", machine.root / "repo/launch")
    done = subprocess.check_output(
        ["bash", "../repo/launch/quickstart", "--run-dir", "mine"], text=True, cwd=machine.venv,
        env={"PATH": "/usr/bin:/bin", "VENV": str(machine.venv)},
    )  # fmt: skip
    assert done.startswith(f"{machine.venv} {machine.root}/repo mine\n\nThe run is in mine: ")


def test_all_versions_are_locked() -> None:
    """requirements.lock has every line of requirements.txt, and no address of a package index."""
    lock = (REPO / "requirements.lock").read_text()
    for line in (REPO / "requirements.txt").read_text().splitlines():
        pinned = line.partition("#")[0].partition(" ")[0]
        assert not pinned or re.search(rf"^{re.escape(pinned.lower())}( ;|$)", lock, re.MULTILINE)
    assert "://" not in lock and "index" not in lock


def test_refusals(machine: Machine) -> None:
    machine.write("version", "3.10")
    for name in ("python3", "python9"):
        assert f"PYTHON={name}: no Python 3.11 to 3.14" in machine.refusal(PYTHON=name)
    machine.write("version", "3.11")
    mine = machine.write("venv/mine", "precious")
    assert "was not made by this script" in machine.refusal()
    assert mine.exists()
