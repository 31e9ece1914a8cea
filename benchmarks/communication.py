"""What a step costs on the network, and what network a number of workers needs: by formula.

    python -m benchmarks.communication [--workers 64] [--share 0.1] [--gbits 100 --micros 5]

P parameters of 4 bytes, n workers, links of bandwidth B (each way) and one-way latency λ. A step
computes for t and then communicates for

    c = serial bytes / B + trips · λ,

nothing being overlapped: a meta-gradient is complete only when its last task is. ``serial`` is
what the busiest link carries one after the other; a ring's links send and receive at once, a
server's first send models and then receive gradients. The demand is c ≤ share · t, of which half
is given to the bytes and half to the trips.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torchvision.models import resnet50

from benchmarks.command import command_line, count, positive
from benchmarks.markdown import grid
from maml.config.presets import PRESETS
from maml.learners import build_learner

RECORDS = Path(__file__).resolve().parent / "records"


class Pattern(NamedTuple):
    """How a strategy communicates in a step; the functions take n (and P).

    Attributes:
        carried: Bytes over rank zero's link, sent and received.
        serial: Bytes that the busiest link carries one after the other.
        trips: One-way latencies one after the other.
    """

    carried: Callable[[int, int], float]
    serial: Callable[[int, int], float]
    trips: Callable[[int], float]


def _ring(n: int, p: int) -> float:
    return 2 * (n - 1) / n * 4 * p


PATTERNS: dict[str, Pattern] = {
    # Rank zero is one of the n. Calls with the model, gradients home.
    "rpc chunk": Pattern(
        lambda n, p: 2 * (n - 1) * 4 * p, lambda n, p: 2 * (n - 1) * 4 * p, lambda n: 2
    ),
    # Rank zero is the server of n trainers. A push, an order with the model.
    "param-server": Pattern(lambda n, p: 2 * n * 4 * p, lambda n, p: 2 * n * 4 * p, lambda n: 2),
    # Reduce-scatter and all-gather, n - 1 hops each (Patarasuk and Yuan, 2009). gloo sends when
    # the receiver has said that it waits: two trips a hop.
    "allreduce, gloo's ring": Pattern(lambda n, p: 2 * _ring(n, p), _ring, lambda n: 4 * (n - 1)),
    "allreduce, nccl's ring": Pattern(lambda n, p: 2 * _ring(n, p), _ring, lambda n: 2 * (n - 1)),
    # Up a binary tree and down again, in pipelined pieces, two trees of which each carries half
    # (Sanders, Speck and Träff, 2009).
    "allreduce, nccl's trees": Pattern(
        lambda n, p: 4 * 4 * p, lambda n, p: 2 * 4 * p, lambda n: 2 * math.ceil(math.log2(n))
    ),
}


class Need(NamedTuple):
    """The least bandwidth (bytes a second, each way) and the longest one-way latency (seconds)."""

    bandwidth: float
    latency: float


def need(pattern: Pattern, workers: int, parameters: int, seconds: float, share: float) -> Need:
    """Return what keeps communication at ``share`` of ``seconds``, a step's computation."""
    half = share * seconds / 2
    return Need(pattern.serial(workers, parameters) / half, half / pattern.trips(workers))


def least_seconds(
    pattern: Pattern, workers: int, parameters: int, network: Need, share: float
) -> float:
    """Return the least computing time of a step of which ``network`` takes ``share`` at most."""
    moving = pattern.serial(workers, parameters) / network.bandwidth
    return (moving + pattern.trips(workers) * network.latency) / share


def parameters_of(preset: str) -> int:
    """Return the number of meta-parameters of a preset."""
    learner = build_learner(PRESETS[preset])
    return sum(tensor.numel() for tensor in learner.meta_parameters().values())


def models() -> dict[str, int]:
    """Return the examples' numbers of parameters."""
    with torch.device("meta"):
        large: nn.Module = resnet50(num_classes=5)
    return {
        "conv4, Omniglot 5-way": parameters_of("maml-omniglot-5way-1shot"),
        "ResNet-50, 5-way": sum(tensor.numel() for tensor in large.parameters()),
    }


def seconds_a_task(record: dict[str, Any]) -> float:
    """Return a task's seconds on one core, from a record of `benchmarks.throughput`.

    Omniglot 5-way 1-shot, one inner step, second order, as users run it.
    """
    rows = next(r["rows"] for r in record["records"] if r["setting"] == "omniglot-5w1s")
    rate = next(
        row["tasks_per_second"]
        for row in rows
        if row["peer"] == "ours" and row["allocator"] == "as users run it"
    )
    return float(record["hardware"]["threads"] / rate)


def table(
    record: dict[str, Any],
    workers: int | str = 64,
    share: float | str = 0.1,
    gbits: float | str = 100,
    micros: float | str = 5,
) -> str:
    """Return the tables for all examples, in Markdown.

    Args:
        record: Of `benchmarks.throughput`: how long a task computes.
        workers: How many compute.
        share: Of a step's computing time, what communication may take.
        gbits: Bandwidth of the last column, Gbit/s each way.
        micros: One-way latency of the last column, µs.
    """
    workers, share = int(workers), float(share)
    network = Need(float(gbits) * 1e9 / 8, float(micros) / 1e6)
    parts = []
    core = seconds_a_task(record)
    for model, p in models().items():
        times = {f"t = {1e3 * t:g} ms": t for t in (0.001, 0.01, 0.1)}
        if model.startswith("conv4"):
            times = {f"a task on one core, t = {1e3 * core:.2f} ms": core, **times}
        header = ["", "rank 0's link carries", "serial", "trips", *times]
        header.append(f"{float(gbits):g} Gbit/s, {float(micros):g} µs")
        rows = []
        for name, pattern in PATTERNS.items():
            cells = [
                name,
                f"{pattern.carried(workers, p) / 1e6:,.2f} MB",
                f"{pattern.serial(workers, p) / 1e6:,.2f} MB",
                f"{pattern.trips(workers):.0f}",
            ]
            for t in times.values():
                least, longest = need(pattern, workers, p, t, share)
                cells.append(f"≥ {_three(8 * least / 1e9)} Gbit/s, ≤ {_three(1e6 * longest)} µs")
            t = least_seconds(pattern, workers, p, network, share)
            rows.append([*cells, f"t ≥ {_three(1e3 * t)} ms"])
        title = f"{model}: P = {p:,}, 4 P = {4 * p / 1e6:.3f} MB; n = {workers}"
        parts.append(f"{title}\n\n{grid(header, rows)}")
    return "\n\n".join(parts)


def _three(x: float) -> str:
    """Return three digits, and zeros where there are more places."""
    digits = 2 - math.floor(math.log10(x))
    return f"{round(x, digits):,.{max(digits, 0)}f}"


def main() -> None:
    """Print the tables."""
    parser = command_line("communication", __doc__, record=False)
    parser.add_argument("--workers", type=count, default=64)
    parser.add_argument("--share", type=positive, default=0.1, help="of the computing time")
    parser.add_argument("--gbits", type=positive, default=100, help="bandwidth, Gbit/s each way")
    parser.add_argument("--micros", type=positive, default=5, help="one-way latency, µs")
    options = parser.parse_args()
    path = max(RECORDS.glob("*-throughput-omniglot-5w1s.json"))
    record = json.loads(path.read_text())
    print(table(record, options.workers, options.share, options.gbits, options.micros))
    print(f"\nA task on one core: {path.name}")


if __name__ == "__main__":
    main()
