"""Every fault, by every strategy: injected for real, and what came of it.

    python -m tests.strategies.faults --json benchmarks/records/….json      # all of them, twice

``docs/faults.md`` is made from that record; `test_losses.py` has the same as tests. Every rank is
started on its own, as a cluster's launcher does: the end of one is not the end of all, and each has
an exit code. But a launcher starts them where it is itself what dies, or what may end the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from maml.run.directory import read_status
from maml.run.provenance import describe
from tests.launching import SLACK, Launched, start, start_ranks, torchrun
from tests.strategies.waiting import process_of_rank, wait_for_iteration

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off", "--iterations", "100000", "--log-every", "5", "--checkpoint-every", "5"),
]  # fmt: skip
PARAM_SERVER = ["--strategy", "param-server"]
STRATEGIES = {
    "rpc exclusive": ["--strategy", "rpc"],
    "rpc chunk": ["--strategy", "rpc", "--partition", "chunk"],
    "allreduce": ["--strategy", "allreduce"],
    "param-server sync": PARAM_SERVER,
    "param-server async": [*PARAM_SERVER, "--ps-mode", "async"],
    "param-server collective": [*PARAM_SERVER, "--ps-transport", "collective"],
    "param-server remote": [*PARAM_SERVER, "--ps-forward", "remote"],
}
ALL = STRATEGIES | {
    "param-server backup": [*PARAM_SERVER, "--ps-mode", "backup"],
    "observers": ["--strategy", "observers", "--horizon", "40", "--queries", "2"],
}
SHORT = ["--iterations", "10", "--test-tasks", "8", "--eval-every", "5", "--eval-tasks", "8"]
"""A run that comes to its end."""
WORLD = 3
DEATH_S = 10.0
"""Seconds after which a run has ended that has lost a process by its death."""

COLUMNS = {
    "fault": "{fault}", "of rank": "{of_rank}", "what the run says": "{lines}",
    **{f"`{name}`": f"{{{name}}}" for name in ALL},
}  # fmt: skip


class Fault(NamedTuple):
    """What happens to a process.

    Attributes:
        by: A signal that it is sent, or a function of `tests.strategies.faulty`.
        cause: What the line says by which the run ends, a regular expression.
        ends: Whether the process is gone, and so seen to be; else silence tells.
        code: The exit code that it may have, beside 1 and that of a killed one.
        phase: What rank 0 is in when it happens, one of `PHASES`; "": in training, some time.
        launcher: Who starts the processes, "torchrun" or "launch/local"; "": each on its own.
    """

    by: signal.Signals | str
    cause: str
    ends: bool
    code: int = 1
    phase: str = ""
    launcher: str = ""


LAUNCHER = -1
"""In place of a rank: the fault is the launcher's."""

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
KILLED = FAULTS["killed"]
AFTER_TEST = KILLED._replace(phase="tested")
WHILE_DRAWING = KILLED._replace(phase="drawing", cause=r"\) was killed; all work is done$")
GOES_ON = KILLED._replace(launcher="launch/local", phase="training", cause="training goes on")
OTHERS = {
    "after the test's line": (AFTER_TEST, 0),
    "while pictures are drawn": (WHILE_DRAWING, 2),
    "torchrun": (KILLED._replace(launcher="torchrun"), LAUNCHER),
    "launch/local": (KILLED._replace(launcher="launch/local"), LAUNCHER),
}
"""By what is said in the record beside "killed": faults that every strategy meets in one rank."""
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
    if fault.phase:
        env |= {"HOLD": fault.phase, "HOLD_FILE": str(marker)}
    if env:
        script = "tests/strategies/faulty.py"
    args = [*arguments(strategy), "--run-dir", str(run_dir), "--timeout", f"{timeout:g}"]
    if fault.phase:
        args += SHORT
    started = _start(fault.launcher, script, args, env)
    try:
        if fault.phase:
            _wait_until(marker.exists, f"{fault} has not come to its phase")
        else:
            wait_for_iteration(started[0], run_dir, 10, limit=90)
        pid = _process(started, fault, rank)
        if isinstance(fault.by, str):
            marker.touch()
            _wait_until(lambda: not marker.exists(), f"{fault} never happened")
        else:
            os.kill(pid, fault.by)
        began = time.monotonic()
        marker.unlink(missing_ok=True)
        limit = began + (timeout + 60) * SLACK
        while any(one.processes() for one in started) and time.monotonic() < limit:
            time.sleep(0.1)
        seconds = time.monotonic() - began
    finally:
        done = [launched.wait(30, expect=None) for launched in started]
    stderr = "\n".join(one.stderr.replace("\r", "\n") for one in done)
    said = [line for line in stderr.splitlines() if re.search(SAID, line)]
    state = (read_status(run_dir) or {"state": "–"})["state"]
    return Outcome(seconds, [one.returncode for one in done], said, stderr, pid, state)


SAID = r"(?<!Fatal Python )error: |was killed"
"""What tells of a loss. torchrun's report of what it was told repeats such a line: not here."""


def arguments(strategy: str) -> list[str]:
    """Return the command line of an endless run with ``strategy``."""
    preset, *flags = SINUSOID
    if strategy == "observers":
        preset, flags = "reinforce-cartpole", [*flags, "--meta-batch-size", "4"]
    return [preset, *flags, *ALL[strategy]]


def _start(
    launcher: str, script: str, args: Sequence[str], env: Mapping[str, str]
) -> list[Launched]:
    """Start the ranks: each on its own, or all by a launcher."""
    if launcher == "torchrun":
        return [start([*torchrun(WORLD, [script]), *args], env=env)]
    if launcher:
        code = f"import sys\nfrom launch import workers\nworkers.TRAIN = {script!r}\n"
        code += "sys.exit(workers.main(sys.argv[1:]))"
        return [start([sys.executable, "-c", code, *args, "--workers", str(WORLD)], env=env)]
    return start_ranks(WORLD, args, script=script, env=env)


def _process(started: Sequence[Launched], fault: Fault, rank: int) -> int:
    """Return the process id of ``rank``, or of the launcher."""
    if not fault.launcher:
        return started[rank].process.pid
    return started[0].process.pid if rank == LAUNCHER else process_of_rank(started[0], rank)


def _wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60 * SLACK
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


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
    parser.add_argument("--strategies", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=20)
    own = parser.parse_args()
    caption = f"`--timeout {own.timeout:g}`, three processes of one host"
    record: dict[str, Any] = {
        "hardware": describe(threads=1), "timeout": own.timeout, "caption": caption,
        "columns": COLUMNS, "rows": [], "injections": [],
    }  # fmt: skip
    if own.json.exists():
        record = json.loads(own.json.read_text())
    done = {(one["strategy"], one["fault"], one["rank"]) for one in record["injections"]}
    for strategy, name, fault, rank in tqdm(_injections(own.strategies), unit="fault"):
        if (strategy, name, rank) in done:
            continue
        outcomes = []
        for _ in range(own.rounds):
            with tempfile.TemporaryDirectory() as folder:
                run_dir = Path(folder) / "run"
                outcomes.append(inject(run_dir, strategy, fault, rank, own.timeout))
        record["injections"].append({
            "strategy": strategy, "fault": name, "rank": rank,
            "seconds": [round(one.seconds, 1) for one in outcomes],
            "said": outcomes[0].said, "state": outcomes[0].state, "codes": outcomes[0].codes,
        })  # fmt: skip
        record["rows"] = rows_of(record["injections"])
        own.json.write_text(json.dumps(record, indent=1) + "\n")


def rows_of(injections: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a row for each fault of a rank: what all strategies say, and when each has ended."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for one in injections:
        of_rank = "launcher" if one["rank"] == LAUNCHER else str(one["rank"])
        row = found.setdefault(
            (one["fault"], one["rank"]),
            {"fault": one["fault"], "of_rank": of_rank, "lines": "–", **dict.fromkeys(ALL, "–")},
        )
        row[one["strategy"]] = ", ".join(f"{seconds:.0f} s" for seconds in one["seconds"])
        for line in one["said"]:
            said = f"`{_anonymous(line)}`"
            if said not in row["lines"]:
                row["lines"] = said if row["lines"] == "–" else f"{row['lines']}; {said}"
    return list(found.values())


def _anonymous(line: str) -> str:
    """Return the line without what is different each time."""
    line = line[max(line.find("error: "), 0) :].replace("|", "/")
    line = re.sub(r"silent for \d+ s", "silent for … s", line)
    return re.sub(r"pid \d+", "pid …", re.sub(r"host \S+,", "host …,", line))


def _injections(strategies: Sequence[str]) -> list[tuple[str, str, Fault, int]]:
    """Return what is injected: the strategy, the fault with its name, and the rank."""
    found = [
        (strategy, name, fault, rank)
        for strategy in strategies
        if strategy in STRATEGIES
        for name, fault in FAULTS.items()
        for rank in (0, 2)
        if not isinstance(fault.by, str) or _computes(strategy, rank)
    ]
    for strategy in strategies:
        found += [(strategy, f"killed, {name}", *of) for name, of in OTHERS.items()]
        if strategy in ("param-server backup", "observers"):
            found.append((strategy, "killed, under launch/local", GOES_ON, 2))
    start = KILLED._replace(launcher="torchrun", phase="start")
    return [*found, ("rpc exclusive", "killed, torchrun, at the start", start, LAUNCHER)]


def _computes(strategy: str, rank: int) -> bool:
    """Whether ``rank`` computes gradients of tasks of its own."""
    if strategy == "param-server remote":
        return False
    return rank > 0 or not strategy.startswith("param-server")


if __name__ == "__main__":
    main()
