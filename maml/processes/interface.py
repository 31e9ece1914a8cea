"""Which network interface a process talks over."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from maml.processes.world import World


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
