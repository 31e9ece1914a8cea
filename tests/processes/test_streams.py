"""Standard output and error that close or fill, and code that ends the program in its middle."""

import errno
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import train_maml
from maml.processes.program import run_program
from maml.run.directory import read_status
from maml.worker import Worker
from tests.launching import TRAIN, run, run_together
from tests.runs import as_flags, last, sinusoid

LOCAL = [sys.executable, "-m", "launch.workers"]
ENDED = {  # what a shell does to the streams: whether each of the two is lost
    "| head -1": (True, False),
    "2>&1 | head -1": (True, True),
    "> /dev/full": (True, False),
    "2>&-": (False, True),
    "<&- >&- 2>&-": (True, True),
}


def in_shell(command: list[str], streams: str) -> list[str]:
    """Return a command that ends with the exit code of ``command``, with other streams."""
    return ["bash", "-c", f"{shlex.join(command)} {streams}; exit ${{PIPESTATUS[0]}}"]


def test_a_run_goes_on_without_its_streams(tmp_path: Path) -> None:
    """In one process, and with two workers. What is not printed is in the run directory."""
    config, dirs = sinusoid(iterations=2, test_tasks=2), list[Path]()
    commands, lost = [], list[tuple[bool, bool]]()
    for streams, of in ENDED.items():
        for program in ([*TRAIN], [*LOCAL, "--workers", "2"]) if all(of) else ([*TRAIN],):
            dirs.append(tmp_path / str(len(dirs)))
            words = [*program, *as_flags(config), "--run-dir", str(dirs[-1])]
            commands.append(in_shell(words, streams))
            lost.append(of)
    for done, run_dir, (out, err) in zip(run_together(commands, 120), dirs, lost, strict=True):
        status = read_status(run_dir)
        assert status is not None and status["state"] == "finished"
        assert (run_dir / "result.json").exists()
        log, file = (run_dir / "output.log").read_text(), f"the rest is in {run_dir}/output.log"
        assert ("test loss" in log) == out != ("test loss" in done.stdout)
        assert ("training: 2 of 2 it" in log) == err != ("training: 2 of 2 it" in done.stderr)
        assert (file in log) == (out and err) and (file in done.stderr) == (out and not err)
        assert "rror" not in log + done.stderr


def test_a_command_that_only_prints(tmp_path: Path) -> None:
    """If nobody reads on, it ends quietly. A full disk is an error: the text is all it makes."""
    for streams, code in {"| head -1": 0, ">&-": 0, "> /dev/full": 2}.items():
        for words in (["--presets"], ["maml-sinusoid-10shot", "--help"]):
            done = run(in_shell([*TRAIN, *words], streams), 60, expect=code)
            full = f"error: standard output: {os.strerror(errno.ENOSPC)}\n"
            assert done.stderr == (full if code else "")


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Libraries in C print to that number. A path that is not UTF-8 is printed, too."""
    code = """
import os, sys
from maml.processes.program import run_program
def main(arguments):
    os.write(int(arguments[0]), str(os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY)).encode())
    try:
        os.write(2, b"from C")
    except OSError:
        print("caf\\udce9")
run_program(main, sys.argv[1:])
"""
    words = [sys.executable, "-c", code, "1", str(tmp_path / "file")]
    done = run(in_shell(words, "<&- 2>&-"), 60)
    assert done.stdout == "3caf\\udce9\n"
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(
    "error",
    [SystemExit(0), SystemExit(None), SystemExit("bye"), SystemExit(3), SystemExit(256),
     BrokenPipeError(), GeneratorExit()],
)  # fmt: skip
def test_a_failed_run_never_ends_with_0(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Whatever a user's code raises. The work so far is saved."""
    share, calls = Worker.share, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise error
        return share(*arguments)

    monkeypatch.setattr(Worker, "share", failing)
    words = [*as_flags(sinusoid(iterations=9)), "--run-dir", str(tmp_path)]
    with pytest.raises(BaseException) as ended:
        run_program(train_maml.main, words)
    status = read_status(tmp_path)
    assert status is not None and status["state"] == "failed"
    assert last(tmp_path)["iteration"] == 2
    if isinstance(error, SystemExit):
        assert isinstance(ended.value, SystemExit) and ended.value.code == (error.code == 3) * 2 + 1
        line = capfd.readouterr().err.splitlines()[-1]
        assert line.startswith("error: the program was told to end: SystemExit")
        assert f"({__file__}:" in line
    else:
        assert ended.value is error  # a traceback, and exit code 1
