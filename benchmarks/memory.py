"""Peak memory of a meta-gradient against the number of inner steps: ours and peers.

    python -m benchmarks.memory [--network ResidualCNN] [--json FILE]

Each measurement is a process of its own, with one thread; its peak is that of the whole process
(ru_maxrss).
"""

import sys
from typing import Any

from tqdm import tqdm

from benchmarks import record
from benchmarks.process import Peer
from benchmarks.settings import MEMORY
from maml.processes.program import run_program
from maml.run.provenance import describe

PEERS = ("ours", "ours-mixed", "ours-reverse", "learn2learn", "plain", "vmap")


def measure(name: str, network: str) -> dict[str, Any]:
    """Return a peer's row: the MiB of its process after one repetition, by inner steps."""
    peaks = []
    for setting in tqdm(MEMORY[network], desc=name, leave=False):
        peer = Peer(name, setting, 1)
        peaks.append(peer.ask("run")["peak_mib"])
        peer.close()
    return {"peer": name, "peak_mib": peaks}


def main(arguments: list[str]) -> None:
    """Run the benchmark."""
    parser = record.parser("memory", __doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--network", choices=MEMORY, default="conv4")
    options = parser.parse_args(arguments)
    steps = [str(setting.config.inner_steps) for setting in MEMORY[options.network].values()]
    report: dict[str, Any] = {
        "hardware": describe(1),
        "columns": {"inner steps": "{peer}"}
        | {n: f"{{peak_mib[{i}]:.0f}}" for i, n in enumerate(steps)},
        "rows": [],
    }
    for peer in options.peers:
        report["rows"].append(measure(peer, options.network))
        record.write(options.json, report)
    print(record.table(report))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
