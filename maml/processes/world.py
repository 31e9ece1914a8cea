"""A process's place among all, from its environment, and the way to the others. No torch here."""

import ipaddress
import os
import socket
from typing import NamedTuple

import psutil

from maml.errors import UserError


class World(NamedTuple):
    """A process's place among all. ``launched``: whether torchrun (or alike) started it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launched: bool

    @classmethod
    def from_environment(cls) -> "World":
        """Read the variables that torchrun sets; one process without them.

        Raises:
            UserError: naming the variable, if they cannot be: a job script may set them.
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
    """Talk over the loopback on one host, and else over the interface that leads to the master.

    Left to themselves, the transports listen where the host's own name points to. On many clusters
    that is the loopback, where no other host reaches them. In containers it is an address that
    others reach, and RPC unpickles whatever it is sent. ``GLOO_SOCKET_IFNAME``,
    ``TP_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` override it.
    """
    if world.size <= world.local_size:
        own = "127.0.0.1"
    else:
        master = os.environ["MASTER_ADDR"]
        way = address_towards(master)
        if way is not None and way.is_loopback and master not in ("localhost", str(way)):
            # The master itself, whose own name points to its loopback: the others reach the side
            # that leads out. Nothing is at these addresses (RFC 5737, RFC 3849).
            way = address_towards("192.0.2.1") or address_towards("2001:db8::1")
        own = str(way)  # If there is none, the rendezvous will say what is wrong.
    for interface, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == own for found in addresses):
            for transport in ("GLOO", "TP", "NCCL"):
                os.environ.setdefault(f"{transport}_SOCKET_IFNAME", interface)
            return


def address_towards(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address with which this host would send to ``host``; None if there is no way."""
    try:
        # Connecting a datagram socket sends nothing; it only picks the way. Any port does.
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None
