"""Memory and time of a GPT's meta-gradient through AdamW steps: ours and a plain loop's.

    python -m benchmarks.inner_loop [--json FILE]

Each measurement computes two meta-gradients of `examples.gpt_inner_loop` in its own process. The
report has the memory that their peak adds to the process, and the wall-clock and processor time of
the faster one. ``MALLOC_MMAP_THRESHOLD_`` makes the C library return freed weights to the system.
Ours also has the allocator settings that our programs apply. Reverse mode through 32 steps takes
12 GiB.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from benchmarks import record
from benchmarks.process import Peer
from examples import gpt_inner_loop as example
from examples.gpt_inner_loop import Params
from maml.config.parser import at_least
from maml.processes.program import run_program
from maml.run.provenance import describe

STEPS = (2, 8, 32)
PEERS = {
    "reverse": "a plain loop, `create_graph`",
    "checkpointed": "the same, each step by `torch.utils.checkpoint`",
    "ours": "ours, a snapshot for six steps",
    "ours-fast": "ours, all states kept",
}


def plain(
    net: example.GPT, meta_params: Params, task: Params, steps: int, checkpointed: bool
) -> Params:
    """Return the gradient of `examples.gpt_inner_loop.meta_gradient`, by a plain loop."""
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
            g = torch.where(g == 0, 1e-16, g)  # an absent token has gradient 0: √0 has no slope
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            root = (v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            w = w - example.RATE * (m / (1 - 0.9 ** (step + 1)) / root + 0.01 * w)
            after += [(w, m, v)]
        return [tensor for each in zip(*after, strict=True) for tensor in each]

    zeros = [torch.zeros_like(leaves[name]) for name in names]
    state = [*(leaves[name] for name in names), *zeros, *zeros]
    for step in range(steps):
        given: tuple[Any, ...] = step, leaves["of sources"], *state
        state = checkpoint(one, *given, use_reentrant=False) if checkpointed else one(*given)
    loss, _ = example.query(net, dict(zip(names, state[:n], strict=True)), own, steps - 1)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def repetition_of(peer: str, setting: str, **_: object) -> Callable[[], Any]:
    """Return the function that ``peer`` repeats; ``setting``: the number of steps."""

    def of(size: example.Size, steps: int) -> Callable[[], Any]:
        net = example.GPT(size)
        given = net, example.begin(net), example.draw(size, steps), steps
        if peer.startswith("ours"):
            snapshots = steps if peer == "ours-fast" else 0
            return partial(example.meta_gradient, *given, snapshots=snapshots)
        return partial(plain, *given, checkpointed=peer == "checkpointed")

    of(example.TINY, 2)()  # warm up: call every operation once
    return of(example.Size(), int(setting))


def main(arguments: list[str]) -> None:
    """Run the benchmark."""
    parser = record.parser("inner_loop", __doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--steps", nargs="+", type=at_least(1), default=list(STEPS))
    options = parser.parse_args(arguments)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "2000000"
    # On a shared machine, processor time is more reliable than wall-clock time.
    shown = "{0[mib]:.0f} MiB, {0[processor]:.1f} s"
    columns = {f"{n} steps": shown.replace("{0", f"{{{n} steps") for n in options.steps}
    cores = os.cpu_count() or 1
    report: dict[str, Any] = {"hardware": describe(cores)}
    report |= {"columns": {"memory added, cores' time": "{peer}"} | columns}
    report["rows"] = [{"peer": PEERS[name]} for name in options.peers]
    for steps in tqdm(options.steps, leave=False):
        for name, row in zip(options.peers, report["rows"], strict=True):
            with Peer(name, str(steps), cores, of="inner_loop") as peer:
                first, second = peer.ask("run"), peer.ask("run")
            added = second["peak_mib"] - peer.ready_mib
            faster = min(first, second, key=lambda one: one["seconds"])
            row[f"{steps} steps"] = faster | {"mib": added}
            record.write(options.json, report)
    print(record.table(report))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
