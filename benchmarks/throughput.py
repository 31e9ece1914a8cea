"""Tasks per second of the meta-gradient: this project against its peers, interleaved.

    python -m benchmarks.throughput                          # all settings, a table each
    python -m benchmarks.throughput --settings omniglot-5w1s --rounds 30 --json result.json

Every peer is a process of its own and gets all cores; in each round every peer does one
repetition while the others wait, so that what else the machine does meets all alike. Before it is
timed, a peer's float64 gradient is checked against ours. Each peer runs as its users run it and
once more with the allocator settings that our launcher applies.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from benchmarks.command import command_line, count, write
from benchmarks.hardware import describe
from benchmarks.markdown import grid
from benchmarks.peers import PEERS
from benchmarks.process import GEMM_REPEATS, GEMM_SIZE, GEMMS
from benchmarks.settings import SETTINGS, make_tasks
from maml.learners import build_learner

WARM_UP = 3
"""Rounds that are not counted."""
TOLERANCE = 1e-6
"""Largest accepted difference of a peer's float64 gradient, relative to its largest element."""


class Peer:
    """A peer's process."""

    def __init__(self, name: str, setting: str, threads: int, *, tuned: bool, float64: bool):
        self.name, self.tuned = name, tuned
        self.key = name, tuned
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        # A file: nobody reads a pipe while the peer runs.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "benchmarks.process", name, setting]
        command += ["--threads", str(threads)]
        command += ["--tuned"] * tuned + ["--float64"] * float64
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self._expect("ready")

    def ask(self, line: str) -> float:
        """Send a command and return its seconds.

        Raises:
            RuntimeError: if the process has ended: for want of memory, say.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return float(self._expect())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _expect(self, word: str | None = None) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer or (word is not None and answer != word):
            self._errors.seek(0)
            self._process.kill()
            code = self._process.wait()
            raise RuntimeError(f"{self.name}: exit code {code} {self._errors.read()[-2000:]}")
        return answer


def gradient_errors(peers: list[str], setting: str, threads: int) -> dict[str, float]:
    """Return each peer's float64 error against ours-torch, relative to the largest element."""
    gradients = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(["ours-torch", *peers]):
            peer = Peer(name, setting, threads, tuned=False, float64=True)
            file = Path(folder) / name
            peer.ask(f"check {file}")
            peer.close()
            gradients[name] = torch.load(file, weights_only=True)
    reference = gradients["ours-torch"]
    largest = max(float(tensor.abs().max()) for tensor in reference.values())
    return {
        name: max(float((g[k] - reference[k]).abs().max()) for k in reference) / largest
        for name, g in gradients.items()
        if name in peers
    }


def gflop_per_task(setting: str) -> float:
    """Count the multiplications and additions of one task's meta-gradient in reverse mode."""
    config = SETTINGS[setting].config
    from maml.config.presets import with_values

    learner = build_learner(with_values(config, meta_gradient="reverse", kernels="torch"))
    with FlopCounterMode(display=False) as counter:
        learner.outer_gradient(learner.meta_parameters(), make_tasks(config, 1))
    return counter.get_total_flops() / 1e9


def measure(setting: str, peers: list[str], threads: int, rounds: int) -> dict[str, Any]:
    """Measure one setting; return its record."""
    errors = gradient_errors(peers, setting, threads)
    for name, error in errors.items():
        if not error < TOLERANCE:
            raise RuntimeError(f"{name} computes another gradient on {setting}: error {error:.1e}")
    runners = [Peer(name, setting, threads, tuned=False, float64=False) for name in GEMMS]
    for name in peers:
        for tuned in (False, True):
            runners.append(Peer(name, setting, threads, tuned=tuned, float64=False))
    seconds: dict[tuple[str, bool], list[float]] = {p.key: [] for p in runners}
    lost = {}
    try:
        for number in tqdm(range(WARM_UP + rounds), desc=setting, unit="round", leave=False):
            for peer in runners:
                if peer.key in lost:
                    continue
                try:
                    taken = peer.ask("run")
                except RuntimeError as error:
                    # The others go on: all together may not fit into the memory.
                    lost[peer.key] = str(error)
                    print(f"{setting}: {error}", file=sys.stderr)
                    continue
                if number >= WARM_UP:
                    seconds[peer.key].append(taken)
    finally:
        for peer in runners:
            peer.close()
    n_tasks = SETTINGS[setting].tasks
    gemm_seconds = min(
        statistics.median(seconds[name, False]) for name in GEMMS if (name, False) not in lost
    )
    roofline = GEMM_REPEATS * 2 * GEMM_SIZE**3 / gemm_seconds / 1e9
    gflop = gflop_per_task(setting)
    rows = []
    for name in peers:
        for tuned in (False, True):
            if (name, tuned) in lost:
                continue
            rates = sorted(n_tasks / s for s in seconds[name, tuned])
            rate = statistics.median(rates)
            rows.append(
                {
                    "peer": name,
                    "allocator": "ours" if tuned else "as users run it",
                    "tasks_per_second": rate,
                    "quartiles": [rates[len(rates) // 4], rates[-1 - len(rates) // 4]],
                    "roofline_fraction": rate * gflop / roofline,
                    "gradient_error": errors[name],
                }
            )
    return {
        "setting": setting,
        "title": SETTINGS[setting].title,
        "tasks": n_tasks,
        "rounds": rounds,
        "gemm_gflops": roofline,
        "gflop_per_task": gflop,
        "rows": rows,
        "lost": [[*key, said] for key, said in lost.items()],
    }


def table(report: dict[str, Any], setting: str) -> str:
    """Return a setting as Markdown: rates, and how many times each rate ours is."""
    record = next(record for record in report["records"] if record["setting"] == setting)
    ours = [row["tasks_per_second"] for row in record["rows"] if row["peer"] == "ours"]
    best = max(ours, default=math.nan)
    rows = [
        [
            row["peer"],
            row["allocator"],
            f"{row['tasks_per_second']:.1f}",
            "{:.1f}–{:.1f}".format(*row["quartiles"]),
            f"{best / row['tasks_per_second']:.2f} ×",
            f"{100 * row['roofline_fraction']:.1f} %",
        ]
        for row in record["rows"]
    ]
    title = (
        f"**{record['title']}**: {record['tasks']} tasks, median of {record['rounds']} rounds; "
        f"sgemm {record['gemm_gflops']:.0f} GFLOP/s, {record['gflop_per_task']:.3f} GFLOP a task"
    )
    header = ["peer", "allocator", "tasks/s", "quartiles", "ours is", "of sgemm"]
    return f"{title}\n\n{grid(header, rows)}"


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw tasks per second relative to learn2learn as users run it, one group a setting."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(records), figsize=(3.2 * len(records) + 1, 3.6), layout="constrained", squeeze=False
    )
    for axis, record in zip(axes[0], records, strict=True):
        names = list(dict.fromkeys(row["peer"] for row in record["rows"]))
        for shift, allocator, color in (
            (-0.2, "as users run it", "#9db8d9"),
            (0.2, "ours", "#3465a4"),
        ):
            rows = {r["peer"]: r for r in record["rows"] if r["allocator"] == allocator}
            axis.barh(
                [i + shift for i, name in enumerate(names) if name in rows],
                [rows[name]["tasks_per_second"] for name in names if name in rows],
                height=0.38,
                color=color,
                label="our allocator settings" if allocator == "ours" else allocator,
            )
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_title(record["title"], fontsize=9)
        axis.set_xlabel("tasks per second")
        axis.grid(axis="x", alpha=0.25)
    axes[0][0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the benchmark."""
    parser = command_line("throughput", __doc__, plot=True)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--threads", type=count, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=count, default=15)
    options = parser.parse_args()
    peers = list(dict.fromkeys(["ours", *options.peers]))
    report: dict[str, Any] = {"hardware": describe(options.threads), "records": []}
    for setting in options.settings:
        able = [peer for peer in peers if peer in SETTINGS[setting].peers]
        record = measure(setting, able, options.threads, options.rounds)
        report["records"].append(record)
        write(options.json, report)
        print(table(report, setting), end="\n\n", flush=True)
    if options.plot:
        draw(report["records"], options.plot)


if __name__ == "__main__":
    main()
