"""Several hosts on one machine: network namespaces, and veth pairs at a bridge between them.

``with Network(2) as network`` makes two hosts; ``network.on(host, command)`` is the command line
that runs ``command`` on one of them. Each has its own addresses, loopback, name, process ids and
shared memory, so that no transport can go around the network. As on many clusters, a host's own
name points to its own loopback. ``keeper.py`` removes everything at the end, also if this process
is killed. This needs root.
"""

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

KEEPER = Path(__file__).resolve().with_name("keeper.py")
LINK, MTU = "eth0", "9000"
_serial = itertools.count()


class Network:
    """Hosts and the links between them; a context manager.

    A host's own name points to the address ``own_names``; "address" is its address on the link.
    """

    def __init__(self, hosts: int, *, own_names: str = "127.0.1.1") -> None:
        self._own_names = own_names
        name = f"maml-{os.getpid()}-{next(_serial)}"
        self.namespaces = [f"{name}-host{host}" for host in range(hosts)]
        self._switch = f"{name}-switch"
        self.addresses = [f"10.77.0.{1 + host}" for host in range(hosts)]

    def __enter__(self) -> "Network":
        # The keeper ends when this process closes the pipe, or ends.
        self.keeper = subprocess.Popen(
            [sys.executable, "-ES", str(KEEPER), *self.namespaces, self._switch],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            for namespace in (*self.namespaces, self._switch):
                _run("ip", "netns", "add", namespace)
                _run("ip", "-n", namespace, "link", "set", "lo", "up")
            self._make_bridge()
            for namespace, address in zip(self.namespaces, self.addresses, strict=True):
                _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", LINK)
                _run("ip", "-n", namespace, "link", "set", LINK, "mtu", MTU, "up")
                _run("ip", "-n", namespace, "route", "add", "default", "dev", LINK)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Take everything down, with the processes that are still there."""
        self.keeper.communicate(timeout=150)

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs ``command`` on ``host``, as a machine of its own."""
        own = self.addresses[host] if self._own_names == "address" else self._own_names
        names = ["127.0.0.1 localhost", f"{own} host{host}"]
        names += [
            f"{address} host{other}"
            for other, address in enumerate(self.addresses)
            if other != host
        ]
        # No resolver runs at this address, so look-ups fail at once. Elsewhere they would wait.
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
        """Return the command line of ``host``'s torchrun; all hosts meet at host 0."""
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={len(self.addresses)}", f"--nproc_per_node={nproc}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={self.addresses[0]}:29500"),
            # Names point to the loopback, so torchrun must not look these addresses up by name.
            *(f"--rdzv-conf=is_host={int(host == 0)}", f"--local-addr={self.addresses[host]}"),
            f"--rdzv-id={self._switch}",
        ]
        return self.on(host, [*launcher, *script])

    def listeners(self, host: int) -> set[str]:
        """Return the addresses at which processes of ``host`` listen, without their ports."""
        told = _run("ip", "netns", "exec", self.namespaces[host], "ss", "-Htln")
        return {line.split()[3].rpartition(":")[0] for line in told.splitlines()}

    def by_hand(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line of ``host``'s one rank, as a cluster's launcher starts it."""
        world = {
            **{"RANK": host, "WORLD_SIZE": len(self.addresses), "LOCAL_RANK": 0},
            **{"LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "host0", "MASTER_PORT": 29500},
        }
        variables = [f"{name}={value}" for name, value in world.items()]
        return self.on(host, ["env", *variables, *command])

    def cut(self, host: int) -> None:
        """Take ``host`` off the network without notice to the others, as a power cut does."""
        _run("ip", "-n", self.namespaces[host], "link", "set", LINK, "down")

    def _make_bridge(self) -> None:
        switch = self._switch
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "mtu", MTU, "up")
        for host, namespace in enumerate(self.namespaces):
            port = f"port{host}"
            peer = ("peer", "name", LINK, "netns", namespace)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
            _run("ip", "-n", switch, "link", "set", port, "mtu", MTU, "up")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def why_not() -> str:
    """Return why there can be no network of namespaces here; empty if there can be one."""
    try:
        with Network(2) as network:
            _run(*network.on(0, ["true"]))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"network namespaces (as root, with iproute2 and util-linux): {error}"
    return ""
