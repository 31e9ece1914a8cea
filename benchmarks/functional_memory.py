"""Peak memory of the gradient of learned example weights against the number of inner steps.

    python -m benchmarks.functional_memory [--json FILE]

The problem is that of docs/library.md, larger: a network of two hidden layers takes inner steps on
examples that are weighted; the outer loss is that of clean examples; the weights' gradient is
computed in reverse mode and forward over reverse ("mixed"). Each measurement is a process of its
own, its peak that of the whole process (ru_maxrss), and its growth what the gradient adds to a
process that has computed one of a single step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.command import command_line, write
from benchmarks.markdown import grid
from benchmarks.memory import peak_mib

WAYS = ("reverse", "mixed")
STEPS = (1, 8, 32, 128)
EXAMPLES, CLEAN, FEATURES, HIDDEN, CLASSES = 2000, 200, 64, 256, 10


class Measurement(NamedTuple):
    """Of one gradient: MiB, seconds, and the gradient's norm, which tells whether ways agree."""

    peak_mib: float
    growth_mib: float
    seconds: float
    norm: float


def measure(way: Any, steps: int) -> Measurement:
    """Measure one gradient in this process."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    import maml
    from maml.params import Params
    from maml.processes import allocator

    allocator.tune()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = (FEATURES, HIDDEN, HIDDEN, CLASSES)
    start: Params = {}
    for i, (n, m) in enumerate(itertools.pairwise(sizes)):
        start |= {f"w{i}": torch.randn(n, m) / n**0.5, f"b{i}": torch.zeros(m)}

    def outputs(params: Params, x: Tensor) -> Tensor:
        for i in range(2):
            x = torch.tanh(x @ params[f"w{i}"] + params[f"b{i}"])
        return x @ params["w2"] + params["b2"]

    def support(params: Params, task: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        found = outputs(params, task["x"])
        losses = F.cross_entropy(found, task["y"], reduction="none")
        return (params["weights"] * losses).mean(), found

    def query(params: Params, task: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        found = outputs(params, task["clean_x"])
        return F.cross_entropy(found, task["clean_y"]), found

    def gradient(steps: int) -> Tensor:
        def state(meta: Params) -> maml.Problem:
            weights = {"weights": torch.sigmoid(meta["logits"])}
            return maml.Problem(start, support, query, lr=0.1, steps=steps, fixed=weights)

        found = maml.meta_gradient(state, {"logits": torch.zeros(EXAMPLES)}, task, way)
        return found.gradients["logits"]

    task = {
        "x": torch.randn(1, EXAMPLES, FEATURES),
        "y": torch.randint(CLASSES, (1, EXAMPLES)),
        "clean_x": torch.randn(1, CLEAN, FEATURES),
        "clean_y": torch.randint(CLASSES, (1, CLEAN)),
    }
    # One step first: libraries, and working memory that any use needs.
    gradient(1)
    before, began = peak_mib(), time.perf_counter()
    norm = gradient(steps).norm().item()
    seconds = time.perf_counter() - began
    return Measurement(peak_mib(), peak_mib() - before, seconds, norm)


def table(record: dict[str, Any]) -> str:
    """Return a record as a table in Markdown: MiB of the process, and what the gradient added."""
    cells = {
        (row["way"], row["steps"]): f"{row['peak_mib']:.0f} (+{row['growth_mib']:.0f})"
        for row in record["rows"]
    }
    return grid(
        ["inner steps", *map(str, record["steps"])],
        [[f"`{way}`", *(cells[way, n] for n in record["steps"])] for way in record["ways"]],
    )


def main() -> None:
    """Run the benchmark, or one measurement of it (``--one``)."""
    parser = command_line("functional_memory", __doc__)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))._asdict()))
        return
    from benchmarks.hardware import describe

    rows: list[dict[str, Any]] = []
    for way, steps in tqdm([(way, steps) for way in WAYS for steps in STEPS], leave=False):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.functional_memory"]
        done = subprocess.run([*command, "--one", way, str(steps)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{way}, {steps} steps: {done.stderr.strip().splitlines()[-1:]}")
        rows.append({"way": way, "steps": steps, **json.loads(done.stdout.splitlines()[-1])})
    sizes = {
        "examples": EXAMPLES, "clean": CLEAN, "features": FEATURES, "hidden": HIDDEN,
        "classes": CLASSES,
    }  # fmt: skip
    record = {
        "hardware": describe(1), "sizes": sizes, "ways": WAYS, "steps": STEPS, "rows": rows
    }  # fmt: skip
    print(table(record))
    write(options.json, record)


if __name__ == "__main__":
    main()
