"""A GPT's inner loop of AdamW steps: memory and time of its meta-gradient, ours and a plain loop's.

    python -m benchmarks.inner_loop [--json FILE]

Each measurement is a process of its own, with our allocator settings: two meta-gradients of
`examples.gpt_inner_loop`, whose peak memory is what they add to that of the process before, and of
which the faster is timed. Reverse mode through 32 steps takes 12 GiB.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from benchmarks import record
from maml.config.parser import at_least
from maml.processes import allocator
from maml.processes.program import run_program

STEPS = (2, 8, 32)
PEERS = {
    "reverse": "a plain loop, `create_graph`",
    "checkpointed": "the same, each step by `torch.utils.checkpoint`",
    "ours": "ours",
}


def plain(
    net: Any, meta_params: dict[str, Any], task: dict[str, Any], steps: int, checkpointed: bool
) -> dict[str, Any]:
    """Return the gradient of `examples.gpt_inner_loop.meta_gradient`, by a loop of one's own."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from examples import gpt_inner_loop as example

    leaves = {name: t.clone().requires_grad_() for name, t in meta_params.items()}
    own = {name: tensor[0] for name, tensor in task.items()}
    of_sources = leaves["of sources"]
    names = [name for name in leaves if name != "of sources"]
    n = len(names)

    def one(step: int, of_sources: Any, *state: Any) -> list[Any]:
        at, first, second = (list(state[i * n : i * n + n]) for i in range(3))
        params = dict(zip(names, at, strict=True)) | {"of sources": of_sources}
        loss, _ = example.support(net, params, own, step)
        found = torch.autograd.grad(loss, at, create_graph=True)
        # A token that was not there has a gradient of zero, where a root has no slope.
        gradients = [torch.where(g == 0, 1e-16, g) for g in found]
        first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients, strict=True)]
        second = [0.999 * v + 0.001 * g * g for v, g in zip(second, gradients, strict=True)]
        means = [m / (1 - 0.9 ** (step + 1)) for m in first]
        roots = [(v / (1 - 0.999 ** (step + 1))).sqrt() for v in second]
        at = [
            w - example.RATE * (m / (r + 1e-8) + 0.01 * w)
            for w, m, r in zip(at, means, roots, strict=True)
        ]
        return [*at, *first, *second]

    zeros = [torch.zeros_like(leaves[name]) for name in names]
    state = [*(leaves[name] for name in names), *zeros, *zeros]
    for step in range(steps):
        if checkpointed:
            state = checkpoint(one, step, of_sources, *state, use_reentrant=False)
        else:
            state = one(step, of_sources, *state)
    loss, _ = example.query(net, dict(zip(names, state[:n], strict=True)), own, steps - 1)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def measure(peer: str, steps: int) -> dict[str, float]:
    """Measure in this process."""
    allocator.tune()
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from examples import gpt_inner_loop as example

    def repetition(size: Any, steps: int) -> Callable[[], object]:
        net = example.GPT(size)
        given = net, example.begin(net), example.draw(size, steps), steps
        if peer == "ours":
            return lambda: example.meta_gradient(*given)
        return lambda: plain(*given, checkpointed=peer == "checkpointed")

    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        repetition(example.TINY, 2)()
        repeated = repetition(example.Size(), steps)
        pages = int(open("/proc/self/statm").read().split()[1])  # noqa: SIM115
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            repeated()
            seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"mib": peak - pages * resource.getpagesize() / 2**20, "seconds": min(seconds)}


def main(arguments: list[str]) -> None:
    """Run the benchmark."""
    parser = record.parser("inner_loop", __doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--steps", nargs="+", type=at_least(1), default=list(STEPS))
    parser.add_argument("--here", action="store_true", help="measure in this process, one of each")
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(measure(options.peers[0], options.steps[0])))
        return
    from maml.run.provenance import describe  # it imports torch, for which settings come too late

    shown = "{0[mib]:.0f} MiB, {0[seconds]:.1f} s"
    report: dict[str, Any] = {"hardware": describe(os.cpu_count() or 1), "columns": {}, "rows": []}
    report["columns"] = {"meta-gradient": "{peer}"} | {
        f"{n} steps": shown.replace("{0", f"{{{n} steps") for n in options.steps
    }
    for peer in options.peers:
        report["rows"].append(row := {"peer": PEERS[peer]})
        for steps in tqdm(options.steps, desc=peer, leave=False):
            command = [sys.executable, "-m", "benchmarks.inner_loop", "--here"]
            command += ["--peers", peer, "--steps", str(steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row[f"{steps} steps"] = json.loads(done.stdout)
            record.write(options.json, report)
    print(record.table(report))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
