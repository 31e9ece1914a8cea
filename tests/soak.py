"""Disturb runs for some minutes, and check that they end with the undisturbed run's bits.

    python -m tests.soak --minutes 30 --seed 0 [--json FILE]

Each round trains with a strategy whose sums have one order. At random moments it kills, stops or
slows one of the processes, or kills or suspends all. The same command starts a run again that has
ended early. In the end, the parameters must be those of an undisturbed run.
"""

import argparse
import json
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.launching import Launched, start_ranks
from tests.runs import last
from tests.strategies.faults import IN_ORDER, suspend

COMMAND = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "8", "--eval-every", "0"),
    *("--compile", "off", "--iterations", "600", "--log-every", "20", "--checkpoint-every", "50"),
    *("--timeout", "20"),
]  # fmt: skip
FAULTS = ("kill", "kill all", "stop", "slow", "suspend")
LIMIT_S = 600.0
"""The limit of one round, however busy the machine is."""


def soak(minutes: float, seed: int) -> list[dict[str, Any]]:
    """Disturb one run after the other; return a row for each."""
    chance = random.Random(seed)
    rows: list[dict[str, Any]] = []
    undisturbed: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        while time.monotonic() < until:
            key = chance.choice(list(IN_ORDER)), chance.choice((2, 3))
            where = Path(folder) / str(len(rows))
            if key not in undisturbed:
                alone = Path(folder) / f"{len(rows)}-undisturbed"
                _finish(_start(*key, alone))
                undisturbed[key] = last(alone)["model"]
            row = {"strategy": key[0], "processes": key[1], **_disturbed(*key, where, chance)}
            expected, found = undisturbed[key], last(where)["model"]
            row["equal"] = all(torch.equal(found[name], expected[name]) for name in expected)
            rows.append(row)
            print(json.dumps(row), flush=True)
            assert row["equal"], row
    return rows


def _disturbed(strategy: str, size: int, run_dir: Path, chance: random.Random) -> dict[str, Any]:
    """Train to the end through faults; return what was done."""
    faults: list[str] = []
    began, starts = time.monotonic(), 0
    while not (run_dir / "result.json").exists():
        assert time.monotonic() < began + LIMIT_S, f"{strategy}: not done after {faults}"
        ranks, starts = _start(strategy, size, run_dir), starts + 1
        # The last start is not disturbed, or a slow machine would never finish.
        while len(faults) < 4 and any(one.process.poll() is None for one in ranks):
            # Before all have met, peers cannot notice a killed process, and wait five minutes.
            _wait_until_it_trains(ranks, run_dir)
            time.sleep(chance.uniform(0.5, 12))
            faults.append(chance.choice(FAULTS))
            _do(faults[-1], ranks, chance)
            if faults[-1].startswith("kill"):
                break
        _finish(ranks, expect=None)
    return {"faults": faults, "starts": starts, "seconds": round(time.monotonic() - began, 1)}


def _wait_until_it_trains(ranks: list[Launched], run_dir: Path) -> None:
    while all(one.process.poll() is None for one in ranks):
        with suppress(OSError, ValueError):
            status = json.loads((run_dir / "status.json").read_text())
            if status["process"]["pid"] == ranks[0].process.pid:
                return
        time.sleep(0.1)


def _start(strategy: str, size: int, run_dir: Path) -> list[Launched]:
    return start_ranks(size, [*COMMAND, *IN_ORDER[strategy], "--run-dir", str(run_dir)])


def _finish(ranks: list[Launched], expect: int | None = 0) -> None:
    """Wait until all ranks have ended, which they must do after every fault of one of them."""
    for one in ranks:
        one.wait(LIMIT_S / 5, expect=expect)


def _do(fault: str, ranks: list[Launched], chance: random.Random) -> None:
    if fault == "suspend":
        # Longer than --timeout: all ranks sleep, so all go on.
        return suspend(chance.sample(ranks, len(ranks)), chance.uniform(21, 30))
    victims = ranks if fault == "kill all" else [chance.choice(ranks)]
    if fault.startswith("kill"):
        for victim in victims:
            with suppress(ProcessLookupError):
                victim.process.send_signal(signal.SIGKILL)
    elif fault == "stop":
        # Shorter than --timeout: the others wait, and all go on.
        suspend(victims, chance.uniform(1, 8))
    else:
        for _ in range(10):
            suspend(victims, 0.15)


COLUMNS = {
    "strategy": "`{strategy}`", "runs": "{runs}", "faults": "{faults}", "starts": "{starts}",
    "with the same bits": "{equal}",
}  # fmt: skip


def summary(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each strategy."""
    rows = []
    for strategy in dict.fromkeys(row["strategy"] for row in done):
        of_it = [row for row in done if row["strategy"] == strategy]
        faults = Counter(fault for row in of_it for fault in row["faults"])
        rows.append({
            "strategy": strategy, "runs": len(of_it),
            "faults": ", ".join(f"{n} × {fault}" for fault, n in sorted(faults.items())),
            "starts": sum(row["starts"] for row in of_it),
            "equal": sum(row["equal"] for row in of_it),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    own = parser.parse_args()
    done = soak(own.minutes, own.seed)
    print(f"{len(done)} runs, {sum(len(row['faults']) for row in done)} faults, all equal")
    if own.json is not None:
        from maml.run.provenance import describe

        record = {
            "hardware": describe(threads=1), "minutes": own.minutes, "seed": own.seed,
            "columns": COLUMNS, "rows": summary(done), "measured": done,
        }  # fmt: skip
        own.json.write_text(json.dumps(record, indent=1) + "\n")
