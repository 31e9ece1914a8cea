"""Every fault, by every strategy: injected for real, and what came of it.

    python -m tests.strategies.faults --json benchmarks/records/….json      # all of them, twice

``docs/faults.md`` is made from that record; `test_losses.py` has the same as tests. Every rank is
started on its own, as a cluster's launcher does: the end of one is not the end of all, and each has
an exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from benchmarks.hardware import describe
from tests.launching import SLACK, Launched, start_ranks
from tests.strategies.waiting import wait_for_iteration

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off", "--iterations", "100000", "--log-every", "5", "--checkpoint-every", "5"),
]  # fmt: skip
PARAM_SERVER = ["--strategy", "param-server"]
STRATEGIES = {
    "rpc exclusive": ["--strategy", "rpc"],
    "rpc chunk": ["--strategy", "rpc", "--partition", "chunk"],
    "rpc nested": ["--strategy", "rpc", "--partition", "nested"],
    "allreduce": ["--strategy", "allreduce"],
    "param-server sync": PARAM_SERVER,
    "param-server async": [*PARAM_SERVER, "--ps-mode", "async"],
    "param-server collective": [*PARAM_SERVER, "--ps-transport", "collective"],
    "param-server remote": [*PARAM_SERVER, "--ps-forward", "remote"],
}
WORLD = 3
DEATH_S = 10.0
"""Seconds after which a run has ended that has lost a process by its death."""


class Fault(NamedTuple):
    """What happens to a process.

    Attributes:
        by: A signal that it is sent, or a function of `tests.strategies.faulty`.
        cause: What the line says by which the run ends, a regular expression.
        ends: Whether the process is gone, and so seen to be; else silence tells.
        code: The exit code that it may have, beside 1 and that of a killed one.
    """

    by: signal.Signals | str
    cause: str
    ends: bool
    code: int = 1


FAULTS = {
    "killed": Fault(signal.SIGKILL, "was killed", ends=True),
    "crashed": Fault(signal.SIGSEGV, "was killed", ends=True, code=-signal.SIGSEGV),
    "failed": Fault("raises", r"failed: ValueError: C:\\users\\new and a second line", ends=True),
    "stopped": Fault(signal.SIGSTOP, "is stopped by a signal: silent for", ends=False),
    "holds the interpreter's lock": Fault("holds_lock", "hangs: silent for", ends=False),
    # gloo, finding its connections gone, ends its own process.
    "disconnected": Fault(
        "disconnects", "lost its connections|was killed", ends=True, code=-signal.SIGABRT
    ),
}
ALIVE = Fault("sleeps", r"had no answer .* alive: rank \d .* hangs, or needs more time", ends=False)
"""Not in the record: who waits for whom depends on the strategy, and rank 0 may wait for nobody."""


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        seconds: From the fault to the end of the last process.
        codes: The exit code of each rank.
        said: The lines with "error: ", of all ranks.
        stderr: All that they have printed there.
        pid: Of the process that the fault was of.
        state: What status.json says.
    """

    seconds: float
    codes: list[int]
    said: list[str]
    stderr: str
    pid: int
    state: str


def inject(run_dir: Path, strategy: str, fault: Fault, rank: int, timeout: float) -> Outcome:
    """Train with ``strategy``, let ``fault`` happen to ``rank``; return how all ended."""
    marker = run_dir.with_name(f"{run_dir.name}-fault")
    env, script = {}, "train_maml.py"
    if isinstance(fault.by, str):
        env = {"FAULT": fault.by, "FAULT_RANK": str(rank), "FAULT_FILE": str(marker)}
        script = "tests/strategies/faulty.py"
    args = [*SINUSOID, *STRATEGIES[strategy], "--run-dir", str(run_dir)]
    ranks = start_ranks(WORLD, [*args, "--timeout", f"{timeout:g}"], script=script, env=env)
    pid = ranks[rank].process.pid
    try:
        wait_for_iteration(ranks[0], run_dir, 10, limit=90)
        if isinstance(fault.by, str):
            marker.touch()
            deadline = time.monotonic() + 60 * SLACK
            while marker.exists():
                assert time.monotonic() < deadline, f"{fault} never happened"
                time.sleep(0.01)
        else:
            os.kill(pid, fault.by)
        began = time.monotonic()
        for launched in ranks:
            launched.process.wait((timeout + 60) * SLACK)
        seconds = time.monotonic() - began
    finally:
        done = [launched.wait(30, expect=None) for launched in ranks]
    stderr = "\n".join(one.stderr.replace("\r", "\n") for one in done)
    said = [s for s in stderr.splitlines() if re.search("(?<!Fatal Python )error: ", s)]
    status = json.loads((run_dir / "status.json").read_text())
    codes = [one.returncode for one in done]
    return Outcome(seconds, codes, said, stderr, pid, status["state"])


def suspend(ranks: Sequence[Launched], seconds: float) -> None:
    """Stop all processes and let them go on, one after the other, as a scheduler does."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for one in ranks:
            with suppress(ProcessLookupError):
                one.process.send_signal(number)
            time.sleep(0.2)
        if number == signal.SIGSTOP:
            time.sleep(seconds)


def main() -> None:
    """Inject all; write what came of it after each. What is in the file already is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=20)
    own = parser.parse_args()
    record = {"hardware": describe(threads=1), "timeout": own.timeout, "rows": []}
    if own.json.exists():
        record = json.loads(own.json.read_text())
    done = {(row["strategy"], row["fault"], row["rank"]) for row in record["rows"]}
    injections = [
        (strategy, name, rank)
        for strategy in own.strategies
        for name, fault in FAULTS.items()
        for rank in (0, 2)
        if not isinstance(fault.by, str) or _computes(strategy, rank)
    ]
    for strategy, name, rank in tqdm(injections, unit="fault"):
        if (strategy, name, rank) in done:
            continue
        outcomes = []
        for _ in range(own.rounds):
            with tempfile.TemporaryDirectory() as folder:
                run_dir = Path(folder) / "run"
                outcomes.append(inject(run_dir, strategy, FAULTS[name], rank, own.timeout))
        row = {
            "strategy": strategy, "fault": name, "rank": rank,
            "seconds": [round(one.seconds, 1) for one in outcomes],
            "said": outcomes[0].said, "state": outcomes[0].state, "codes": outcomes[0].codes,
        }  # fmt: skip
        record["rows"].append(row)
        own.json.write_text(json.dumps(record, indent=1) + "\n")


def _computes(strategy: str, rank: int) -> bool:
    """Whether ``rank`` computes gradients of tasks of its own."""
    if strategy == "param-server remote":
        return False
    return rank > 0 or not strategy.startswith("param-server")


if __name__ == "__main__":
    main()
