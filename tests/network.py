"""Several hosts on one machine: network namespaces, and links with delay and loss between them.

``with Network(2, delay_ms=5, loss=0.01) as network`` makes two hosts; ``network.on(host, command)``
is the command line that runs ``command`` on one of them. Each has its own addresses, loopback,
name, process ids and shared memory, so that a transport which looks for a faster way than the
network finds none: TensorPipe would copy between processes that can see each other's ids, and no
byte would cross the link. As on many clusters, a host's own name points to its own loopback.

Links are veth pairs at a bridge, slowed by ``tc netem``; where the kernel has no netem, TUN
devices with a relay in user space between them (``relay.py``). ``network.links`` says which. All
of it goes at the end, also if this process is killed (``keeper.py``). It needs root.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
LINK = "eth0"
_serial = itertools.count()


class Traffic(NamedTuple):
    """Bytes of packets that a host has sent and received since its link was made."""

    sent: int
    received: int


class Network:
    """Hosts and the links between them; a context manager.

    Args:
        hosts: How many.
        delay_ms: Milliseconds that every packet is under way, in each direction.
        loss: The probability that a packet is lost.
        links: "netem" or "relay"; auto: relay where the kernel has no netem.
        seed: Of the relay's losses; netem's are its own.
        mtu: Largest packet, bytes; the default is that of jumbo frames.
        own_names: Where a host's own name points to, for itself; "address": to its address on the
            link, as in a container.

    Attributes:
        addresses: Each host's IPv4 address.
        links: How the links are made: "netem", "relay" or, where nothing is to be delayed or
            lost, "veth".
    """

    def __init__(
        self,
        hosts: int,
        *,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        links: str = "auto",
        seed: int = 0,
        mtu: int = 9000,
        own_names: str = "127.0.1.1",
    ) -> None:
        self.delay_ms, self.loss, self.mtu, self._seed = delay_ms, loss, mtu, seed
        if links == "auto":
            links = "veth" if not (delay_ms or loss) else "netem" if has_netem() else "relay"
        self.links, self._own_names = links, own_names
        name = f"maml-{os.getpid()}-{next(_serial)}"
        self.namespaces = [f"{name}-host{host}" for host in range(hosts)]
        self._switch = f"{name}-switch"
        self.addresses = [f"10.77.0.{1 + host}" for host in range(hosts)]
        self._helpers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        self._helper("keeper.py", *self.namespaces, self._switch)
        try:
            for namespace in (*self.namespaces, self._switch):
                _run("ip", "netns", "add", namespace)
                _run("ip", "-n", namespace, "link", "set", "lo", "up")
            if self.links == "relay":
                self._make_relay()
            else:
                self._make_bridge()
            for namespace, address in zip(self.namespaces, self.addresses, strict=True):
                _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", LINK)
                _run("ip", "-n", namespace, "link", "set", LINK, "mtu", str(self.mtu), "up")
                _run("ip", "-n", namespace, "route", "add", "default", "dev", LINK)
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take everything down, with the processes that are still there."""
        self._take_down()

    def __str__(self) -> str:
        how = {"netem": "tc netem", "relay": "a relay in user space", "veth": "no delay or loss"}
        return (
            f"{len(self.addresses)} hosts, {self.delay_ms:g} ms each way, "
            f"{100 * self.loss:g} % loss ({self.links}: {how[self.links]}), MTU {self.mtu}"
        )

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs ``command`` on ``host``, as a machine of its own."""
        own = self.addresses[host] if self._own_names == "address" else self._own_names
        names = ["127.0.0.1 localhost", f"{own} host{host}"]
        names += [
            f"{address} host{other}"
            for other, address in enumerate(self.addresses)
            if other != host
        ]
        # Nobody answers at the resolver's address, at once; elsewhere it would be waited for.
        set_up = (
            'hostname "$0" && mount -t tmpfs shm /dev/shm && cd /dev/shm && printf %s "$1" > .hosts'
            " && echo nameserver 127.0.0.1 > .resolver && mount --bind .hosts /etc/hosts"
            ' && mount --bind .resolver /etc/resolv.conf && cd "$OLDPWD" && shift && exec "$@"'
        )
        isolate = ["--mount-proc", "--pid", "--fork", "--kill-child", "--uts", "--ipc"]
        return [
            *("ip", "netns", "exec", self.namespaces[host], "unshare", *isolate),
            *("sh", "-c", set_up, f"host{host}", "\n".join(names) + "\n", *command),
        ]

    def torchrun(self, host: int, nproc: int, script: Sequence[str]) -> list[str]:
        """Return the command line of ``host``'s torchrun, host 0 being where all meet."""
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={len(self.addresses)}", f"--nproc_per_node={nproc}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={self.addresses[0]}:29500"),
            # Names that point to the loopback: torchrun must be told what it else looks up.
            *(f"--rdzv-conf=is_host={int(host == 0)}", f"--local-addr={self.addresses[host]}"),
            f"--rdzv-id={self._switch}",
        ]
        return self.on(host, [*launcher, *script])

    def listeners(self, host: int) -> set[str]:
        """Return the addresses at which processes of ``host`` listen, without their ports."""
        told = _run("ip", "netns", "exec", self.namespaces[host], "ss", "-Htln")
        return {line.split()[3].rpartition(":")[0] for line in told.splitlines()}

    def by_hand(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line of ``host``'s one rank, as a cluster's launcher starts it.

        The master is given by its name.
        """
        world = {
            **{"RANK": host, "WORLD_SIZE": len(self.addresses), "LOCAL_RANK": 0},
            **{"LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "host0", "MASTER_PORT": 29500},
        }
        variables = [f"{name}={value}" for name, value in world.items()]
        return self.on(host, ["env", *variables, *command])

    def traffic(self, host: int) -> Traffic:
        """Return what the counters of ``host``'s link say."""
        folder = f"/sys/class/net/{LINK}/statistics"
        both = _run(
            *("ip", "netns", "exec", self.namespaces[host]),
            *("cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes"),
        )
        sent, received = map(int, both.split())
        return Traffic(sent, received)

    def cut(self, host: int) -> None:
        """Take ``host`` off the network, without a word to the others, as a power cut does."""
        _run("ip", "-n", self.namespaces[host], "link", "set", LINK, "down")

    def _make_bridge(self) -> None:
        switch = self._switch
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "mtu", str(self.mtu), "up")
        for host, namespace in enumerate(self.namespaces):
            port = f"port{host}"
            peer = ("peer", "name", LINK, "netns", namespace)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
            _run("ip", "-n", switch, "link", "set", port, "mtu", str(self.mtu), "up")
            if self.links == "netem":
                _run(
                    *("tc", "-n", namespace, "qdisc", "add", "dev", LINK, "root", "netem"),
                    *("delay", f"{self.delay_ms}ms", "loss", f"{100 * self.loss}%"),
                    *("limit", "100000"),
                )

    def _make_relay(self) -> None:
        ends = zip(self.addresses, self.namespaces, strict=True)
        relay = self._helper(
            *("relay.py", "--delay-ms", str(self.delay_ms), "--loss", str(self.loss)),
            *("--seed", str(self._seed), "--mtu", str(self.mtu)),
            *(f"{address}={namespace}" for address, namespace in ends),
        )
        assert relay.stdout is not None
        if relay.stdout.readline().strip() != "ready":
            raise RuntimeError("the relay between the hosts did not start")
        for namespace in self.namespaces:
            _run("ip", "-n", namespace, "link", "set", LINK, "txqueuelen", "10000")

    def _helper(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a script that ends when this process closes its stdin, or ends itself."""
        process = subprocess.Popen(
            [sys.executable, "-ES", str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._helpers.append(process)
        return process

    def _take_down(self) -> None:
        # The keeper first: while it kills, links may as well be there.
        for process in self._helpers:
            process.communicate(timeout=150)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def namespaces() -> list[str]:
    """Return the names of this machine's network namespaces, those of other programs included."""
    return re.findall(r"^\S+", _run("ip", "netns", "list"), re.MULTILINE)


@functools.cache
def has_netem() -> bool:
    """Return whether the kernel has ``tc netem``, by trying."""
    name = f"maml-{os.getpid()}-netem"
    _run("ip", "netns", "add", name)
    try:
        command = ["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return not subprocess.run(command, capture_output=True).returncode
    except FileNotFoundError:
        return False
    finally:
        _run("ip", "netns", "delete", name)


@functools.cache
def why_not() -> str:
    """Return why there can be no network of namespaces here; empty if there can be one."""
    try:
        with Network(2) as network:
            _run(*network.on(0, ["true"]))
        if not has_netem():
            with Network(2, links="relay"):
                pass
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"network namespaces (as root, with iproute2 and util-linux): {error}"
    return ""
