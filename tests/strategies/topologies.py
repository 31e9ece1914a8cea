"""Train one configuration with several strategies in the same processes, one after another.

torchrun … -m tests.strategies.topologies FOLDER CONFIGURATIONS, the second as JSON:
``{name: [arguments of train_maml.py]}``; each trains into ``FOLDER/name``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from maml.cli import parse
from maml.presets import with_values
from maml.program import run_program
from maml.trainer import Trainer


def main(arguments: list[str]) -> None:
    folder, configurations = Path(arguments[0]), json.loads(arguments[1])
    for name, flags in configurations.items():
        config = with_values(parse(flags), run_dir=str(folder / name))
        assert Trainer(config).run() == 0
        if os.environ["RANK"] == "0":
            print(f"{name}: done", flush=True)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
