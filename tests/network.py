"""Several hosts on one machine: network namespaces, and veth pairs at a bridge between them.

``with Network(2) as network`` makes two hosts; ``network.on(host, command)`` is the command line
that runs ``command`` on one of them. Each has its own addresses, loopback, name, process ids and
shared memory, so that no transport can go around the network. As on many clusters, a host's own
name points to its own loopback. A host is its process 1, which ends when its standard input does,
also if this process is killed. With it the kernel ends all that runs there. This needs root.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Sequence

import psutil

LINK, MTU = "eth0", "9000"
NEW = ("--net", "--mount-proc", "--pid", "--fork", "--kill-child", "--uts", "--ipc")
# No resolver runs at this address, so look-ups fail at once. Elsewhere they would wait.
BEGIN = """
hostname "$0" && mount -t tmpfs shm /dev/shm && cd /dev/shm && printf %s "$1" >.hosts &&
echo nameserver 127.0.0.1 >.resolver && mount --bind .hosts /etc/hosts &&
mount --bind .resolver /etc/resolv.conf && ip link set lo up && echo ready && cat
"""


class Network:
    """Hosts and the links between them; a context manager.

    A host's own name points to the address ``own_names``; "address" is its address on the link.
    """

    def __init__(self, hosts: int, *, own_names: str = "127.0.1.1") -> None:
        self._own_names = own_names
        self.addresses = [f"10.77.0.{1 + host}" for host in range(hosts)]
        # What started the process 1 of each host, and of the switch; and the ids of these.
        self._begun: list[subprocess.Popen[bytes]] = []
        self._first: list[int] = []

    def __enter__(self) -> "Network":
        try:
            self._begin("switch", [])
            self._ip("link", "add", "bridge", "type", "bridge")
            self._ip("link", "set", "bridge", "mtu", MTU, "up")
            for host, address in enumerate(self.addresses):
                own = address if self._own_names == "address" else self._own_names
                at = [*self.addresses[:host], own, *self.addresses[host + 1 :]]
                self._begin(f"host{host}", [f"{at[n]} host{n}\n" for n in range(len(at))])
                port, netns = f"port{host}", str(self._first[1 + host])
                peer = ("peer", "name", LINK, "netns", netns)
                self._ip("link", "add", port, "type", "veth", *peer)
                self._ip("link", "set", port, "master", "bridge")
                self._ip("link", "set", port, "mtu", MTU, "up")
                self._ip("address", "add", f"{address}/24", "dev", LINK, host=host)
                self._ip("link", "set", LINK, "mtu", MTU, "up", host=host)
                self._ip("route", "add", "default", "dev", LINK, host=host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self, name: str, hosts: Sequence[str]) -> None:
        """Start the process 1 of a host, with these lines in its /etc/hosts."""
        names = "".join(["127.0.0.1 localhost\n", *hosts])
        self._begun.append(subprocess.Popen(
            ["unshare", *NEW, "sh", "-c", BEGIN, name, names],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        ))  # fmt: skip
        told = self._begun[-1].stdout
        assert told is not None
        if told.readline() != b"ready\n":
            raise RuntimeError(f"{name} did not begin")
        self._first.append(psutil.Process(self._begun[-1].pid).children()[0].pid)

    def __exit__(self, *_: object) -> None:
        """Take everything down, with the processes that are still there."""
        for begun in self._begun:
            begun.communicate(timeout=150)

    def _ip(self, *arguments: str, host: int = -1) -> None:
        # Only in the network of the host, because ids of processes are those of out here.
        _run("nsenter", f"--target={self._first[1 + host]}", "--net", "ip", *arguments)

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs ``command`` on ``host``, as a machine of its own."""
        enter = ("nsenter", f"--target={self._first[1 + host]}", *("--net", "--mount", "--pid"))
        return [*enter, "--uts", "--ipc", "env", f"--chdir={os.getcwd()}", *command]

    def torchrun(self, host: int, nproc: int, script: Sequence[str]) -> list[str]:
        """Return the command line of the torchrun that ``host`` needs, to run ``script``."""
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={len(self.addresses)}", f"--nproc_per_node={nproc}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={self.addresses[0]}:29500"),
            # Names point to the loopback, so torchrun must not look these addresses up by name.
            *(f"--rdzv-conf=is_host={int(host == 0)}", f"--local-addr={self.addresses[host]}"),
            "--rdzv-id=hosts",
        ]
        return self.on(host, [*launcher, *script])

    def listeners(self, host: int) -> set[str]:
        """Return the addresses at which processes of ``host`` listen, without their ports."""
        told = _run(*self.on(host, ["ss", "-Htln"]))
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
        self._ip("link", "set", LINK, "down", host=host)


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
