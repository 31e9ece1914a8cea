"""When memory runs out: the kernel's OOM killer, and limits that a user has set."""

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from maml.processes.identity import OutOfMemory
from maml.processes.program import run_program
from tests.launching import SLACK, TRAIN, run, start
from tests.runs import as_flags, sinusoid


def test_what_the_kernel_counts(tmp_path: Path) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 5\noom_kill 7\n")
    memory = OutOfMemory(counts)
    assert memory.cause("it", 1) == ""
    counts.write_text("nr_free_pages 5\noom_kill 9\n")
    says = ": memory ran out, and the kernel killed 2 processes of this host during this run"
    assert memory.cause("it", 3 * 2**29) == f"{says}; it had 1.50 GiB"


@pytest.fixture
def group() -> Iterator[tuple[Path, Path, Path]]:
    """A control group within that of this process: its directory, usage file and limit file."""
    found = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0":
            found = f"/sys/fs/cgroup{name}", "memory.current", "memory.max"
        elif "memory" in controllers.split(","):
            files = "memory.usage_in_bytes", "memory.limit_in_bytes"
            found = f"/sys/fs/cgroup/memory{name}", *files
            break
    if found is None:
        pytest.skip("no control group counts memory here")
    at = Path(found[0], f"maml-test-{os.getpid()}")
    try:
        at.mkdir()
    except OSError as error:
        pytest.skip(f"this user may make no control group: {error}")
    if not (at / found[2]).exists():
        at.rmdir()
        pytest.skip(f"the control groups of {at.parent} do not limit memory")
    yield at, at / found[1], at / found[2]
    deadline = time.monotonic() + SLACK * 10
    while (at / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    at.rmdir()


def test_the_kernel_kills_a_worker(group: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """The surviving rank and the launcher name the worker and its memory."""
    code = """
import os, sys
import launch.workers
from maml.processes.program import run_program

open(sys.argv[1], "w").write(str(os.getpid()))
launch.workers.TRAIN = "tests/strategies/faulty.py"
run_program(launch.workers.main, sys.argv[2:])
"""
    at, usage, limit = group
    config = sinusoid(iterations=10**9, run_dir=str(tmp_path / "run"))
    marker = tmp_path / "fault"
    env = {"FAULT": "fills_memory", "FAULT_RANK": "1", "FAULT_FILE": str(marker)}
    within = [sys.executable, "-c", code, str(at / "cgroup.procs")]
    launched = start([*within, *as_flags(config), "--workers", "2"], env=env)
    launched.wait_for("iterations 0 to", timeout=120)
    limit.write_text(str(int(usage.read_text()) + 2**28))
    marker.touch()
    done = launched.wait(60, expect=128 + 9)
    says = r"memory ran out, and the kernel killed \d+ process(es)? of this host during this run"
    had = r"had \d\.\d\d GiB"
    assert re.search(rf"error: rank 1 \(.*\) was killed: {says}; it {had}\n", done.stderr)
    assert re.search(rf"rank 1 \(.*\) ended SIGKILL: {says}; the largest .* {had}\n", done.stderr)


@pytest.mark.parametrize(
    ("limit", "command"),
    [
        ("-v 300000", TRAIN),  # each library reports missing memory in its own words
        ("-n 20", [sys.executable, "-m", "launch.workers", "--workers", "2"]),
    ],
)
def test_a_limit_that_is_too_low(tmp_path: Path, limit: str, command: Sequence[str]) -> None:
    """The error line names the limit."""
    within = ["bash", "-c", f'ulimit {limit}; exec "$@"', "-", *command]
    done = run([*within, *as_flags(sinusoid(run_dir=str(tmp_path / "run")))], 60, expect=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: ulimit {limit}: ")
    assert not (tmp_path / "run").exists()


def test_more_than_the_system_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_program(lambda _: torch.empty(2**50), [])
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and line.startswith("error: the system has no more memory (")
