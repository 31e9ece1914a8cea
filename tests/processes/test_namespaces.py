"""A job's own network: nobody else on the host reaches its processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from maml.processes.namespaces import exposed_to
from maml.processes.world import World
from tests.launching import run, start
from tests.strategies.faults import IN_ORDER, SINUSOID, wait_for_iteration

# Python may lie where only root reads, so all is imported first.
STRANGER = """
import encodings.idna, os, socket, sys

os.setgroups([]); os.setgid(65534); os.setuid(65534)
for port in sys.argv[2:]:
    try:
        socket.create_connection(("127.0.0.1", int(port)))
    except ConnectionRefusedError:
        continue
    sys.exit(f"reached {port}")
try:
    os.open(sys.argv[1], os.O_RDONLY)
except PermissionError:
    print("kept out")
"""
WITHOUT_PRIVILEGES = """
import ctypes, encodings.idna, os, socket
from maml.processes import namespaces

if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: /proc/self belongs to the new user
listener, made = namespaces.new_network()
os.environ[namespaces.NETWORK] = " ".join(map(str, made))
namespaces.join_owner()
namespaces.in_own_network(socket.create_connection)(listener.getsockname())
try:
    socket.create_connection(listener.getsockname())
except ConnectionRefusedError:
    print(f"{len(made)} namespaces, as {os.getuid()}")
"""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="acts as another user, which needs root")


@as_root
@pytest.mark.parametrize("strategy", ["rpc exclusive", "allreduce"])
def test_no_other_user_reaches_a_job_of_launch_local(tmp_path: Path, strategy: str) -> None:
    """Neither its ports nor its network: RPC would run what another user sends."""
    command = [sys.executable, "-m", "launch.workers", *SINUSOID, "--workers", "2"]
    launched = start([*command, *IN_ORDER[strategy], "--run-dir", str(tmp_path)])
    try:
        wait_for_iteration(launched, tmp_path, 3, limit=240)
        threads = [Path(f"/proc/{one.pid}/task").glob("*/ns/net") for one in launched.processes()]
        own = os.readlink("/proc/self/ns/net")
        inside = next(str(at) for each in threads for at in each if os.readlink(at) != own)
        listed = run(["nsenter", f"--net={inside}", "ss", "-Htln"], 20).stdout.splitlines()
        ports = [line.split()[3].rpartition(":")[2] for line in listed]
        assert len(ports) >= 3  # the store's, and one of each process
        done = run([sys.executable, "-c", STRANGER, inside, *ports], 20)
        assert done.stdout == "kept out\n"
    finally:
        launched.kill()


def test_a_network_without_privileges() -> None:
    """Only threads inside reach the listener; user code of the process keeps its network."""
    done = run([sys.executable, "-c", WITHOUT_PRIVILEGES], 60, expect=None)
    if "in new_network" in done.stderr:
        pytest.skip(f"the system allows no user namespace: {done.stderr.splitlines()[-1]}")
    assert done.stdout == f"2 namespaces, as {os.getuid() or 65534}\n"


@as_root
def test_other_users_are_named() -> None:
    other = subprocess.Popen(["sleep", "600"], user=54321)
    try:
        assert "54321" in exposed_to(World(0, 2, 0, 2, True))
        assert exposed_to(World(0, 1, 0, 1, False)) == ""
    finally:
        other.kill()
        other.wait()
