"""A Slurm cluster on this machine: Debian's slurm-wlm and munge, on hosts of network namespaces.

``with Cluster(folder) as cluster`` starts munged, slurmctld and a slurmd a host, as root, with a
configuration and a state of their own in ``folder``. They go with their namespaces (`Network`), so
that none is left, also if this process is killed.
"""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.launching import REPO, until
from tests.network import Network

PROGRAMS = {
    "munge": ["munged"],
    "slurmctld": ["slurmctld"],
    "slurmd": ["slurmd"],
    "slurm-client": ["sbatch", "srun", "scontrol", "squeue", "scancel"],
}
CONFIGURATION = """
ClusterName=test
SlurmctldHost=host0({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until credentials of its last start have expired: two minutes by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
# Neither cgroups nor affinity, which a test may not have.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
# So many CPUs as it says here, whatever the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


def missing() -> list[str]:
    return [
        package
        for package, programs in PROGRAMS.items()
        if not all(shutil.which(program) for program in programs)
    ]


class Cluster:
    """Slurm's daemons on two nodes, ``host0`` and ``host1``, of two CPUs each; a context manager.

    There are two partitions of all nodes: jobs in ``high`` pre-empt those in ``low``, the default.
    All its files are in ``folder``, whose path must be short because it has a socket.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._network = folder, Network(2)
        self._environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "VENV": str(Path(sys.executable).parents[1]),
            "PATH": f"/usr/sbin:{os.environ['PATH']}",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        self._network.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._network.__exit__(*error)
        for daemon in self._daemons:
            daemon.wait(30)

    def _start(self) -> None:
        self.folder.chmod(0o755)
        for name in ("state", "host0", "host1"):
            (self.folder / name).mkdir()
        lines = [CONFIGURATION.format(folder=self.folder, controller=self._network.addresses[0])]
        for host, address in enumerate(self._network.addresses):
            lines.append(f"NodeName=host{host} NodeAddr={address} CPUs=2")
        lines.append("PartitionName=low Nodes=ALL PriorityTier=1 Default=YES")
        lines.append("PartitionName=high Nodes=ALL PriorityTier=2")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(128))
        places = [
            f"--{name}-file={self.folder}/munge.{name.replace('-', '')}"
            for name in ("key", "log", "pid", "seed")
        ]
        socket = f"--socket={self.folder}/munge.socket"
        self._daemon(0, ["munged", "--foreground", "--force", socket, *places])
        self.until(lambda: (self.folder / "munge.socket").exists())
        self._daemon(0, ["slurmctld", "-D", "-i"])
        for host in range(2):
            self._daemon(host, ["slurmd", "-D", "-N", f"host{host}"])
        self.until(lambda: self._states() == {"idle"})

    def _daemon(self, host: int, command: Sequence[str]) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(subprocess.Popen(
                self._network.on(host, command), env=self._environment, cwd=REPO,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            ))  # fmt: skip

    def until(self, true: Callable[[], object]) -> None:
        """Wait until ``true`` holds, as `tests.launching.until`; else show what the daemons say."""
        until(true, 150, self.logs)

    def _states(self) -> set[str]:
        return set(self.command("sinfo", "-h", "-o", "%t", expect=None).split())

    def command(self, *command: str, expect: int | None = 0) -> str:
        """Run one of Slurm's commands on ``host0`` and return what it prints."""
        done = subprocess.run(
            self._network.on(0, command), env=self._environment, cwd=REPO, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
        if expect is not None and done.returncode != expect:
            raise AssertionError(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm says of a job: ``JobState`` and ``Restarts``, among others."""
        words = self.command("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-5000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )
