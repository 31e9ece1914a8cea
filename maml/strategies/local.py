"""``--strategy local``: compute every task in this process."""

from torch import Tensor

from maml.config import Config
from maml.params import Params
from maml.processes.setup import choose_device, init_process
from maml.processes.world import World
from maml.strategies.base import Strategy
from maml.worker import Share, Worker

COMPONENTS = {"local": {"attribute": "Local", "help": "one process"}}


class Local(Strategy):
    """One process. The results of every other strategy must equal its results."""

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Differentiate all tasks here."""
        return self.worker.share(meta_params, ids, self.worker.learner)


def alone(config: Config, *, trains: bool = False) -> Local:
    """Set this process up, and return its strategy; ``trains`` is the argument of `Worker`."""
    world = World(0, 1, 0, 1, launched=False)
    init_process(config, world)
    return Local(config, world, Worker(config, choose_device(config, world), trains=trains))
