"""Train one configuration with several strategies in the same processes, one after another.

torchrun … -m tests.strategies.topologies FOLDER CONFIGURATIONS, the second as JSON:
``{name: [arguments of train_maml.py]}``; each trains into ``FOLDER/name``, and leaves there, in
``rows.pt``, what the strategy's evaluations returned: ``{split: [T, metrics]}``.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from maml.config.cli import parse
from maml.config.presets import with_values
from maml.processes.program import run_program
from maml.strategies import build_strategy
from maml.strategies.base import Strategy
from maml.trainer import Trainer


def main(arguments: list[str]) -> None:
    folder, configurations = Path(arguments[0]), json.loads(arguments[1])
    for name, flags in configurations.items():
        rows: dict[str, list[Tensor]] = {}
        with (
            mock.patch("maml.training.setup.build_strategy", functools.partial(recorded, rows)),
            # Pictures take most of a tiny run's time.
            mock.patch("maml.training.testing.draw"),
            # On a busy machine W&B's own process takes longer than a user would wait.
            mock.patch("maml.run.log.LAST_WORDS", 60.0),
        ):
            trainer = Trainer(with_values(parse(flags), run_dir=str(folder / name)))
            assert trainer.run() == 0
        if trainer.setup.world.rank == 0:
            content = {split: torch.cat(rounds) for split, rounds in rows.items()}
            torch.save(content, folder / name / "rows.pt")
            print(f"{name}: done", flush=True)


def recorded(rows: dict[str, list[Tensor]], *args: Any) -> Strategy:
    """Build the strategy; what its evaluations return is added to ``rows`` of their split."""
    strategy = build_strategy(*args)
    evaluate = strategy.evaluate

    def evaluated(meta_params: Any, split: str, ids: Tensor) -> Tensor:
        found = evaluate(meta_params, split, ids)
        rows.setdefault(split, []).append(found)
        return found

    strategy.evaluate = evaluated  # type: ignore[method-assign]
    return strategy


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
