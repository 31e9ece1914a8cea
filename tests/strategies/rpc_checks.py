"""That a gradient which does not come home is refused: run by ``test_rpc.py`` under torchrun."""

import torch

import maml.strategies.rpc as rpc_module
from maml.config.presets import PRESETS, with_values
from maml.errors import WorkerLostError
from maml.processes.program import run_program
from maml.processes.world import World
from maml.strategies.rpc import Rpc
from maml.worker import Worker

IDS = torch.arange(2)


def make() -> Rpc:
    preset = PRESETS["maml-glyphs-5way-1shot"]
    config = with_values(preset, dtype="float64", timeout=30.0, partition="exclusive")
    return Rpc(config, World.from_environment(), Worker(config, torch.device("cpu")))


def _forget(step: int, flat: torch.Tensor, calls: int) -> None:
    """In place of `rpc_module._begin`: parameters arrive outside the graph."""
    rpc_module.this(rpc_module.Rpc).gathering.begin(step, flat.detach(), calls)


def main(arguments: list[str]) -> None:
    """Where rank 1 has lost the graph, a gradient without its tasks would come home: no step."""
    with make() as strategy:
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
            print("holds", flush=True)
            return
        raise AssertionError("stepped without gradients")


if __name__ == "__main__":
    run_program(main, [])
