"""A network of the job's own, for the connections between its processes on one host.

Torch's store, RPC and gloo take no password, and RPC runs what it receives. Every user of a host
reaches its loopback address. So ``launch/local`` makes a network namespace, which no other user can
enter. Only the threads that connect processes enter it: all else keeps the host's network, as do
downloads and W&B. See the manual pages network_namespaces(7) and user_namespaces(7).
"""

import ctypes
import fcntl
import functools
import os
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

from maml.processes.world import World

NETWORK = "MAML_NETWORK"
"""Environment variable of launch/local: the file descriptors of the job's network namespace and, if
it needed one, of the user namespace that owns the network."""

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # <sched.h>
_SET_FLAGS, _UP = 0x8914, 0x1  # <linux/sockios.h>, <net/if.h>
_FIRST_USER, _NOBODY = 1000, 65534
"""The first user id that systems give to people, and the id of no user."""

P = ParamSpec("P")
T = TypeVar("T")


def new_network() -> tuple[socket.socket, list[int]]:
    """Return a listening socket at the loopback of a new network, and what `NETWORK` names.

    Raises:
        OSError: If the system allows this process no network of its own.
    """
    here, there = socket.socketpair()
    with here, there:
        # A fork makes it, because this process could not come back.
        child = os.fork()
        if child == 0:
            _make(there)
        os.waitpid(child, 0)
        answer, descriptors, _, _ = socket.recv_fds(here, 16, 3)
    if not descriptors:
        raise OSError(int(answer), os.strerror(int(answer)))
    return socket.socket(fileno=descriptors[0]), descriptors[1:]


def _make(answer: socket.socket) -> None:
    """Make the network, send its descriptors or the number of an error, and exit."""
    try:
        made, user, group = ["net"], os.geteuid(), os.getegid()
        try:
            _call("unshare", _NEW_NET)
        except PermissionError:  # Without privileges, in a user namespace where we have them.
            _call("unshare", _NEW_USER | _NEW_NET)
            made.append("user")
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        with socket.socket() as loopback:
            fcntl.ioctl(loopback, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        namespaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in made]
        socket.send_fds(answer, [b"0"], [listener.fileno(), *namespaces])
    except OSError as error:
        answer.send(str(error.errno).encode())
    finally:
        os._exit(0)


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library; raise OSError if it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def join_owner() -> None:
    """Enter the user namespace that owns the job's network, if any, before there are threads."""
    for descriptor in os.environ.get(NETWORK, "").split()[1:]:
        _call("setns", int(descriptor), _NEW_USER)


def in_own_network(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function``, called in a thread in the job's own network, if the job has one.

    The sockets of such a thread belong to that network, and those of all threads that it starts.
    """

    @functools.wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> T:
        if NETWORK not in os.environ:
            return function(*args, **options)
        found = Future[T]()

        def call() -> None:
            try:
                _call("setns", int(os.environ[NETWORK].split()[0]), _NEW_NET)
                found.set_result(function(*args, **options))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=call, daemon=True).start()
        return found.result()

    return called


def exposed_to(world: World) -> str:
    """Return a line that names other users of this host who reach the ports of a job; or ""."""
    if world.size == 1 or NETWORK in os.environ:
        return ""
    users = dict[int, str]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            users[process.uids().real] = process.username()
    own = (os.getuid(), _NOBODY)
    names = sorted(name for uid, name in users.items() if uid >= _FIRST_USER and uid not in own)
    who = f"{', '.join(names)} on this host can run code in this training"
    return f"{who}; launch/local keeps them out (docs/hosts.md)" if names else ""
