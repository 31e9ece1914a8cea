"""Peak memory of a meta-gradient against the number of inner steps: ours and peers.

    python -m benchmarks.memory [--network ResidualCNN] [--json FILE]

Each measurement runs in its own process with one thread. The peak is that of the whole process
(ru_maxrss).
"""

import sys
from typing import Any

from tqdm import tqdm

from benchmarks import record
from benchmarks.process import Peer
from benchmarks.settings import MEMORY_STEPS, OWN
from maml.processes.program import run_program
from maml.run.provenance import describe

PEERS = ("ours", "ours-mixed", "ours-reverse", "learn2learn", "plain", "vmap")


def main(arguments: list[str]) -> None:
    """Run the benchmark."""
    parser = record.parser("memory", __doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--network", choices=("conv4", *OWN), default="conv4")
    options = parser.parse_args(arguments)
    columns = {str(n): f"{{peak_mib[{i}]:.0f}}" for i, n in enumerate(MEMORY_STEPS)}
    rows: list[dict[str, Any]] = []
    report = {"hardware": describe(1), "columns": {"inner steps": "{peer}"} | columns, "rows": rows}
    for name in options.peers:
        rows.append({"peer": name, "peak_mib": []})
        for n in tqdm(MEMORY_STEPS, desc=name, leave=False):
            with Peer(name, f"memory-{options.network}-{n}", 1) as peer:
                rows[-1]["peak_mib"].append(peer.ask("run")["peak_mib"])
        record.write(options.json, report)
    print(record.table(report))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
