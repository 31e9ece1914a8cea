"""Seconds and bytes a step of every strategy over links with delay and loss (as root).

    python -m benchmarks.hosts [--json FILE] [--delays 0 5 20] [--losses 0 0.01]

Hosts are network namespaces of this machine (`tests/network.py`), one process with one computing
thread on each, started as a cluster's launcher does. Tasks are as few as there are hosts: what is
measured is the way between them. All links are made the same way, so that delays can be compared;
"trips" is by how many one-way delays a step is longer with the longest delay than with the least,
by the lower quartiles: what else the machine does only ever adds.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command import command_line, count, write
from benchmarks.hardware import describe
from benchmarks.markdown import grid
from benchmarks.scaling import TOPOLOGIES
from maml.run.log import read_metrics
from tests.launching import run_together
from tests.network import Network, has_netem, why_not

STRATEGIES = ("rpc chunk", "allreduce", "server sync", "server collective")
PRESET = "maml-glyphs-5way-1shot"
WARM_UP = 5
"""Iterations that are not counted: connections are made, windows grow."""
LIMIT_S = 600


def measure(network: Network, iterations: int) -> list[dict[str, Any]]:
    """Train with every strategy; return a row each."""
    hosts = len(network.addresses)
    common = [
        *(PRESET, "--iterations", str(WARM_UP + iterations), "--meta-batch-size", str(hosts)),
        *("--log-every", "1", "--checkpoint-every", "1000000", "--threads", "1"),
        *("--logger", "none", "--eval-every", "0", "--test-tasks", "0"),
    ]
    runs = {name: [*common, *TOPOLOGIES[name]] for name in STRATEGIES}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.metered", folder, json.dumps(runs)]
        run_together([network.by_hand(host, command) for host in range(hosts)], LIMIT_S)
        for name in STRATEGIES:
            rows = read_metrics(Path(folder) / name / "metrics.jsonl")[WARM_UP - 1 :]
            steps = list(itertools.pairwise(rows))
            seconds = [after["seconds"] - before["seconds"] for before, after in steps]
            low, median, high = statistics.quantiles(seconds, n=4)
            found.append(
                {
                    "strategy": name,
                    "delay_ms": network.delay_ms,
                    "loss": network.loss,
                    "seconds": median,
                    "quartiles": [low, high],
                    "link_bytes": (rows[-1]["link_bytes"] - rows[0]["link_bytes"]) / len(steps),
                    "wire_bytes": sum(row["wire_bytes"] for row in rows[1:]) / len(steps),
                }
            )
    return found


def table(report: dict[str, Any]) -> str:
    """Return a record as Markdown: a row for each strategy and loss, a column for each delay."""
    found = {(row["strategy"], row["loss"], row["delay_ms"]): row for row in report["rows"]}
    delays = sorted({delay for _, _, delay in found})
    cells = []
    for name, loss in itertools.product(STRATEGIES, sorted({loss for _, loss, _ in found})):
        rows = [found[name, loss, delay] for delay in delays]
        first, last = rows[0], rows[-1]
        longer = 1e3 * (last["quartiles"][0] - first["quartiles"][0])
        cells.append(
            [
                f"`{name}`",
                f"{100 * loss:g} %",
                *(f"{1e3 * row['seconds']:.1f}" for row in rows),
                f"{longer / (delays[-1] - delays[0]):.1f}" if len(delays) > 1 else "",
                f"{max(row['link_bytes'] for row in rows) / 1e3:.0f}",
                f"{last['wire_bytes'] / 1e3:.0f}",
            ]
        )
    header = [
        *("strategy", "loss", *(f"ms a step with {delay:g} ms" for delay in delays), "trips"),
        *("kB a step on rank 0's link, at most", "counted by the run"),
    ]
    return grid(header, cells)


def main() -> None:
    """Run the benchmark."""
    parser = command_line("hosts", __doc__)
    parser.add_argument("--hosts", type=count, default=2)
    parser.add_argument("--delays", nargs="+", type=float, default=[0, 5, 20], help="ms")
    parser.add_argument("--losses", nargs="+", type=float, default=[0, 0.01])
    parser.add_argument("--iterations", type=count, default=40, help="after a warm-up of 5")
    options = parser.parse_args()
    if why_not():
        sys.exit(f"error: {why_not()}")
    hardware = describe(1)
    links = "netem" if has_netem() else "relay"
    rows: list[dict[str, Any]] = []
    what = list(itertools.product(options.losses, options.delays))
    for loss, delay in tqdm(what, desc="links", leave=False):
        with Network(options.hosts, delay_ms=delay, loss=loss, links=links) as network:
            rows += measure(network, options.iterations)
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(f"{options.hosts} hosts, {PRESET}, {options.hosts} tasks a step; {links}, TCP {control}")
    report = {
        "hardware": hardware,
        "preset": PRESET,
        "hosts": options.hosts,
        "links": links,
        "congestion_control": control,
        "mtu": network.mtu,
        "rows": rows,
    }
    print(table(report))
    write(options.json, report)


if __name__ == "__main__":
    main()
