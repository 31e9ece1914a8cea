"""One peer in its own process: the class `Peer`, and the program that it starts.

``run`` does a repetition; ``check FILE`` also saves the gradient. Each answer is a line of JSON.
"""

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
    """A process that repeats what `benchmarks.settings.repetition_of` returns for a peer."""

    def __init__(self, name: str, setting: str, threads: int, *, float64: bool = False) -> None:
        self.name = name
        # A file, because a pipe that this process does not read could block the peer.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        asked = {"peer": name, "setting": setting, "threads": threads, "float64": float64}
        command = [sys.executable, "-m", "benchmarks.process", json.dumps(asked)]
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=environment,
        )  # fmt: skip
        self._answer()  # it is ready

    def ask(self, line: str) -> dict[str, float]:
        """Send a command; return its figures by name. UserError: the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self._answer()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
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


AT_LEAST_S = 0.1
"""A repetition calls a peer until so many seconds have passed."""


def main() -> None:
    """Serve until standard input ends."""
    asked = json.loads(sys.argv[1])
    # Libraries print notices: send these to stderr, because the parent reads the real stdout.
    answers, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    # Run each peer as its users do: the process settings of `maml` are only for ours.
    if asked["peer"].startswith("ours"):
        system.keep_memory()
    else:
        os.environ.pop("GOMP_SPINCOUNT", None)
    import torch

    # Fused attention has no second derivative, neither for ours nor for peers.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    from benchmarks.settings import repetition_of

    repetition = repetition_of(**asked)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        # A call of a millisecond is timed among others: the first one after a wait finds cold
        # caches and sleeping threads, as no call in a training does.
        began, n_calls = time.perf_counter(), 0
        while not n_calls or (command != "check" and time.perf_counter() - began < AT_LEAST_S):
            result = repetition()
            n_calls += 1
        seconds = (time.perf_counter() - began) / n_calls
        if command == "check":
            torch.save({k: v.detach() for k, v in result.items()}, arguments[0])
        del result  # free its memory before the next repetition
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer = {"seconds": seconds, "peak_mib": peak_mib}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
