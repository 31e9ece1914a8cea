"""Strategies: where tasks run. One file a strategy; `build_strategy` knows them all."""

from __future__ import annotations

from collections.abc import Callable

from maml.config import Config
from maml.errors import UserError
from maml.processes.world import World
from maml.strategies.allreduce import AllReduce
from maml.strategies.base import Strategy
from maml.strategies.local import Local
from maml.strategies.param_server import build_param_server
from maml.strategies.rpc import Rpc
from maml.worker import Worker

STRATEGIES: dict[str, Callable[[Config, World, Worker], Strategy]] = {
    "local": Local,
    "rpc": Rpc,
    "allreduce": AllReduce,
    "param-server": build_param_server,
}


def resolve_strategy(config: Config, world: World) -> str:
    """Return the strategy's name: auto is local in one process and rpc under torchrun."""
    if config.strategy != "auto":
        if config.strategy == "local" and world.size > 1:
            raise UserError(
                f"--strategy local runs in one process, but torchrun started {world.size}"
            )
        return config.strategy
    return "rpc" if world.launched else "local"


def build_strategy(config: Config, world: World, worker: Worker) -> Strategy:
    """Return the strategy of ``config``, ready to be entered."""
    return STRATEGIES[resolve_strategy(config, world)](config, world, worker)


__all__ = ["STRATEGIES", "Strategy", "build_strategy", "resolve_strategy"]
