"""This checkout beside another one of the project, interleaved: what a change costs, or wins.

    git clone . ../before && git -C ../before checkout <commit>
    MAML_DATA=~/data python -m benchmarks.versus ../before --json result.json

Each checkout has a process of its own for each subject. In each round both do the same repetition,
one after the other, and the order alternates. Reported is the median of the rounds' ratios, of time
and of processor time; the latter says more on a machine that others use, too.

Subjects are the meta-gradients of `benchmarks.settings`, and evaluations of real test tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = ("omniglot-5w1s", "omniglot-5w5s", "omniglot-20w1s", "miniimagenet-5w1s", "sinusoid")
EVALUATIONS = ("evaluate-omniglot-5w1s", "evaluate-miniimagenet-5w1s")

# Runs in either checkout: only what both have may be used.
_CHILD = """
import dataclasses, json, sys, time
subject, threads = sys.argv[1], int(sys.argv[2])
try:
    from maml.processes import allocator
except ImportError:
    from maml import allocator
allocator.tune()
import torch
torch.set_num_threads(threads)
from benchmarks import peers
from benchmarks.settings import SETTINGS, make_tasks
from maml.learners import build_learner
from maml.worker import Worker

kind, _, name = subject.rpartition("evaluate-")
if subject.startswith("evaluate-"):
    setting = SETTINGS[name]
    steps, queries, count = (10, 15, 4) if "mini" in name else (3, 1, 32)
    config = dataclasses.replace(
        setting.config, inner_lr=0.01 if "mini" in name else 0.4, eval_inner_steps=steps,
        eval_queries=queries, data_root=sys.argv[3], task_batch=count,
    )
    worker = Worker(config, torch.device("cpu"))
    params, ids = worker.learner.meta_parameters(), torch.arange(count)
    def once():
        rows = worker.evaluate(params, "test", ids, worker.learner)
        return rows.double().sum().item()
else:
    setting = SETTINGS[subject]
    # The preset's own choice: a tiny network takes one thread whatever there are.
    threads = setting.config.threads or threads
    torch.set_num_threads(threads)
    learner = build_learner(setting.config)
    count = setting.tasks
    repetition = peers.build("ours", learner, make_tasks(setting.config, count), threads)
    def once():
        return sum(g.double().abs().sum().item() for g in repetition().values())
print(json.dumps([count, once()]), flush=True)
for line in sys.stdin:
    repetitions = int(line)
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(repetitions):
        once()
    print(
        json.dumps([time.perf_counter() - wall, time.process_time() - processor]), flush=True
    )
"""


class _Side:
    """A checkout's process for one subject."""

    def __init__(self, checkout: Path, subject: str, threads: int) -> None:
        data_root = os.environ.get("MAML_DATA", "")
        command = [sys.executable, "-W", "ignore", "-c", _CHILD, subject, str(threads), data_root]
        self._process = subprocess.Popen(
            command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.tasks, self.sum = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"error: a process of {self._process.args!r} ended")
        return json.loads(line)

    def run(self, repetitions: int) -> tuple[float, float]:
        """Return seconds and processor seconds of so many repetitions."""
        assert self._process.stdin is not None
        print(repetitions, file=self._process.stdin, flush=True)
        wall, processor = self._answer()
        return wall, processor

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def measure(other: Path, subject: str, *, rounds: int, seconds: float, threads: int) -> Any:
    """Return one subject's record."""
    here = Path(__file__).resolve().parents[1]
    sides = {"before": _Side(other, subject, threads), "now": _Side(here, subject, threads)}
    first = {name: side.run(2) for name, side in sides.items()}
    repetitions = max(1, round(seconds / (first["before"][0] / 2)))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 else reversed(list(sides)):
            times[name].append(sides[name].run(repetitions))
    before, now = times["before"], times["now"]
    ratios = [
        statistics.median(b[i] / n[i] for b, n in zip(before, now, strict=True)) for i in (0, 1)
    ]
    tasks = sides["now"].tasks * repetitions
    difference = abs(sides["now"].sum / sides["before"].sum - 1)
    for side in sides.values():
        side.end()
    return {
        "subject": subject,
        "tasks_per_second": {
            name: tasks / statistics.median(wall for wall, _ in of) for name, of in times.items()
        },
        "speed_ratio": ratios[0],
        "processor_ratio": ratios[1],
        "relative_difference_of_result": difference,
        "rounds": rounds,
        "repetitions": repetitions,
    }


def main() -> None:
    """Measure, print a line a subject, and write the records."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus", allow_abbrev=False)
    parser.add_argument("checkout", type=Path, help="another checkout of the project")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--subjects", nargs="+", choices=SETTINGS + EVALUATIONS, default=SETTINGS + EVALUATIONS
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a checkout in each round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if not (options.checkout / "maml").is_dir():
        raise SystemExit(f"error: {options.checkout}: no checkout of this project")
    records = []
    for subject in options.subjects:
        record = measure(
            options.checkout,
            subject,
            rounds=options.rounds,
            seconds=options.seconds,
            threads=options.threads,
        )
        rates = record["tasks_per_second"]
        print(
            f"{subject}: {rates['before']:.1f} → {rates['now']:.1f} tasks/s; "
            f"{record['speed_ratio']:.3f} × the speed, {record['processor_ratio']:.3f} × by "
            f"processor time; results differ by {record['relative_difference_of_result']:.1e}",
            flush=True,
        )
        records.append(record)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
