"""Train with several workers on this host, which nobody outside it can reach.

    launch/local PRESET [--workers N] [--restarts N] [--flag value …]

torchrun's key-value store listens at every address of a host, and whoever reaches it can write
there. Here the store, RPC and gloo listen at the loopback alone. The rest is torchrun's: its agent
starts the workers, watches them, and starts all again when one was lost, which continue from the
last checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from maml.config.cli import parse
from maml.errors import UserError
from maml.processes.memory import OutOfMemory
from maml.processes.program import run_program
from maml.processes.signals import heeded, leave_lost_terminal

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

TRAIN = Path(__file__).resolve().parents[1] / "train_maml.py"
TIMEOUT = timedelta(minutes=5)


def main(arguments: list[str]) -> int:
    """Start the workers; return the exit code of the first that failed, or 0."""
    workers, restarts, others = read(arguments)
    return _launch(_default_workers() if workers is None else workers, restarts, others)


def read(arguments: list[str]) -> tuple[int | None, int, list[str]]:
    """Return the workers, if they are given, the restarts, and all other flags, which are checked.

    Raises:
        UserError: for a flag that cannot work.
        SystemExit: after the help.
    """
    parser = argparse.ArgumentParser(
        prog="launch/local", description=__doc__, add_help=False, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags are those of train_maml.py: python train_maml.py --help",
    )  # fmt: skip
    parser.add_argument("-h", "--help", action="store_true", help="say this")
    parser.add_argument("--workers", default=None, help="processes (default: GPUs, else cores)")
    parser.add_argument("--restarts", default="0", help="how often to start again (default: 0)")
    own, others = parser.parse_known_args(arguments)
    if own.help or not others:
        parser.print_help()
        raise SystemExit(0 if own.help else 2)
    # What is wrong with a flag is said once, and before anything is started.
    parse(others, also=("--workers", "--restarts"))
    workers = None if own.workers is None else _number("--workers", own.workers, least=1)
    return workers, _number("--restarts", own.restarts, least=0), others


def _number(flag: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{flag} {text}: must be a whole number, at least {least}")
    return int(text)


def _default_workers() -> int:
    """Return one a GPU, where there are some, and else one a core."""
    import torch

    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def _launch(workers: int, restarts: int, arguments: list[str]) -> int:
    # Only so that the agent does not warn: the program shares the cores out among its workers.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    # Each process says itself what is wrong.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register("loopback", lambda _: _loopback())
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=workers, rdzv_backend="loopback",
        run_id=f"local-{os.getpid()}", max_restarts=restarts, monitor_interval=0.1,
        local_addr="127.0.0.1", signals_to_handle=",".join(number.name for number in heeded()),
    )  # fmt: skip
    memory = OutOfMemory()
    try:
        launch_agent(config, sys.executable, [str(TRAIN), *arguments])
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        code = first.exitcode
        if code == 2:  # bad input, of which the last line is the worker's own
            return code
        by = signal.Signals(-code).name if code < 0 else f"with exit code {code}"
        if code == -signal.SIGKILL:
            largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            by += memory.cause("the largest process", largest)
        print(f"launch/local: rank {rank} (pid {first.pid}) ended {by}", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as stopped:
        leave_lost_terminal()
        return 128 + int(stopped.sigval)
    return 0


def _loopback() -> RendezvousHandler:
    """Return the rendezvous of one host alone: a store that listens at the loopback."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
    from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    port = listener.getsockname()[1]
    served = TCPStore(
        "127.0.0.1", port, None, True, TIMEOUT, False, master_listen_fd=listener.detach()
    )

    class Loopback(RendezvousHandler):  # type: ignore[misc, unused-ignore]
        """One agent, which is there."""

        use_agent_store = True

        def get_backend(self) -> str:
            return "loopback"

        def next_rendezvous(self) -> RendezvousInfo:
            store = PrefixStore("agent", served)
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """There is nobody else to be told."""

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return f"local-{os.getpid()}"

        def shutdown(self) -> bool:
            return True

    return Loopback()


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
