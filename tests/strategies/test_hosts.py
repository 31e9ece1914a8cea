"""The strategies across hosts, which are network namespaces."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launching import TRAIN, run, run_together, start
from tests.network import Network, why_not
from tests.strategies.faults import DEATH_S, IN_ORDER, SINUSOID, wait_for_iteration
from tests.strategies.test_equivalence import SEVEN_TASKS, TOPOLOGIES, Trained, assert_same, trained

# On a busy machine, the start of a process takes most of this time.
LIMIT_S = 240
NOT_BY_DEFAULT = (("allreduce", 1), ("rpc chunk", 0), ("rpc chunk", 1))


@pytest.fixture(scope="module", autouse=True)
def _permitted() -> None:
    if why_not():
        pytest.skip(why_not())


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    run_dir = tmp_path_factory.mktemp("local")
    run([*TRAIN, *SEVEN_TASKS, "--strategy", "local", "--run-dir", str(run_dir)], LIMIT_S)
    return trained(run_dir)


@pytest.mark.parametrize(
    ("hosts", "strategies"), [(2, ["rpc chunk", "allreduce"]), (3, [*IN_ORDER])]
)
def test_equals_local(
    local: Trained, tmp_path: Path, hosts: int, strategies: Sequence[str]
) -> None:
    """Two by torchrun, three by hand. MASTER_ADDR is a host name, there that of the loopback."""
    runs = {name: [*SEVEN_TASKS, *IN_ORDER[name]] for name in strategies}
    args = [*TOPOLOGIES, str(tmp_path), json.dumps(runs)]
    with Network(hosts) as network:
        if hosts == 2:
            commands = [network.torchrun(host, 1, args) for host in range(hosts)]
        else:
            commands = [network.by_hand(host, [sys.executable, *args]) for host in range(hosts)]
        run_together(commands, LIMIT_S)
    for name in runs:
        assert_same(trained(tmp_path / name), local, name)


@pytest.mark.parametrize(
    ("strategy", "lost"),
    [
        ("allreduce", 0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in NOT_BY_DEFAULT),
    ],
)
def test_a_host_that_vanishes_ends_the_run(tmp_path: Path, strategy: str, lost: int) -> None:
    """Its cable is cut without a message. The ranks of all hosts end, and progress is kept.

    Whoever still reaches the store leaves the line to rank 0. Each other host has its own line.
    """
    args = [*SINUSOID, *IN_ORDER[strategy], "--timeout", "20", "--run-dir", str(tmp_path)]
    with Network(3) as network:
        ranks = [start(network.by_hand(host, [*TRAIN, *args])) for host in range(3)]
        wait_for_iteration(ranks[0], tmp_path, 10, limit=LIMIT_S)
        network.cut(lost)
        done = [rank.wait(90, expect=1) for rank in ranks]
    said = [re.findall("^error: (.*)", one.stderr, re.MULTILINE) for one in done]
    named = [
        [re.findall(r"rank (\d) \(host .*?\) does not answer", line) for line in of] for of in said
    ]
    assert named == ([[["1", "2"]], [["0"]], [["0"]]] if lost == 0 else [[["1"]], [["0"]], []]), (
        said
    )
    assert all("silent for" in line for of in said for line in of)
    assert (tmp_path / "checkpoints" / "last.pt").exists()


@pytest.mark.slow
def test_a_host_that_vanishes_with_torchruns_store(tmp_path: Path) -> None:
    """The rank that is left names rank 0 and its host. torchrun itself may wait for long."""
    args = [*SINUSOID, *IN_ORDER["allreduce"], "--timeout", "20", "--run-dir", str(tmp_path)]
    with Network(2) as network:
        launched = [start(network.torchrun(host, 1, [*TRAIN[1:], *args])) for host in range(2)]
        try:
            wait_for_iteration(launched[0], tmp_path, 10, limit=LIMIT_S)
            network.cut(0)
            launched[1].wait_for("silent for", 20 + DEATH_S)
            (line,) = re.findall("^error: (.*)", launched[1].stderr, re.MULTILINE)
        finally:
            for one in launched:
                one.kill()
    assert re.match(r"rank 0 \(host host0, pid \d+\) or its launcher \(torchrun\) does not", line)


def test_one_host_listens_to_nobody_outside(tmp_path: Path) -> None:
    """Through launch/local without a network of its own, which it says, by each transport, where
    the host's name has an outer address.
    """
    deny = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    launcher = ["unshare", "--map-root-user", "sh", "-c", deny, "sh", sys.executable, "-m"]
    launcher += ["launch.workers", *SINUSOID, "--workers", "2"]
    with Network(1, own_names="address") as network:
        strategies = ("rpc exclusive", "allreduce")
        runs = {name: tmp_path / name.replace(" ", "-") for name in strategies}
        launched = {
            name: start(network.on(0, [*launcher, *IN_ORDER[name], "--run-dir", str(run_dir)]))
            for name, run_dir in runs.items()
        }
        try:
            for name, run_dir in runs.items():
                wait_for_iteration(launched[name], run_dir, 10, limit=LIMIT_S)
                assert "the system allows no network namespace" in launched[name].stderr
            assert network.listeners(0) == {"127.0.0.1"}
        finally:
            for one in launched.values():
                one.kill()
