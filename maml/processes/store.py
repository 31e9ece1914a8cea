"""The launcher's key-value store, as the processes of one start see it."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from maml.processes.launcher import STORE, launcher_holds_store
from maml.processes.rendezvous import meet
from maml.processes.world import World

START_TIMEOUT = 300.0
"""Seconds that processes wait for each other at the start, where one may be slow to load."""


def _connect(world: World, timeout: float) -> Store:
    """Connect to the store of ``MASTER_ADDR``; where no launcher holds one, rank 0 does."""
    seconds = timedelta(seconds=timeout)
    store: Store
    if launcher_holds_store():
        store, *_ = next(rendezvous("env://", world.rank, world.size, timeout=seconds))
        return store
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if world.rank == 0 and not _served:
        listener = _listener(world, address)
        # Without a listener of its own it would be open to all hosts that reach this one.
        _served.append(TCPStore(
            *address, None, True, seconds, False, master_listen_fd=listener.detach()
        ))  # fmt: skip
    return TCPStore(*address, None, False, seconds, False)


_served: list[TCPStore] = []
"""Rank 0's own, kept as long as its process."""


def _listener(world: World, address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens: at no other address where all processes are on one host.

    Raises:
        RuntimeError: if it cannot, since another process listens there, for one.
    """
    host, port = address
    try:
        if STORE in os.environ:
            return socket.socket(fileno=int(os.environ[STORE]))
        if world.size > world.local_size:
            return socket.create_server(("", port), backlog=2048)
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=2048)
    except OSError as error:
        raise RuntimeError(f"cannot listen there: {error.strerror or error}") from error


@functools.cache
def _meet(world: World) -> tuple[Store, str]:
    """Return a connection, kept as rank 0 may be the one that holds the store, and `meet`'s name.

    Once a process: whoever has met all others knows them.
    """
    store = _connect(world, START_TIMEOUT)
    return store, meet(store, world.rank, world.size, START_TIMEOUT)


def launchers_store(world: World) -> Store:
    """Return the launcher's store, as those see it who were started together.

    Raises:
        RuntimeError: as `meet`, or where nothing is reached at ``MASTER_ADDR``.
        WorkerLostError: as `meet`.
    """
    store, name = _meet(world)
    return PrefixStore(name, store)


def own_connection(world: World, timeout: float = START_TIMEOUT) -> Store:
    """Return `launchers_store` over a connection of its own: who waits in one holds it up."""
    return PrefixStore(_meet(world)[1], _connect(world, timeout))


def new_connection(world: World, timeout: float) -> Store:
    """Return `own_connection` to a store that may be gone.

    Raises:
        OSError: if nothing listens there. torch would wait, and print a page of its own frames.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    socket.create_connection(address, timeout).close()
    return own_connection(world, timeout)


def _rendezvous(url: str, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Serve ``maml://``, the rendezvous of RPC, which takes no store but a URL."""
    world = World.from_environment()
    yield own_connection(world), world.rank, world.size


register_rendezvous_handler("maml", _rendezvous)
