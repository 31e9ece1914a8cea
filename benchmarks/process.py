"""One peer in a process of its own: `Peer` here, and the program that it starts.

``check FILE`` saves its gradient, ``run`` does a repetition; each answers with a line of JSON.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings

from maml.errors import UserError
from maml.processes import system


class Peer:
    """A process of one of `benchmarks.peers`."""

    def __init__(self, name: str, setting: str, threads: int, *, float64: bool = False) -> None:
        self.name = name
        # A file: nobody reads a pipe while the peer runs.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "benchmarks.process", name, setting]
        command += ["--threads", str(threads)] + ["--float64"] * float64
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=environment,
        )  # fmt: skip
        self._answer()

    def ask(self, line: str) -> dict[str, float]:
        """Send a command; return its ``seconds``, and ``peak_mib``, the process's memory so far.

        A UserError says that the process has ended: for want of memory, say.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            self._process.kill()
            code = self._process.wait()
            said = self._errors.read().strip().splitlines()[-1:]
            raise UserError(f"{self.name}: exit code {code}: {''.join(said)}")
        answer: dict[str, float] = json.loads(line)
        return answer


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer")
    parser.add_argument("setting")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--float64", action="store_true")
    options = parser.parse_args()

    # Libraries print notices; the parent reads this process's real standard output.
    answers, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    # Each as its users run it: what `maml` sets of the process is ours.
    if options.peer.startswith("ours"):
        system.keep_memory()
    else:
        os.environ.pop("GOMP_SPINCOUNT", None)
    import torch

    from benchmarks.settings import repetition_of

    repetition = repetition_of(**vars(options))
    print(json.dumps({"ready": 1}), file=answers, flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        began = time.perf_counter()
        result = repetition()
        seconds = time.perf_counter() - began
        if command == "check":
            torch.save({k: v.detach() for k, v in result.items()}, arguments[0])
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "peak_mib": peak_mib}), file=answers, flush=True)


if __name__ == "__main__":
    main()
