"""One forward pass for all observers' requests, or one for each, with 1 to 10 observers.

    python -m benchmarks.observers --json observers.json --picture docs/observers.png
    python -m benchmarks.observers --record observers.json --picture docs/observers.png  # draw only

The benchmark of torch's tutorial on batched RPC, with an environment for each observer: how many
actions the agent answers in a second of acting, and how long an observer waits for one. For each
number of observers, the same processes play in both ways in turn, so that both meet the same load.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import record
from maml.config.parser import at_least
from maml.config.presets import PRESETS, with_values
from maml.errors import UserError
from maml.processes.program import run_program
from maml.run.files import read_rows
from maml.run.provenance import describe

WAYS: dict[str, Any] = {"batched": "true", "unbatched": "false"}
"""The values of ``--batched-inference`` by the names of the ways."""
COLUMNS = {
    "observers": "{observers}",
    **{f"{way}, actions/s": f"{{{way}[per_second]:,.0f}}" for way in WAYS},
    "ratio": "{ratio[1]:.2f} ({ratio[0]:.2f}–{ratio[2]:.2f})",
    **{f"{way}, p50 / p95": f"{{{way}[p50]:.1f}} / {{{way}[p95]:.1f}} ms" for way in WAYS},
}


def main(arguments: list[str]) -> None:
    """Measure or read a record; print and draw it."""
    if "RANK" in os.environ:
        return play(*arguments)
    parser = record.parser("observers", __doc__)
    parser.add_argument("--observers", nargs="+", type=at_least(1), default=[*range(1, 11)])
    text = "how often both ways play, in turn"
    parser.add_argument("--rounds", type=at_least(1), default=3, help=text)
    parser.add_argument("--horizon", type=at_least(1), default=100, help="actions an iteration")
    parser.add_argument("--iterations", type=at_least(2), default=5, help="the first is left out")
    parser.add_argument("--record", type=Path, help="measure nothing: draw this record")
    parser.add_argument("--picture", type=Path, help="draw the record here, as .png")
    options = parser.parse_args(arguments)
    if options.record is None:
        made = measure(options)
        record.write(options.json, made)
    else:
        made = json.loads(options.record.read_text())
    if options.picture is not None:
        draw(made, options.picture)
    print(record.table(made))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record: for each number of observers, one start of all its processes."""
    made = {name: getattr(options, name) for name in ("rounds", "horizon", "iterations")}
    hardware, rows = describe(1), []
    for n in tqdm(options.observers, unit="start"):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n + 1}"]
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, *launcher, "-m", "benchmarks.observers", folder]
            command += [json.dumps(made | {"meta_batch_size": n})]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if done.returncode:
                raise UserError(f"{n} observers: {done.stderr.decode(errors='replace')}")
            rows.append({"observers": n, **figures(Path(folder), options.rounds)})
    return {"hardware": hardware, **made, "columns": COLUMNS, "rows": rows}


def play(folder: str, settings: str) -> None:
    """In each process of a start: play in both ways in turn, each into a folder of its own."""
    from maml.trainer import Trainer

    values = json.loads(settings)
    preset = with_values(
        PRESETS["reinforce-cartpole"], strategy="observers", threads=1, log_every=1, test_tasks=0,
        logger="none",
    )  # fmt: skip
    for number in range(values.pop("rounds")):
        for way, batched in WAYS.items():
            run_dir = f"{folder}/{way}-{number}"
            Trainer(with_values(preset, batched_inference=batched, run_dir=run_dir, **values)).run()


def figures(folder: Path, rounds: int) -> dict[str, Any]:
    """Return each way's medians over rounds, and the range and median of the rounds' ratios."""
    of_way: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for way, medians in of_way.items():
        for number in range(rounds):
            rows = read_rows(folder / f"{way}-{number}" / "metrics.jsonl")[1:]
            flat = [row["action_ms"] | {"per_second": row["requests_per_second"]} for row in rows]
            medians.append(_medians(flat))
    rates = [[one["per_second"] for one in medians] for medians in of_way.values()]
    ratios = sorted(batched / single for batched, single in zip(*rates, strict=True))
    ratio = [ratios[0], statistics.median(ratios), ratios[-1]]
    return {way: _medians(medians) for way, medians in of_way.items()} | {"ratio": ratio}


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def draw(made: dict[str, Any], picture: Path) -> None:
    """Draw throughput, its ratio and latency against the number of observers."""
    from maml.plots import style

    rows = made["rows"]
    numbers = [row["observers"] for row in rows]
    drawn, ((rate, ratio, wait),) = style.figure(1, 3, size=(4.2, 3.2))
    for way, (color, _) in style.look_of(list(WAYS)).items():
        look = {"color": color, "marker": "o", "markersize": 4}
        rate.plot(numbers, [row[way]["per_second"] for row in rows], label=way, **look)
        for name, dash in (("p50", "-"), ("p95", ":")):
            line = [row[way][name] for row in rows]
            wait.plot(numbers, line, dash, label=f"{way}, {name}", **look)
    low, middle, high = zip(*(row["ratio"] for row in rows), strict=True)
    ratio.fill_between(numbers, low, high, color=style.GREY, alpha=0.3, label="all rounds")
    ratio.plot(numbers, middle, color=style.BLACK, marker="o", markersize=4, label="median")
    ratio.axhline(1.0, color=style.GREY, linewidth=1)
    for axis, label in (
        (rate, "actions a second, all observers"),
        (ratio, "batched ÷ unbatched"),
        (wait, "ms from a request to its action"),
    ):
        style.finish(axis, "observers", label)
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in (rate, wait):
        axis.set_ylim(bottom=0)
    style.save(drawn, picture.with_suffix(""), pdf=False)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
