"""The network of namespaces: it delays and loses what it is asked to, and goes without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from tests.launching import REPO, SLACK, run, start
from tests.network import Network, namespaces, why_not


@pytest.fixture(scope="module", autouse=True)
def _permitted() -> None:
    if why_not():
        pytest.skip(why_not())


ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("10.77.0.1", 5000))
print("ready", flush=True)
while (came := server.recvfrom(9000))[0] != b"end":
    server.sendto(*came)
"""
PINGS = 1500
ASK = f"""
import contextlib, select, socket, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.connect(("10.77.0.1", 5000))
client.settimeout(0.5)
# Alone, each on its way before the next is sent; then many, of which some are lost.
trips = []
while len(trips) < 10:
    began = time.perf_counter()
    client.send(b"one")
    try:
        client.recv(9000)
    except TimeoutError:
        continue
    trips.append(time.perf_counter() - began)
came, sent, heard = 0, 0, time.perf_counter()
while time.perf_counter() < heard + 0.5:
    if sent < {PINGS}:
        client.send(bytes(1000))
        sent += 1
        time.sleep(0.0002)
    # What has come is taken at once: what a socket keeps is bounded.
    while select.select([client], [], [], 0)[0]:
        client.recv(9000)
        came, heard = came + 1, time.perf_counter()
# Some may be lost; one that comes when nobody listens any more is refused.
with contextlib.suppress(ConnectionRefusedError):
    for _ in range(20):
        client.send(b"end")
        time.sleep(0.01)
print(min(trips), came)
"""


@pytest.mark.parametrize(("delay_ms", "loss"), [(0, 0.0), (20, 0.0), (5, 0.1)])
def test_delay_and_loss(delay_ms: float, loss: float) -> None:
    with Network(2, delay_ms=delay_ms, loss=loss) as network:
        print(network)
        echo = start(network.on(0, [sys.executable, "-c", ECHO]))
        try:
            echo.wait_for("ready", 30)
            asked = run(network.on(1, [sys.executable, "-c", ASK]), timeout=60)
            echo.wait(30)
        finally:
            echo.kill()
        sent, received = network.traffic(1)
    trip, came = map(float, asked.stdout.split())
    assert 2 * delay_ms <= 1000 * trip < 2 * delay_ms + 15
    # Lost on neither way: five standard deviations.
    kept = (1 - loss) ** 2
    assert came / PINGS == pytest.approx(kept, abs=5 * (kept * (1 - kept) / PINGS) ** 0.5 + 1e-9)
    # With headers of 28 bytes and little else; what is lost is lost after it was counted.
    assert PINGS * 1028 < sent < PINGS * 1028 * 1.05
    assert came * 1028 < received < came * 1028 * 1.05


def test_hosts_are_machines_of_their_own() -> None:
    """What the transports look at before they trust in shared memory, and names as on clusters."""
    script = "hostname; getent hosts host1; echo $$; touch /dev/shm/mine; ls /dev/shm"
    with Network(2) as network:
        said = [run(network.on(host, ["sh", "-c", script]), timeout=30) for host in range(2)]
    assert said[0].stdout.split() == ["host0", "10.77.0.2", "host1", "1", "mine"]
    assert said[1].stdout.split() == ["host1", "127.0.1.1", "host1", "1", "mine"]
    assert not os.path.exists("/dev/shm/mine")


@pytest.mark.parametrize("links", ["auto", "relay"])
def test_nothing_is_left_behind_by_one_who_is_killed(links: str) -> None:
    code = f"""
import os, signal, subprocess, time
from tests.network import Network
with Network(2, links={links!r}) as network:
    subprocess.Popen(network.on(0, ["sleep", "1000"]))
    time.sleep(0.5)
    print(*network.namespaces, *(helper.pid for helper in network._helpers), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    first, second, *helpers = killed.stdout.split()
    assert first != second
    assert len(helpers) == (2 if links == "relay" else 1)
    prefix = first.removesuffix("host0")
    eventually(lambda: not [name for name in namespaces() if name.startswith(prefix)])
    eventually(lambda: not any(psutil.pid_exists(int(pid)) for pid in helpers))
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == SLEEP]


SLEEP = ["sleep", "1000"]


def test_nothing_is_left_behind_by_an_error() -> None:
    before = set(namespaces())
    with pytest.raises(ValueError, match="planted"), Network(2, delay_ms=1) as network:
        assert set(network.namespaces) < set(namespaces())
        raise ValueError("planted")
    assert set(namespaces()) <= before | {"elsewhere"}
    assert not set(network.namespaces) & set(namespaces())


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SLACK * 15
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
