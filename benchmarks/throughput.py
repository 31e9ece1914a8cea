"""Speed and peak memory of the meta-gradient: this project against its peers, interleaved.

    python -m benchmarks.throughput                          # all settings of speed, a table each
    python -m benchmarks.throughput --settings omniglot-5w1s --rounds 30 --json result.json
    python -m benchmarks.throughput --settings memory-conv4-50 --threads 1 --rounds 1

Every peer runs in its own process and gets all cores. In each round every peer does one repetition
while the others wait, so that other load on the machine affects all peers alike. Before the timing,
the float64 gradient of each peer is checked against ours. Each peer runs as its users run it: ours
has the allocator settings that our programs apply. The peak memory is that of the whole process.
"""

import contextlib
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import record
from benchmarks.peers import PEERS
from benchmarks.process import Peer
from benchmarks.settings import MEMORY, SETTINGS
from maml.config.parser import at_least
from maml.errors import UserError
from maml.processes.program import run_program
from maml.run.provenance import describe

WARM_UP = 3
"""Rounds that are not counted."""
TOLERANCE = 1e-6
"""Largest accepted difference of a peer's float64 gradient, relative to our largest element."""
COLUMNS = {
    "peer": "{peer}",
    "tasks/s": "{tasks_per_second:.1f}",
    "quartiles": "{quartiles[0]:.1f}–{quartiles[1]:.1f}",
    "ours is": "{times:.2f} ×",
    "MiB": "{peak_mib:.0f}",
}
ALL = SETTINGS | MEMORY


def gradient_errors(peers: list[str], setting: str, threads: int) -> dict[str, float]:
    """Return the float64 error against ours-torch of each peer that can compute the setting."""
    gradients = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(["ours-torch", *peers]):
            file = Path(folder) / name
            try:
                with Peer(name, setting, threads, float64=True) as peer:
                    peer.ask(f"check {file}")
            except UserError as error:
                if name == "ours-torch":
                    raise
                print(f"{setting}: {error}", file=sys.stderr)
                continue
            gradients[name] = torch.load(file, weights_only=True)
    reference = gradients["ours-torch"]
    largest = max(float(tensor.abs().max()) for tensor in reference.values())
    return {
        name: max(float((g[k] - reference[k]).abs().max()) for k in reference) / largest
        for name, g in gradients.items()
        if name in peers
    }


def timed(
    setting: str, peers: list[str], threads: int, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Return each peer's figures of a repetition, for each round, without peers that fail."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    with contextlib.ExitStack() as ending:
        going = [ending.enter_context(Peer(name, setting, threads)) for name in peers]
        for number in tqdm(range(WARM_UP + rounds), desc=setting, unit="round", leave=False):
            for peer in list(going):
                try:
                    taken = peer.ask("run")
                except UserError as error:  # all together may not fit into the memory
                    going.remove(peer)
                    del figures[peer.name]
                    print(f"{setting}: {error}", file=sys.stderr)
                    continue
                if number >= WARM_UP:
                    figures[peer.name].append(taken)
    return figures


def measure(setting: str, peers: list[str], threads: int, rounds: int) -> dict[str, Any]:
    """Measure one setting; return its record. UserError: a peer computes another gradient."""
    errors = gradient_errors(peers, setting, threads)
    for name, error in errors.items():
        if not error < TOLERANCE:
            raise UserError(f"{name} computes another gradient on {setting}: error {error:.1e}")
    figures, (_, tasks, title, _) = timed(setting, list(errors), threads, rounds), ALL[setting]
    rates = {name: sorted(tasks / one["seconds"] for one in of) for name, of in figures.items()}
    medians = {name: statistics.median(of_it) for name, of_it in rates.items()}
    rows = [
        {
            "peer": name,
            "tasks_per_second": medians[name],
            "quartiles": [of_it[len(of_it) // 4], of_it[-1 - len(of_it) // 4]],
            "times": medians.get("ours", math.nan) / medians[name],
            "gradient_error": errors[name],
            "peak_mib": figures[name][-1]["peak_mib"],
        }
        for name, of_it in rates.items()
    ]
    caption = f"**{title}**: {tasks} tasks, median of {rounds} rounds"
    return {"setting": setting, "caption": caption, "columns": COLUMNS, "rows": rows}


def main(arguments: list[str]) -> None:
    """Run the benchmark."""
    parser = record.parser("throughput", __doc__)
    parser.add_argument("--settings", nargs="+", choices=ALL, default=list(SETTINGS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--threads", type=at_least(1), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=at_least(1), default=15)
    options = parser.parse_args(arguments)
    peers = list(dict.fromkeys(["ours", *options.peers]))
    report: dict[str, Any] = {"hardware": describe(options.threads), "records": []}
    for setting in options.settings:
        able = [peer for peer in peers if peer in ALL[setting].peers]
        report["records"].append(measure(setting, able, options.threads, options.rounds))
        record.write(options.json, report)
        print(record.table(report, setting), end="\n\n", flush=True)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
