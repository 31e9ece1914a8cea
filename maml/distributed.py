"""A process among others: its set-up, its stores and groups, RPC's beginning and end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import ipaddress
import itertools
import os
import random
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import psutil
import setproctitle
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torchopt.distributed as todist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from maml.config import Config
from maml.errors import UserError
from maml.meeting import meet
from maml.pulse import Pulse
from maml.seeds import seed_of
from maml.world import World

START_TIMEOUT = 300.0
"""Seconds that processes wait for each other at the start, where one may be slow to load."""

GOODBYE = 10.0
"""Seconds that rank zero waits for the others at most, once all is done."""


def choose_device(config: Config, world: World) -> torch.device:
    """Return the device of ``--device``; raise `UserError` if it is not there."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: not a device (cpu, cuda, cuda:N or auto)") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: only cpu and cuda are supported")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"--device {name}: this machine has no usable GPU")
        if device.index is None:
            device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        elif device.index >= torch.cuda.device_count():
            raise UserError(f"--device {name}: there are only {torch.cuda.device_count()} GPUs")
    return device


def choose_interface(world: World) -> None:
    """Talk over the network interface that leads to the master, where several hosts take part.

    Left to themselves, the transports listen where the host's own name points to, which on many
    clusters is the loopback. ``GLOO_SOCKET_IFNAME``, ``TP_SOCKET_IFNAME`` and
    ``NCCL_SOCKET_IFNAME`` override it.
    """
    if world.size <= world.local_size or "MASTER_ADDR" not in os.environ:
        return
    master = os.environ["MASTER_ADDR"]
    own = _address_towards(master)
    if own is not None and own.is_loopback and master not in ("localhost", str(own)):
        # The master itself, whose own name points to its loopback: the others reach the side that
        # leads out. Nothing is at these addresses (RFC 5737, RFC 3849).
        own = _address_towards("192.0.2.1") or _address_towards("2001:db8::1")
    if own is None:
        return  # The rendezvous will say what is wrong with the address.
    for interface, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == str(own) for found in addresses):
            for transport in ("GLOO", "TP", "NCCL"):
                os.environ.setdefault(f"{transport}_SOCKET_IFNAME", interface)
            return


def _address_towards(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address with which this host would send to ``host``; None if there is no way."""
    try:
        # Connecting a datagram socket sends nothing; it only picks the way. Any port does.
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def init_process(config: Config, world: World) -> None:
    """Set title, computing threads and the global generators of this process.

    The generators are seeded by *global* rank, so that no two processes of a run share a stream.
    No result depends on them: all that matters for one has an address of its own.
    """
    setproctitle.setproctitle(f"maml[{world.rank}/{world.size}] {config.preset}")
    threads = config.threads
    if (threads is None and "OMP_NUM_THREADS" not in os.environ) or world.launched:
        # torchrun sets OMP_NUM_THREADS=1 whatever the machine: share its cores out instead.
        threads = threads or max(1, len(os.sched_getaffinity(0)) // world.local_size)
    if threads is not None:
        torch.set_num_threads(threads)
    seed = seed_of(config.seed, "process", world.rank)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _connect(world: World, timeout: float) -> Store:
    """Connect to the store of ``MASTER_ADDR``."""
    seconds = timedelta(seconds=timeout)
    store: Store
    store, *_ = next(rendezvous("env://", world.rank, world.size, timeout=seconds))
    return store


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


def _own_connection(world: World, timeout: float = START_TIMEOUT) -> Store:
    """Return `launchers_store` over a connection of its own: who waits in one holds it up."""
    return PrefixStore(_meet(world)[1], _connect(world, timeout))


def _rendezvous(url: str, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Serve ``maml://``, the rendezvous of RPC, which takes no store but a URL."""
    world = World.from_environment()
    yield _own_connection(world), world.rank, world.size


register_rendezvous_handler("maml", _rendezvous)

_worlds = itertools.count()
"""A process may do several runs, one after the other; the launcher's store outlives them all."""


def _let_rank_zero_be_last(world: World, number: int, timeout: float) -> None:
    """On rank zero wait until the others have left world ``number`` in good order; there, say so.

    Where no launcher holds the store, rank zero does, and it goes with its process: leaving RPC,
    a slower peer then failed at the very end. One that does not come is not waited for longer
    than ``timeout`` or `GOODBYE` seconds; all is done, and it is no error.
    """
    if world.size == 1:
        return
    store = PrefixStore(f"departure {number}", launchers_store(world))
    with contextlib.suppress(RuntimeError):
        if world.rank:
            store.set(str(world.rank), "left")
        else:
            others = [str(rank) for rank in range(1, world.size)]
            store.wait(others, timedelta(seconds=min(timeout, GOODBYE)))


@contextlib.contextmanager
def rpc_world(
    world: World, *, threads: int, timeout: float, worker_init: Callable[[], None]
) -> Iterator[None]:
    """TorchOpt's ``auto_init_rpc`` with a say in how it ends.

    Every process calls ``worker_init`` before any is served. A body that ends well leaves through
    a graceful shutdown, which waits for all; one that ends in an error waits for nobody: a frozen
    peer would hold a graceful shutdown for ever.
    """
    choose_interface(world)
    number = next(_worlds)
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
    # From here on a silent peer is a lost one; before, it may just be slow to import.
    rpc._set_rpc_timeout(timeout)  # type: ignore[attr-defined]
    try:
        yield
    except BaseException:
        leave_rpc()
        raise
    if not left_rpc():
        rpc.shutdown(graceful=True, timeout=timeout)
        _let_rank_zero_be_last(world, number, timeout)


def leave_rpc() -> None:
    """Leave the RPC world without waiting for anyone."""
    _without_waiting(lambda: rpc.shutdown(graceful=False))


def left_rpc() -> bool:
    """Return whether this process has left the RPC world already."""
    return not torch._C._distributed_rpc._is_current_rpc_agent_set()


class Groups(NamedTuple):
    """Process groups over the same processes, which differ in their patience.

    ``work``: ``--timeout``. ``idle``: for ever; where a process waits for work, or for rank zero
    to finish writing, and ``pulse`` says that rank zero lives.
    """

    work: dist.ProcessGroup
    idle: dist.ProcessGroup
    pulse: Pulse


@contextlib.contextmanager
def collective_world(world: World, *, timeout: float) -> Iterator[Groups]:
    """Join all processes for collectives: gloo between CPUs, nccl between GPUs.

    A body that ends well leaves when all are done; one that ends in an error waits for nobody.
    """
    choose_interface(world)
    start_timeout = timedelta(seconds=max(START_TIMEOUT, timeout))
    store: Store
    if world.size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        store = _own_connection(world, start_timeout.total_seconds())
    number = next(_worlds)
    store = PrefixStore(f"collective world {number}", store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=start_timeout,
    )
    try:
        # Not yet with their own patience: a group's time limit is also that of its making.
        work = dist.new_group(timeout=start_timeout)
        idle = dist.new_group(timeout=start_timeout)
        # It returns a number in place of a group of which this process is no member.
        assert isinstance(work, dist.ProcessGroup)
        assert isinstance(idle, dist.ProcessGroup)
        groups = Groups(work, idle, Pulse(store, world.rank, timeout))
        dist.barrier()
        dist.set_timeout(timedelta(seconds=timeout), work)
        dist.set_timeout(timedelta(days=30), idle)
        with groups.pulse.beating():
            yield groups
            # Rank zero may still write for long; once it is done, so is everyone, or is lost.
            end = dist.broadcast(torch.zeros(1), src=0, group=groups.idle, async_op=True)
            assert end is not None
            groups.pulse.wait(end)
            dist.barrier(groups.work)
    except BaseException:
        _without_waiting(dist.destroy_process_group)
        raise
    dist.destroy_process_group()
    _let_rank_zero_be_last(world, number, timeout)


def _without_waiting(close: Callable[[], object], seconds: float = 5.0) -> None:
    """Close this process's end of a transport; not even that may hold the process up."""
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(seconds)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class StopRequest:
    """SIGINT or SIGTERM, remembered until the loop can end in good order.

    A second SIGINT raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def install(self) -> None:
        """Take the handlers of SIGINT and SIGTERM; call it in the main thread."""

        def handle(number: int, frame: object) -> None:
            if self.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number).name

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handle)
