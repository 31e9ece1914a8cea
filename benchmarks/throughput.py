"""Tasks per second of the meta-gradient: this project against its peers, interleaved.

    python -m benchmarks.throughput                          # all settings, a table each
    python -m benchmarks.throughput --settings omniglot-5w1s --rounds 30 --json result.json

Every peer is a process of its own and gets all cores; in each round every peer does one
repetition while the others wait, so that what else the machine does meets all alike. Before it is
timed, a peer's float64 gradient is checked against ours. Each peer runs as its users run it and
once more with the allocator settings that our launcher applies.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from benchmarks.command import command_line, count, write
from benchmarks.markdown import table
from benchmarks.peers import OURS, PEERS
from benchmarks.process import GEMM_REPEATS, GEMM_SIZE, GEMMS, Peer
from benchmarks.settings import SETTINGS, make_tasks
from maml.config.presets import with_values
from maml.learners import build_learner
from maml.plots import style
from maml.run.provenance import describe

WARM_UP = 3
"""Rounds that are not counted."""
TOLERANCE = 1e-6
"""Largest accepted difference of a peer's float64 gradient, relative to its largest element."""
COLUMNS = {
    "peer": "{peer}",
    "allocator": "{allocator}",
    "tasks/s": "{tasks_per_second:.1f}",
    "quartiles": "{quartiles[0]:.1f}–{quartiles[1]:.1f}",
    "ours is": "{times:.2f} ×",
    "of sgemm": "{sgemm_percent:.1f} %",
}


def gradient_errors(peers: list[str], setting: str, threads: int) -> dict[str, float]:
    """Return each peer's float64 error against ours-torch, relative to the largest element."""
    gradients = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(["ours-torch", *peers]):
            peer = Peer(name, setting, threads, float64=True)
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
    config = with_values(SETTINGS[setting].config, **OURS["ours-torch"])
    learner = build_learner(config)
    with FlopCounterMode(display=False) as counter:
        learner.outer_gradient(learner.meta_parameters(), make_tasks(config, 1))
    return counter.get_total_flops() / 1e9


def timed(
    setting: str, peers: list[str], threads: int, rounds: int
) -> tuple[dict[tuple[str, bool], list[float]], list[list[Any]]]:
    """Return the seconds of each peer's repetitions, by name and allocator, and those that failed.

    In each round each peer has one. One that fails leaves the others going: all together may not
    fit into the memory.
    """
    runners = [Peer(name, setting, threads) for name in GEMMS]
    runners += [
        Peer(name, setting, threads, tuned=tuned) for name in peers for tuned in (False, True)
    ]
    seconds: dict[tuple[str, bool], list[float]] = {(p.name, p.tuned): [] for p in runners}
    lost: list[list[Any]] = []
    going = list(runners)
    try:
        for number in tqdm(range(WARM_UP + rounds), desc=setting, unit="round", leave=False):
            for peer in list(going):
                try:
                    taken = peer.ask("run")["seconds"]
                except RuntimeError as error:
                    going.remove(peer)
                    del seconds[peer.name, peer.tuned]
                    lost.append([peer.name, peer.tuned, str(error)])
                    print(f"{setting}: {error}", file=sys.stderr)
                    continue
                if number >= WARM_UP:
                    seconds[peer.name, peer.tuned].append(taken)
    finally:
        for peer in runners:
            peer.close()
    return seconds, lost


def measure(setting: str, peers: list[str], threads: int, rounds: int) -> dict[str, Any]:
    """Measure one setting; return its record."""
    errors = gradient_errors(peers, setting, threads)
    for name, error in errors.items():
        if not error < TOLERANCE:
            raise RuntimeError(f"{name} computes another gradient on {setting}: error {error:.1e}")
    seconds, lost = timed(setting, peers, threads, rounds)
    products = [statistics.median(seconds.pop((name, False), [math.inf])) for name in GEMMS]
    roofline = GEMM_REPEATS * 2 * GEMM_SIZE**3 / min(products) / 1e9
    gflop, n_tasks = gflop_per_task(setting), SETTINGS[setting].tasks
    rates = {key: sorted(n_tasks / s for s in taken) for key, taken in seconds.items()}
    medians = {key: statistics.median(of_it) for key, of_it in rates.items()}
    best = max((rate for (name, _), rate in medians.items() if name == "ours"), default=math.nan)
    rows = [
        {
            "peer": name,
            "allocator": "ours" if tuned else "as users run it",
            "tasks_per_second": medians[name, tuned],
            "quartiles": [of_it[len(of_it) // 4], of_it[-1 - len(of_it) // 4]],
            "times": best / medians[name, tuned],
            "sgemm_percent": 100 * medians[name, tuned] * gflop / roofline,
            "gradient_error": errors[name],
        }
        for (name, tuned), of_it in rates.items()
    ]
    caption = (
        f"**{SETTINGS[setting].title}**: {n_tasks} tasks, median of {rounds} rounds; "
        f"sgemm {roofline:.0f} GFLOP/s, {gflop:.3f} GFLOP a task"
    )
    return {
        "setting": setting,
        "title": SETTINGS[setting].title,
        "tasks": n_tasks,
        "rounds": rounds,
        "gemm_gflops": roofline,
        "gflop_per_task": gflop,
        "caption": caption,
        "columns": COLUMNS,
        "rows": rows,
        "lost": lost,
    }


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw tasks per second relative to learn2learn as users run it, one group a setting."""
    figure, axes = style.figure(1, len(records), (3.4, 3.6))
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
