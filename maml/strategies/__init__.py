"""Strategies decide where tasks run. Each strategy has its own file, which declares its facts."""

from maml.config import Config, registry
from maml.errors import UserError
from maml.processes.world import World
from maml.strategies.base import Strategy
from maml.worker import Worker

COMPONENTS = {
    "auto": {
        "attribute": "build_strategy",
        "help": "local in one process; under torchrun rpc, or observers for reinforce",
        "reads": ("partition", "rpc_threads", "batch_wait"),
    }
}


def resolve_strategy(config: Config, world: World) -> str:
    """Return the strategy's name; auto means local, or the learner's strategy under torchrun."""
    if config.strategy != "auto":
        if config.strategy == "local" and world.size > 1:
            raise UserError(
                f"--strategy local runs in one process, but torchrun started {world.size}"
            )
        return config.strategy
    return registry.learner(config.learner).strategy if world.launched else "local"


def build_strategy(config: Config, world: World, worker: Worker) -> Strategy:
    """Return the strategy of ``config``, ready to be entered."""
    known = registry.find("strategy", resolve_strategy(config, world))
    with registry.calling(strategy=known):
        strategy: Strategy = known.maker()(config, world, worker)
    return strategy
