"""``--strategy param-server``: rank 0 serves the model, the others train.

``over_rpc`` has the server of all modes and its trainers. ``remote_forward`` has trainers that call
the model on the server. ``over_collectives`` has the synchronous server without RPC.
"""

from maml.config import Config
from maml.errors import UserError
from maml.processes.world import World
from maml.strategies.base import Strategy
from maml.strategies.param_server.over_collectives import CollectiveServer
from maml.strategies.param_server.over_rpc import ParameterServer
from maml.strategies.param_server.remote_forward import RemoteForward
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
    """Return the parameter server that the flags select, ready to be entered."""
    if world.size == 1:
        raise UserError("--strategy param-server: needs 2 processes: one serves, others train")
    if config.ps_transport == "collective":
        return CollectiveServer(config, world, worker)
    kind = RemoteForward if config.ps_forward == "remote" else ParameterServer
    return kind(config, world, worker)
