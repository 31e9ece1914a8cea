"""launch/hosts: torchrun over ssh, between sshds in network namespaces, as root."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from launch import over_ssh
from maml.errors import UserError
from maml.run.directory import read_status
from tests.launching import REPO, SLACK, Launched, run_train, start
from tests.network import Network, why_not
from tests.runs import last, metrics
from tests.strategies.waiting import wait_for_iteration

LIMIT_S = 120
SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off", "--threads", "1", "--dtype", "float64", "--meta-batch-size", "4"),
    *("--log-every", "1", "--checkpoint-every", "5", "--strategy", "allreduce"),
]  # fmt: skip


def test_a_file_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode7 8  # the large one\n\nme@10.0.0.2\n")
    assert over_ssh.read_hosts(path) == [("node7", "8"), ("me@10.0.0.2", "auto")]
    for text, told in (
        ("node7 many\n", r"hosts, line 1: 'node7 many' is not"),
        ("a\nb 0\n", r"line 2: 'b 0' is not"),
        ("-oProxyCommand=x\n", "line 1"),
        ("a 1 2\n", "line 1"),
        ("a\na 2\n", "line 2: a is there twice"),
        ("# none\n", "no hosts"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=told):
            over_ssh.read_hosts(path)
    with pytest.raises(UserError, match=r"nowhere: cannot be read"):
        over_ssh.read_hosts(tmp_path / "nowhere")


def test_a_tether_ends_what_it_holds() -> None:
    """The command can still say its last words, and gets what is on no command line."""
    words = "import os, signal, sys, time; print(os.environ['SECRET'], flush=True)\n"
    words += "signal.signal(15, lambda *_: (print('bye', flush=True), sys.exit(3)))\ntime.sleep(99)"
    told = {"command": [sys.executable, "-c", words], "environment": {"SECRET": "known"}}
    end = subprocess.Popen(
        [sys.executable, str(REPO / "launch" / "tethered.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert end.stdin is not None and end.stdout is not None
    end.stdin.write(json.dumps(told).encode() + b"\n")
    end.stdin.flush()
    assert end.stdout.readline() == b"known\n"
    time.sleep(0.5)  # for its handler
    assert end.poll() is None
    end.stdin.close()
    assert end.stdout.read() == b"bye\n"
    assert end.wait(SLACK * 10) == 3


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Network, Path]]:
    """Two hosts with sshd; and the flags of ssh that let their root in."""
    sshd = shutil.which("sshd", path=f"/usr/sbin:{os.environ['PATH']}")
    if why_not() or sshd is None:
        pytest.skip(why_not() or "no sshd here (Debian: openssh-server)")
    folder = tmp_path_factory.mktemp("ssh")
    for key in ("host_key", "own_key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(make, check=True, timeout=60)
    (folder / "sshd").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/own_key.pub\nStrictModes no\n"
        "UsePAM no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nPidFile none\n"
    )
    (folder / "ssh").write_text(
        f"IdentityFile {folder}/own_key\nIdentitiesOnly yes\nStrictHostKeyChecking accept-new\n"
        f"UserKnownHostsFile {folder}/known_hosts\nLogLevel ERROR\n"
    )
    # Where sshd puts away what deals with strangers.
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with Network(2) as network:
        servers = [
            start(network.on(host, [sshd, "-D", "-e", "-f", str(folder / "sshd")]))
            for host in range(2)
        ]
        for server in servers:
            server.wait_for("Server listening", 30)
        try:
            yield network, folder / "ssh"
        finally:
            for server in servers:
                server.kill()


def launched(network: tuple[Network, Path], folder: Path, *flags: str) -> Launched:
    """Start it on host 0, with host 1 first in the file."""
    (folder / "hosts").write_text("host1 1\nhost0 1\n")
    ssh = ["--ssh", f"ssh -F {network[1]}"]
    command = [sys.executable, "-m", "launch.over_ssh", str(folder / "hosts"), *ssh]
    run_dir = ["--run-dir", str(folder / "run")]
    return start(network[0].on(0, [*command, *SINUSOID, *run_dir, *flags]))


def processes(network: Network) -> list[psutil.Process]:
    """Return what runs on the hosts beside their sshds."""
    found = []
    for namespace in network.namespaces:
        told = subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=60
        )
        for pid in map(int, told.stdout.split()):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.name() not in ("sshd", "unshare"):
                    found.append(process)
    return found


def until_none_is_left(network: Network) -> None:
    deadline = time.monotonic() + SLACK * 30
    while left := processes(network):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
def test_hosts_train_stop_and_go_on(network: tuple[Network, Path], tmp_path: Path) -> None:
    run = launched(network, tmp_path, "--iterations", "200")
    wait_for_iteration(run, tmp_path / "run", 20, limit=LIMIT_S)
    (launcher,) = [p for p in run.processes() if p.cmdline()[1:3] == ["-m", "launch.over_ssh"]]
    launcher.send_signal(signal.SIGINT)
    done = run.wait(LIMIT_S, expect=130)
    assert "launch/hosts: stopped by SIGINT" in done.stderr
    until_none_is_left(network[0])
    reached = last(tmp_path / "run")["iteration"]
    status = read_status(tmp_path / "run")
    assert status is not None and status["state"] == "stopped" and 20 <= reached < 200

    done = launched(network, tmp_path, "--iterations", "200").wait(LIMIT_S)
    assert "[host1] " in done.stdout and f"{reached} to 200" in done.stdout
    assert [row["iteration"] for row in metrics(tmp_path / "run")] == list(range(1, 201))
    starts = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["starts"]
    # Rank 0 is on the first host of the file.
    assert [start["processes"] for start in starts] == [2, 2]
    assert all("of host1, started" in start["job"]["torchrun"] for start in starts)
    # In a process of its own: it leaves variables behind, for its children to find.
    run_train([*SINUSOID, "--iterations", "200", "--run-dir", str(tmp_path / "alone")], LIMIT_S)
    for name, tensor in last(tmp_path / "alone")["model"].items():
        assert (last(tmp_path / "run")["model"][name] - tensor).abs().max() < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a worker", "the launcher"])
def test_all_end_together(network: tuple[Network, Path], tmp_path: Path, victim: str) -> None:
    """Killed: nothing is left anywhere, and what was done is saved."""
    run = launched(network, tmp_path, "--iterations", "1000000")
    wait_for_iteration(run, tmp_path / "run", 20, limit=LIMIT_S)
    if victim == "a worker":
        (other,) = [p for p in processes(network[0]) if p.cmdline()[0].startswith("maml[1/2]")]
        other.kill()
        done = run.wait(LIMIT_S, expect=1)
        assert "has failed; so the others are ended" in done.stderr
        said = [line for line in done.stdout.splitlines() if "error: " in line]
        assert any("error: rank 1 (host host0" in line for line in said), said
    else:
        (launcher,) = [p for p in run.processes() if p.cmdline()[1:3] == ["-m", "launch.over_ssh"]]
        launcher.kill()
        run.wait(LIMIT_S, expect=None)
    until_none_is_left(network[0])
    status = read_status(tmp_path / "run")
    state = "failed" if victim == "a worker" else "stopped"
    assert status is not None and status["state"] == state
    assert last(tmp_path / "run")["iteration"] >= 20
