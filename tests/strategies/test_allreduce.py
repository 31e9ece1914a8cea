"""The allreduce strategy: all ranks end together, and hold the same parameters or say so."""

import json
import os
import signal
from pathlib import Path

from tests.launching import run, start, torchrun
from tests.runs import last, metrics, same
from tests.strategies import faults
from tests.strategies.faults import process_of_rank, wait_for_iteration

SINUSOID = [*faults.SINUSOID, "--strategy", "allreduce", "--test-tasks", "8"]


def test_a_signal_to_one_rank_stops_all(tmp_path: Path) -> None:
    """The checkpoint, which only rank 0 writes, is enough for all to go on to the same end."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    launched = start([*torchrun(2), *SINUSOID, "--run-dir", str(parts)])
    try:
        wait_for_iteration(launched, parts, 10, limit=90)
        os.kill(process_of_rank(launched, 1), signal.SIGHUP)
    finally:
        done = launched.wait(60, expect=None)
    assert "stopped by SIGHUP" in done.stdout
    reached = metrics(parts)[-1]["iteration"]
    args = [*SINUSOID, "--iterations", str(last(parts)["iteration"] + 10)]
    both = ["-m", "tests.strategies.topologies", str(tmp_path)]
    run(torchrun(2, [*both, json.dumps({"parts": args, "whole": args})]), timeout=120)
    assert reached <= last(parts)["iteration"]
    assert same(last(parts)["model"], last(whole)["model"])


DIVERGES = """
import torch.distributed
from maml.metagradient.outer_optimizer import OuterOptimizer
step, gather = OuterOptimizer.step, torch.distributed.all_gather
def broken(self, *args):
    step(self, *args)
    if os.environ["RANK"] == "1":
        next(iter(self.params.values())).add_(1e-6)
def late(*args, **kwargs):
    gather(*args, **kwargs)
    time.sleep(2 * (os.environ["RANK"] == "0"))
OuterOptimizer.step, torch.distributed.all_gather = broken, late
"""


def test_diverged_parameters_are_found(tmp_path: Path) -> None:
    """The next check finds rank 1's changed parameters, also when rank 1 reports them first."""
    args = [*SINUSOID, "--iterations", "10", "--test-tasks", "0", "--check-every", "2"]
    command = [*torchrun(2, [faults.planted(tmp_path, DIVERGES)]), *args]
    done = run([*command, "--run-dir", str(tmp_path / "run")], timeout=120, expect=None)
    assert done.returncode != 0
    assert "error: rank 1 holds other parameters than rank 0" in done.stderr
