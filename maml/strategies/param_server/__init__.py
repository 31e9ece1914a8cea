"""``--strategy param-server``: rank 0 serves the model, the others train.

``over_rpc`` has the server of all modes and its trainers, ``remote_forward`` the trainers that call
the model where it is, ``over_collectives`` the synchronous server without RPC.
"""

from __future__ import annotations

from maml.config import Config
from maml.processes.world import World
from maml.strategies.base import Strategy
from maml.strategies.param_server.over_collectives import CollectiveServer
from maml.strategies.param_server.over_rpc import ParameterServer
from maml.worker import Worker

COMPONENTS = {
    "param-server": {
        "attribute": "build_param_server",
        "help": "rank 0 serves the model, the others train",
        "reads": (
            "rpc_threads", "ps_mode", "ps_transport", "ps_forward", "ps_max_staleness",
            "ps_backup_workers",
        ),
    }
}  # fmt: skip


def build_param_server(config: Config, world: World, worker: Worker) -> Strategy:
    """Return the parameter server of ``--ps-transport``, ready to be entered."""
    if config.ps_transport == "collective":
        return CollectiveServer(config, world, worker)
    return ParameterServer(config, world, worker)
