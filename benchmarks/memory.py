"""Peak memory of a meta-gradient against the number of inner steps: ours and peers.

    python -m benchmarks.memory [--json FILE]

Each measurement is a process of its own, with one thread and our allocator settings; its peak is
that of the whole process (ru_maxrss).
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from benchmarks.command import command_line, write
from benchmarks.markdown import table
from benchmarks.process import Peer
from benchmarks.settings import MEMORY
from maml.run.provenance import describe

PEERS = ("ours", "ours-mixed", "ours-reverse", "learn2learn", "vmap")


def measure(peer: str) -> dict[str, Any]:
    """Return a peer's row: the MiB of its process after one repetition, by inner steps."""
    peaks = []
    for setting in tqdm(MEMORY, desc=peer, leave=False):
        process = Peer(peer, setting, 1, tuned=True)
        peaks.append(process.ask("run")["peak_mib"])
        process.close()
    return {"peer": peer, "peak_mib": peaks}


def main() -> None:
    """Run the benchmark."""
    parser = command_line("memory", __doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    options = parser.parse_args()
    steps = [str(setting.config.inner_steps) for setting in MEMORY.values()]
    report: dict[str, Any] = {
        "hardware": describe(1),
        "columns": {"inner steps": "{peer}"}
        | {n: f"{{peak_mib[{i}]:.0f}}" for i, n in enumerate(steps)},
        "rows": [],
    }
    try:
        for peer in options.peers:
            report["rows"].append(measure(peer))
            write(options.json, report)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    print(table(report))


if __name__ == "__main__":
    main()
