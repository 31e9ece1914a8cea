"""The launcher's key-value store, as the processes of one start see it.

A store may outlive its processes. torchrun keeps one store through all restarts. The restarted
processes would find entries of the earlier start, such as addresses at which no process answers.
So each start has its own keys.
"""

import functools
import json
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.utils.store import synchronize
from torch.distributed.rendezvous import register_rendezvous_handler

from maml.errors import WorkerLostError, timed_out
from maml.processes.launcher import STORE, launcher_holds_store
from maml.processes.namespaces import in_own_network
from maml.processes.world import World

ANSWER = 1.0
"""After this many seconds without an answer, a rank checks whether there is a new rank 0."""

START_TIMEOUT = 300.0
"""Seconds that processes wait for each other at the start, where one may be slow to load."""


@in_own_network
def _connect(world: World, timeout: float) -> Store:
    """Connect to the store at ``MASTER_ADDR``; if no launcher holds one, rank 0 opens it."""
    seconds = timedelta(seconds=timeout)
    for given in _given:
        store = given.clone()
        store.set_timeout(seconds)
        return store
    address = _address()
    if world.rank == 0 and not launcher_holds_store() and not _served:
        listener = _listener(world)
        # Without this listener, the store would be open to all hosts that reach this one.
        _served.append(TCPStore(
            *address, None, True, seconds, False, master_listen_fd=listener.detach()
        ))  # fmt: skip
    return TCPStore(*address, None, False, seconds, False)


_served: list[TCPStore] = []
"""The store that rank 0 holds itself, kept as long as its process."""

_given: list[Any] = []
"""The store of a process group that a user has made: it takes the launcher's place."""

_rooms = Counter[str]()


def use(store: Store) -> None:
    """Let the processes meet in the store of a process group that exists already."""
    _given.append(store)


def _address() -> tuple[str, int]:
    for given in _given:
        served = given._underlying_non_prefix_store
        return served.host, served.port  # a TCPStore's; no other loses a connection
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _listener(world: World) -> socket.socket:
    """Return a listening socket (on one host only at ``MASTER_ADDR``); RuntimeError if taken."""
    host, port = _address()
    try:
        if STORE in os.environ:
            return socket.socket(fileno=int(os.environ[STORE]))
        if world.size > world.local_size:
            return socket.create_server(("", port), backlog=2048)
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=2048)
    except OSError as error:
        raise RuntimeError(f"cannot listen there: {error.strerror or error}") from error


def meet(store: Store, rank: int, size: int, seconds: float) -> str:
    """Return the name of this start: the same on all ``size`` ranks, different for each start.

    Rank 0 chooses the name. It answers each other rank with a word that this rank has chosen. Rank
    0 does not answer a rank that found the name of an earlier start, nor a process of another run.
    The ranks wait ``seconds`` for each other.

    Raises:
        WorkerLostError: on rank 0, naming the first rank that is missing.
        RuntimeError: on another rank, if rank 0 does not answer.
    """
    word = uuid.uuid4().hex
    deadline = time.monotonic() + seconds
    if rank == 0:
        store.set("start", word)
        for other in range(1, size):
            key = f"{word} {other}"
            try:
                store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                message = f"rank {other} did not join the start within {seconds:g} s"
                raise WorkerLostError(message) from error
            store.set(f"{key} {store.get(key).decode()}", "")
        return word
    while time.monotonic() < deadline:
        try:
            store.wait(["start"], timedelta(seconds=ANSWER))
            name = store.get("start").decode()
            key = f"{name} {rank}"
            store.set(key, word)
            store.wait([f"{key} {word}"], timedelta(seconds=ANSWER))
        except RuntimeError as error:
            if not timed_out(error):
                raise
        else:
            return name
    raise RuntimeError(f"it did not answer within {seconds:g} s")


@functools.cache
def start_name(world: World) -> str:
    """Return the name from `meet`. A process meets the others only once, and keeps the name."""
    return meet(_connect(world, START_TIMEOUT), world.rank, world.size, START_TIMEOUT)


def own_connection(world: World, room: str, timeout: float = START_TIMEOUT) -> Store:
    """Return a room of the launcher's store for the ranks of this start; raise as `meet` does.

    The room has its own connection, because a request that waits blocks its connection.
    """
    if world.size == 1:
        return HashStore()
    return PrefixStore(f"{start_name(world)} {room}", _connect(world, timeout))


def new_room(name: str) -> str:
    """Return a new room's name. A process may do several runs, and the store outlives them all."""
    _rooms[name] += 1
    return f"{name} {_rooms[name]}"


def exchange(store: Store, world: World, content: Any) -> list[Any]:
    """Return every rank's ``content``, as read from JSON; RuntimeError if a rank is missing.

    Rank 0 returns only after all other ranks have the contents.
    """
    text = json.dumps(content).encode()
    return [
        json.loads(one)
        for one in synchronize(store, text, world.rank, world.size, "of ", START_TIMEOUT)
    ]


@in_own_network
def new_connection(world: World, room: str, timeout: float) -> Store:
    """Return `own_connection` to a store that may be gone; raise OSError if it is.

    Without the check, torch would wait and print a page of its own stack frames.
    """
    socket.create_connection(_address(), timeout).close()
    return own_connection(world, room, timeout)


def _rendezvous(url: str, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Serve ``maml://``, the rendezvous of RPC, which accepts a URL but no store."""
    world = World.from_environment()
    yield own_connection(world, "rpc"), world.rank, world.size


register_rendezvous_handler("maml", _rendezvous)
