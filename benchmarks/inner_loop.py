"""A GPT's inner loop of AdamW steps: memory and time of its meta-gradient, ours and a plain loop's.

    python -m benchmarks.inner_loop [--json FILE]

Each measurement is a process of its own, whose C library gives a weight that is freed back to the
system (``MALLOC_MMAP_THRESHOLD_``): two meta-gradients of `examples.gpt_inner_loop`, the memory
that their peak adds to that of the process before, and the time of the faster, and of all cores
together. Reverse mode through 32 steps takes 12 GiB.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import record
from maml.config.parser import at_least
from maml.processes import system
from maml.processes.program import run_program

STEPS = (2, 8, 32)
SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "2000000"}
PEERS = {
    "reverse": "a plain loop, `create_graph`",
    "checkpointed": "the same, each step by `torch.utils.checkpoint`",
    "ours": "ours, a snapshot for six steps",
    "ours-fast": "ours, all states kept",
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
    names = [name for name in leaves if name != "of sources"]
    n = len(names)

    def one(step: int, of_sources: Any, *state: Any) -> list[Any]:
        at, first, second = (list(state[i * n : i * n + n]) for i in range(3))
        params = dict(zip(names, at, strict=True)) | {"of sources": of_sources}
        loss, _ = example.support(net, params, own, step)
        after: list[Any] = []
        gradients = torch.autograd.grad(loss, at, create_graph=True)
        for w, m, v, g in zip(at, first, second, gradients, strict=True):
            g = torch.where(g == 0, 1e-16, g)  # of a token that was not there: √0 has no slope
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            root = (v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            w = w - example.RATE * (m / (1 - 0.9 ** (step + 1)) / root + 0.01 * w)
            after += [(w, m, v)]
        return [tensor for each in zip(*after, strict=True) for tensor in each]

    zeros = [torch.zeros_like(leaves[name]) for name in names]
    state = [*(leaves[name] for name in names), *zeros, *zeros]
    for step in range(steps):
        given = step, leaves["of sources"], *state
        state = checkpoint(one, *given, use_reentrant=False) if checkpointed else one(*given)
    loss, _ = example.query(net, dict(zip(names, state[:n], strict=True)), own, steps - 1)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def measure(peer: str, steps: int) -> dict[str, float]:
    """Measure in this process."""
    system.keep_memory()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from examples import gpt_inner_loop as example

    def repetition(size: Any, steps: int) -> Callable[[], object]:
        net = example.GPT(size)
        given = net, example.begin(net), example.draw(size, steps), steps
        if peer == "ours":
            return lambda: example.meta_gradient(*given)
        if peer == "ours-fast":
            return lambda: example.meta_gradient(*given, snapshots=steps)
        return lambda: plain(*given, checkpointed=peer == "checkpointed")

    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        repetition(example.TINY, 2)()
        repeated, seconds = repetition(example.Size(), steps), []
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        for _ in range(2):
            began = time.perf_counter(), time.process_time()
            repeated()
            seconds.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    added = peak - pages * resource.getpagesize() / 2**20
    return {"mib": added, "seconds": min(seconds)[0], "processor": min(seconds)[1]}


def main(arguments: list[str]) -> None:
    """Run the benchmark."""
    parser = record.parser("inner_loop", __doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--steps", nargs="+", type=at_least(1), default=list(STEPS))
    parser.add_argument("--here", action="store_true", help="one measurement, in this process")
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(measure(options.peers[0], options.steps[0])))
        return
    from maml.run.provenance import describe  # it imports torch, for which settings come too late

    # Of a shared machine, the time of its cores tells more than a clock.
    shown = "{0[mib]:.0f} MiB, {0[processor]:.1f} s"
    columns = {f"{n} steps": shown.replace("{0", f"{{{n} steps") for n in options.steps}
    report: dict[str, Any] = {"hardware": describe(os.cpu_count() or 1)}
    report |= {"columns": {"memory added, cores' time": "{peer}"} | columns}
    report["rows"] = [{"peer": PEERS[peer]} for peer in options.peers]
    for steps in tqdm(options.steps, leave=False):
        for peer, row in zip(options.peers, report["rows"], strict=True):
            words = f"-m benchmarks.inner_loop --here --peers {peer} --steps {steps}".split()
            command, environment = [sys.executable, *words], {**os.environ, **SETTINGS}
            row[f"{steps} steps"] = json.loads(subprocess.check_output(command, env=environment))
            record.write(options.json, report)
    print(record.table(report))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
