"""One peer in a process of its own, told what to do on standard input.

``check FILE`` saves its gradient, ``run`` does a repetition; each answers with seconds taken.
The peers `GEMMS` are the roofline: one repetition is `GEMM_REPEATS` products of `GEMM_SIZE`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable

from maml.processes import allocator

GEMM_SIZE, GEMM_REPEATS = 2048, 4
GEMMS = ("gemm-blas", "gemm-onednn")
"""A float32 product by torch's BLAS and by oneDNN; on some processors one is far the slower."""


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer")
    parser.add_argument("setting")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tuned", action="store_true", help="our allocator settings")
    parser.add_argument("--float64", action="store_true")
    options = parser.parse_args()

    # Libraries print notices; the parent reads this process's real standard output.
    answers, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    if options.tuned:
        allocator.tune()
    else:
        # As its users run it: without what `maml` sets for its own threads.
        os.environ.pop("GOMP_SPINCOUNT", None)
    import torch

    torch.set_num_threads(options.threads)
    repetition: Callable[[], object]
    if options.peer in GEMMS:
        a, b = torch.randn(2, GEMM_SIZE, GEMM_SIZE)
        if options.peer == "gemm-onednn" and torch.backends.mkldnn.is_available():
            a, b = a.to_mkldnn(), b.to_mkldnn()

        def repetition() -> None:
            for _ in range(GEMM_REPEATS):
                torch.nn.functional.linear(a, b)
    else:
        from benchmarks.peers import build
        from benchmarks.settings import SETTINGS, in_float64, make_tasks
        from maml.learners import build_learner

        setting = SETTINGS[options.setting]
        if options.float64:
            setting = in_float64(setting)
        if options.peer.startswith("ours"):
            # The preset's own choice: a tiny network takes one thread whatever there are.
            torch.set_num_threads(setting.config.threads or options.threads)
        tasks = make_tasks(setting.config, setting.tasks)
        repetition = build(options.peer, build_learner(setting.config), tasks, options.threads)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        began = time.perf_counter()
        result = repetition()
        seconds = time.perf_counter() - began
        if command == "check":
            assert isinstance(result, dict)
            torch.save({k: v.detach() for k, v in result.items()}, arguments[0])
        print(seconds, file=answers, flush=True)


if __name__ == "__main__":
    main()
