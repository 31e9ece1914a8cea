"""A wire between network namespaces, in user space: delay, loss, and nothing else.

python tests/relay.py --delay-ms 5 --loss 0.01 --seed 0 --mtu 9000 ADDRESS=NAMESPACE …

In each namespace it makes a TUN device ``eth0``; an IPv4 packet that a host sends is handed to the
host of its destination address after the delay, or lost. It is what ``tc netem`` does on kernels
that have it. It prints ``ready`` once all devices are there, and ends, devices and all, with its
standard input. The standard library alone: it must be up at once.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
# Packets taken from one host before the next has its turn.
BURST = 64


def open_device(namespace: str) -> int:
    """Make ``eth0`` in the namespace; return a descriptor whose reads and writes are packets."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    return device


def relay(devices: dict[bytes, int], delay: float, loss: float, seed: int, mtu: int) -> None:
    """Hand packets over, from every device to that of the destination, till stdin ends.

    Args:
        devices: A descriptor by the four bytes of its host's address.
        delay: Seconds that every packet is under way.
        loss: The probability that it never arrives.
        seed: Of the generator that decides.
        mtu: Largest packet, bytes.
    """
    generator = random.Random(seed)
    # The delay is the same for all, so packets are due in the order in which they came.
    under_way: deque[tuple[float, int, bytes]] = deque()
    stdin = sys.stdin.fileno()
    sources = [stdin, *devices.values()]
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select(sources, [], [], wait)
        if stdin in ready and not os.read(stdin, 1):
            return
        for source in ready:
            if source != stdin:
                for _ in range(BURST):
                    try:
                        packet = os.read(source, mtu)
                    except OSError:  # Nothing more, or the device is down.
                        break
                    target = devices.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                    if target is not None and generator.random() >= loss:
                        under_way.append((time.monotonic() + delay, target, packet))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, target, packet = under_way.popleft()
            try:
                os.write(target, packet)
            except OSError:  # A host that is down loses what is sent to it.
                continue


def main() -> None:
    """Make the devices and relay."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("--loss", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--mtu", type=int, required=True)
    parser.add_argument("hosts", nargs="+", metavar="ADDRESS=NAMESPACE")
    options = parser.parse_args()
    devices = {}
    for host in options.hosts:
        address, _, namespace = host.partition("=")
        devices[socket.inet_aton(address)] = open_device(namespace)
    print("ready", flush=True)
    relay(devices, options.delay_ms / 1000, options.loss, options.seed, options.mtu)


if __name__ == "__main__":
    main()
