"""Peak memory of a meta-gradient against the number of inner steps: ours and peers.

    python -m benchmarks.memory [--json FILE] [--plot FILE]

Each measurement is a process of its own; its peak is that of the whole process (ru_maxrss), and
its growth what one repetition adds to the process with network and tasks in place.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command import command_line, write
from benchmarks.markdown import grid

SETTING, TASKS = "omniglot-5w1s", 8
STEPS = (1, 5, 10, 25, 50)
PEERS = {
    "ours": ("ours", {}),
    "ours, mixed in torch": ("ours", {"meta_gradient": "mixed", "kernels": "torch"}),
    "ours, reverse": ("ours", {"meta_gradient": "reverse"}),
    "learn2learn": ("learn2learn", {}),
    "vmap": ("vmap", {}),
}


def measure(peer: str, steps: int) -> tuple[float, float]:
    """Return (peak, growth) in MiB of one repetition of ``peer`` in this process."""
    import torch

    from benchmarks.peers import build
    from benchmarks.settings import SETTINGS, make_tasks
    from maml.config.presets import with_values
    from maml.learners import build_learner
    from maml.processes import allocator

    allocator.tune()
    torch.set_num_threads(1)
    name, changes = PEERS[peer]
    # A small rate: random pixels must not blow 50 steps up.
    config = with_values(SETTINGS[SETTING].config, inner_steps=1, inner_lr=0.01, **changes)
    tasks = make_tasks(config, TASKS)
    # One step first: libraries, caches and working memory that any use needs.
    build(name, build_learner(config), tasks, 1)()
    before = peak_mib()
    config = with_values(config, inner_steps=steps)
    build(name, build_learner(config), tasks, 1)()
    return peak_mib(), peak_mib() - before


def peak_mib() -> float:
    """Return the most memory that this process has held so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def table(report: dict[str, Any]) -> str:
    """Return a record as Markdown: MiB of the process, by inner steps."""
    rows = report["rows"]
    peaks = {(row["peer"], row["steps"]): row["peak_mib"] for row in rows}
    steps = list(dict.fromkeys(row["steps"] for row in rows))
    return grid(
        ["inner steps", *map(str, steps)],
        [
            [peer, *(f"{peaks[peer, n]:.0f}" for n in steps)]
            for peer in dict.fromkeys(row["peer"] for row in rows)
        ],
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the peaks against the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for peer in dict.fromkeys(row["peer"] for row in rows):
        own = [row for row in rows if row["peer"] == peer]
        axis.plot(
            [row["steps"] for row in own],
            [row["peak_mib"] for row in own],
            marker="o",
            linewidth=2.5 if peer == "ours" else 1.2,
            label=peer,
        )
    axis.set_xlabel("inner steps")
    axis.set_ylabel("peak memory of the process, MiB")
    axis.set_yscale("log")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    axis.set_title(f"{SETTING}, {TASKS} tasks at once, second order", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the benchmark, or one measurement of it (``--one``)."""
    parser = command_line("memory", __doc__, plot=True)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--one", nargs=2, metavar=("PEER", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    from benchmarks.hardware import describe

    rows: list[dict[str, Any]] = []
    for peer in options.peers:
        for steps in tqdm(STEPS, desc=peer, leave=False):
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory"]
            done = subprocess.run(
                [*command, "--one", peer, str(steps)], capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(f"{peer}, {steps} steps: {done.stderr.strip().splitlines()[-1:]}")
            peak, growth = json.loads(done.stdout.splitlines()[-1])
            rows.append({"peer": peer, "steps": steps, "peak_mib": peak, "growth_mib": growth})
        own = {row["steps"]: row for row in rows if row["peer"] == peer}
        numbers = ", ".join(
            f"{s}: {r['peak_mib']:.0f} (+{r['growth_mib']:.0f})" for s, r in own.items()
        )
        print(f"{peer:<22} MiB by steps  {numbers}", flush=True)
    write(options.json, {"hardware": describe(1), "setting": SETTING, "tasks": TASKS, "rows": rows})
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
