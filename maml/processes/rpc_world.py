"""RPC between all processes of a run: its beginning and its end."""

import atexit
import contextlib
import socket
import warnings
from collections.abc import Callable, Iterator

import torch.distributed.rpc as rpc
import torchopt.distributed as todist

from maml.processes.finding import within
from maml.processes.interface import choose_interface
from maml.processes.store import START_TIMEOUT
from maml.processes.world import World


@contextlib.contextmanager
def rpc_world(
    world: World, *, threads: int, timeout: float, worker_init: Callable[[], None]
) -> Iterator[None]:
    """TorchOpt's ``auto_init_rpc`` with a say in how it ends.

    Every process calls ``worker_init`` before any is served. The end waits for nobody: RPC's own
    graceful shutdown needs the launcher's store, and a frozen peer would hold it for ever. Whoever
    must wait for others does so before, by `maml.strategies.shutdown`.
    """
    choose_interface(world)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads,
        rpc_timeout=max(START_TIMEOUT, timeout),
        # Not shared memory: its threads never sleep, and take what the tasks need of each core.
        _transports=["ibv", "uv"],
        _channels=["basic"],
    )
    # Alone, there is nobody to meet.
    options.init_method = f"tcp://127.0.0.1:{_free_port()}" if world.size == 1 else "maml://"

    @todist.auto_init_rpc(worker_init, rpc_backend_options=options)
    def enter() -> None:
        """Be initialised; the decorator does the work."""

    # Emitted inside torch's own RPC initialisation, about torch's own call.
    warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
    try:
        enter()
    finally:
        # It registers a graceful shutdown without a timeout at exit.
        atexit.unregister(rpc.shutdown)
    # From here on `maml.processes.liveness` finds who is silent; before, one may just be slow to
    # import. 0: no limit.
    rpc._set_rpc_timeout(0)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        within(5.0, lambda: rpc.shutdown(graceful=False), None)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
