"""Read a process's place from its environment; choose its network interface. No torch here."""

import ipaddress
import os
import socket
from typing import NamedTuple

import psutil

from maml.errors import UserError


class World(NamedTuple):
    """A process's rank and world size. ``launched``: whether torchrun or the like started it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launched: bool

    @classmethod
    def from_environment(cls) -> "World":
        """Read the variables that torchrun sets; without them, return a world of one process.

        Raises:
            UserError: naming the variable, if its value is impossible (job scripts may set it).
        """

        def number(name: str, default: int, least: int, most: int | None = None) -> int:
            text = os.environ.get(name, str(default))
            if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
                bounds = f"at least {least}" if most is None else f"{least} to {most}"
                raise UserError(f"{name}={text} in the environment: must be a number, {bounds}")
            return int(text)

        size = number("WORLD_SIZE", 1, 1)
        if size > 1:
            for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
                if name not in os.environ:
                    raise UserError(f"WORLD_SIZE={size} in the environment, but no {name}")
        local_size = number("LOCAL_WORLD_SIZE", 1, 1, size)
        return cls(
            rank=number("RANK", 0, 0, size - 1),
            size=size,
            local_rank=number("LOCAL_RANK", 0, 0, local_size - 1),
            local_size=local_size,
            launched="RANK" in os.environ,
        )


def choose_interface(world: World) -> None:
    """Use the loopback on one host, and on several the interface that leads to the master.

    By default the transports listen at the address of the host's own name. On many clusters this is
    the loopback, which no other host can reach. In containers other hosts can reach the address,
    and RPC unpickles everything that it receives. ``GLOO_SOCKET_IFNAME``, ``TP_SOCKET_IFNAME`` and
    ``NCCL_SOCKET_IFNAME`` override this choice.
    """
    if world.size <= world.local_size:
        own = "127.0.0.1"
    else:
        master = os.environ["MASTER_ADDR"]
        way = address_towards(master)
        if way is not None and way.is_loopback and master not in ("localhost", str(way)):
            # This is the master, and its own name points to its loopback. The others reach it at
            # the interface that leads out. No host has these addresses (RFC 5737, RFC 3849).
            way = address_towards("192.0.2.1") or address_towards("2001:db8::1")
        own = str(way)  # If there is no way, the rendezvous reports the error.
    for interface, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == own for found in addresses):
            for transport in ("GLOO", "TP", "NCCL"):
                os.environ.setdefault(f"{transport}_SOCKET_IFNAME", interface)
            return


def address_towards(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address from which this host would send to ``host``; None if no route exists."""
    try:
        # Connecting a datagram socket sends nothing; it only selects the route. Any port works.
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None
