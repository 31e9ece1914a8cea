"""The launcher's key-value store, as the processes of one start see it.

A store may outlive the processes that it was for. torchrun keeps one through all its restarts, and
those who come after would find what those before have left: addresses at which nobody answers. So
each start has keys of its own.
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
from maml.processes.world import World

ANSWER = 1.0
"""Seconds after which a rank that has no answer looks whether rank 0 is another one by now."""

START_TIMEOUT = 300.0
"""Seconds that processes wait for each other at the start, where one may be slow to load."""


def _connect(world: World, timeout: float) -> Store:
    """Connect to the store of ``MASTER_ADDR``; where no launcher holds one, rank 0 does."""
    seconds = timedelta(seconds=timeout)
    address = _address()
    if world.rank == 0 and not launcher_holds_store() and not _served:
        listener = _listener(world)
        # Without a listener of its own it would be open to all hosts that reach this one.
        _served.append(TCPStore(
            *address, None, True, seconds, False, master_listen_fd=listener.detach()
        ))  # fmt: skip
    return TCPStore(*address, None, False, seconds, False)


_served: list[TCPStore] = []
"""Rank 0's own, kept as long as its process."""

_rooms = Counter[str]()


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _listener(world: World) -> socket.socket:
    """Return a socket that listens, on one host at that address alone; RuntimeError if taken."""
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
    """Return the name of this start of ``size`` ranks: the same in all, and of no other start.

    Rank 0 thinks of it, and answers each of the others by a word of theirs. One that has found the
    name of an earlier start is not answered, nor is a process of another run. They wait for each
    other for so many ``seconds``.

    Raises:
        WorkerLostError: on rank 0, naming the first that does not come.
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
                message = f"rank {other} did not come to the start within {seconds:g} s"
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
def _name(world: World) -> str:
    """Return `meet`'s name, once a process: whoever has met all others knows them."""
    return meet(_connect(world, START_TIMEOUT), world.rank, world.size, START_TIMEOUT)


def own_connection(world: World, room: str, timeout: float = START_TIMEOUT) -> Store:
    """Return a room of the launcher's store, for those who were started together; raise as `meet`.

    Over a connection of its own: who waits in one holds it up.
    """
    if world.size == 1:
        return HashStore()
    return PrefixStore(f"{_name(world)} {room}", _connect(world, timeout))


def new_room(name: str) -> str:
    """Return the next room's name: a process may do several runs; the store outlives them all."""
    _rooms[name] += 1
    return f"{name} {_rooms[name]}"


def exchange(store: Store, world: World, content: Any) -> list[Any]:
    """Return what each rank gives, as JSON holds it; RuntimeError if one does not come.

    Rank 0 is the last to have it.
    """
    text = json.dumps(content).encode()
    return [
        json.loads(one)
        for one in synchronize(store, text, world.rank, world.size, "of ", START_TIMEOUT)
    ]


def new_connection(world: World, room: str, timeout: float) -> Store:
    """Return `own_connection` to a store that may be gone: OSError then.

    torch would wait, and print a page of its own frames.
    """
    socket.create_connection(_address(), timeout).close()
    return own_connection(world, room, timeout)


def _rendezvous(url: str, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Serve ``maml://``, the rendezvous of RPC, which takes no store but a URL."""
    world = World.from_environment()
    yield own_connection(world, "rpc"), world.rank, world.size


register_rendezvous_handler("maml", _rendezvous)
