"""Train configurations one after another, with the bytes that crossed this host's links.

python -m tests.strategies.metered FOLDER CONFIGURATIONS (on each host, as a launcher starts it)

CONFIGURATIONS is JSON, ``{name: [arguments of train_maml.py]}``; each trains into
``FOLDER/name``. Rows of metrics.jsonl get ``link_bytes``: what rank zero's host has sent and
received over all interfaces but the loopback, counted by the kernel since they were made.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import maml.trainer
from maml.config.cli import parse
from maml.config.presets import with_values
from maml.processes import allocator, scheduling
from maml.processes.program import run_program
from maml.run.log import Row, RunLog
from maml.training import testing


def link_bytes() -> int:
    """Return the bytes that this host's network interfaces have sent and received."""
    return sum(
        int((interface / "statistics" / f"{way}_bytes").read_text())
        for interface in Path("/sys/class/net").iterdir()
        if interface.name != "lo"
        for way in ("rx", "tx")
    )


class MeteredLog(RunLog):
    """A run's log with one more column."""

    def write(self, row: Row) -> None:
        """Append one row with ``link_bytes``."""
        super().write({**row, "link_bytes": link_bytes()})


def main(arguments: list[str]) -> None:
    """Train all configurations."""
    folder, configurations = Path(arguments[0]), json.loads(arguments[1])
    allocator.tune()
    scheduling.give_way()
    maml.trainer.RunLog = MeteredLog  # type: ignore[attr-defined]
    # Nobody looks at these runs' pictures, which take longer than a short run.
    testing.draw = lambda *_: None
    for name, flags in configurations.items():
        config = with_values(parse(flags), run_dir=str(folder / name))
        assert maml.trainer.Trainer(config).run() == 0
        if os.environ.get("RANK", "0") == "0":
            print(f"{name}: done", flush=True)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
