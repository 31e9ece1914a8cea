"""Checks that need an RPC world, run in processes of their own by ``test_rpc.py``.

python -m tests.strategies.rpc_checks NAME… (under torchrun for more than one process)
"""

from __future__ import annotations

import dataclasses
import sys

import torch
from torch.distributed.rpc.internal import _internal_rpc_pickler

import maml.strategies.rpc as rpc_module
from maml.config import Config
from maml.config.presets import PRESETS
from maml.errors import WorkerLostError
from maml.processes.program import run_program
from maml.processes.world import World
from maml.strategies.reference import Reference
from maml.strategies.rpc import Rpc
from maml.worker import Worker

IDS = torch.arange(2)


def make_config(**changes: object) -> Config:
    changes = {"dtype": "float64", "timeout": 30.0, **changes}
    return dataclasses.replace(PRESETS["maml-glyphs-5way-1shot"], **changes)  # type: ignore[arg-type]


def make(**changes: object) -> Rpc:
    config = make_config(**changes)
    return Rpc(config, World.from_environment(), Worker(config, torch.device("cpu")))


def _forget(step: int, flat: torch.Tensor, calls: int) -> None:
    """In place of `rpc_module._begin`: parameters arrive outside the graph."""
    rpc_module.this(rpc_module.Rpc).gathering.begin(step, flat.detach(), calls)


def missing_gradient_is_refused() -> None:
    """Where rank 1 has lost the graph, a gradient without its tasks would come home: no step."""
    with make(partition="exclusive") as strategy:
        if not strategy.drives:
            strategy.serve()
            return
        learner = strategy.worker.learner
        share = strategy.meta_step(learner.meta_parameters(), IDS)
        assert share.n_tasks == 2
        rpc_module._begin = _forget
        said: list[str] = []

        def survives(rank: int, line: str) -> bool:
            said.append(line)
            return True

        # It would end this process, by the line that rank 1 has told.
        strategy.liveness.survives = survives
        try:
            strategy.meta_step(learner.meta_parameters(), IDS)
        except WorkerLostError:
            assert len(said) == 1 and "rank 1 " in said[0] and "graph" in said[0], said
            return
        raise AssertionError("stepped without gradients")


def learner_travels_without_parameters() -> None:
    """What is pickled of a learner does not grow with them: they follow as one tensor."""
    with make() as strategy:
        learner = strategy.worker.learner
        params = learner.meta_parameters()
        pickled, tensors = _internal_rpc_pickler.serialize(Reference(learner))
        # 450 kB of parameters.
        assert not tensors and len(pickled) < 10_000, len(pickled)
        arrived = _internal_rpc_pickler.deserialize(pickled, tensors).put(params)
        assert arrived is not learner
        assert list(arrived.meta_parameters()) == list(params)
        for name, tensor in arrived.meta_parameters().items():
            assert torch.equal(tensor, params[name])


def main(arguments: list[str]) -> None:
    for name in arguments:
        globals()[name]()
        if World.from_environment().rank == 0:
            print(f"{name}: holds", flush=True)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
