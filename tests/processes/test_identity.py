"""A process is told from another one that has its number later."""

import os
import subprocess
import sys

from maml.processes.identity import Identity, started


def test_a_process_from_beginning_to_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = Identity.own()._replace(pid=child.pid, since=started(child.pid))
    assert not identity.is_gone()
    assert started(child.pid) == identity.since
    # Of the same number, but another start; of another boot.
    assert identity._replace(since=identity.since + "0").is_gone()
    boot, space = identity.place.split()
    assert identity._replace(place=f"{boot}0 {space}").is_gone()
    # Nothing is known of another host, or of another container.
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identity.is_gone(), "a process that nobody has waited for is gone as well"
    child.wait()
    assert identity.is_gone()
    assert not identity._replace(host="another").is_gone()
    assert not identity._replace(place=f"{boot} pid:[1]").is_gone()
    assert not Identity.own().is_gone()
