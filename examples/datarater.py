"""DataRater (arXiv:2505.17895) on drawings, half of which have random labels.

    python -m examples.datarater --seeds 10 --json datarater.json

A small network, the rater, gives a weight to each example of a batch. Its inputs are the drawing,
the given label, and the current model's loss on the example. Four models train on weighted batches.
After every two of their steps, the rater learns from their loss on drawings with right labels. Then
the models continue: each inner problem begins where the last one ended
(`maml.Problem.optimizer_state`). At the end, two new models train from the same start on the same
batches: with the rater's weights, and without. The program prints their accuracies on new drawings.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import maml
from datasets.batches import divide
from datasets.glyphs import open_classes
from maml.config.parser import at_least
from maml.evaluation.intervals import shown
from maml.run.provenance import describe

WAYS, WIDTH, BATCH = 50, 128, 64
MODELS, TRUNCATION = 4, 2
RATE, RATER_RATE = 3e-3, 3e-3
Params = dict[str, Tensor]


class Data(NamedTuple):
    """Drawings ``x [n, 196]`` and labels ``y [n]``."""

    x: Tensor
    y: Tensor

    def batch(self, size: int, generator: torch.Generator) -> Data:
        """Return a batch drawn at random."""
        chosen = torch.randint(len(self.y), (size,), generator=generator)
        return Data(self.x[chosen], self.y[chosen])


def drawings(split: str) -> Data:
    """Return the drawings of a split of 50 classes, 14 × 14."""
    found = divide(open_classes("train"), split, WAYS)
    images = torch.from_numpy(found.images[found.rows].copy()).float() / 255
    return Data(F.avg_pool2d(images[:, None], 2).flatten(1), torch.from_numpy(found.labels))


def layers(sizes: dict[str, tuple[int, int]], generator: torch.Generator) -> Params:
    """Return random matrices by name."""
    return {n: torch.randn(i, o, generator=generator) / i**0.5 for n, (i, o) in sizes.items()}


def new_model(generator: torch.Generator) -> Params:
    """Return a new model's parameters."""
    return layers({"first": (196, WIDTH), "second": (WIDTH, WAYS)}, generator)


def each_loss(params: Params, data: Data) -> tuple[Tensor, Tensor]:
    """Return each example's loss ``[n]``, and the logits."""
    logits = torch.relu(data.x @ params["first"]) @ params["second"]
    return F.cross_entropy(logits, data.y, reduction="none"), logits


def weights(params: Params, data: Data, losses: Tensor) -> Tensor:
    """Return the weight of each example of a batch, ``[n]``; their mean is 1."""
    now = torch.stack([losses, losses / losses.mean()], 1).detach()
    hidden = data.x @ params["of x"] + params["of y"][data.y] + now @ params["of loss"]
    return len(losses) * (torch.tanh(hidden) @ params["score"]).squeeze(1).softmax(0)


def support(params: Params, task: tuple[Data, Data], step: int) -> tuple[Tensor, Tensor]:
    """Return the inner loss of a step, the weighted loss of its batch, and the logits."""
    data = Data(*(part[step] for part in task[0]))
    losses, logits = each_loss(params, data)
    return (weights(params, data, losses) * losses).mean(), logits


def query(params: Params, task: tuple[Data, Data], step: int) -> tuple[Tensor, Tensor]:
    """Return the outer loss, on drawings with right labels, and the logits."""
    losses, logits = each_loss(params, task[1])
    return losses.mean(), logits


def train_rater(
    given: Data, right: Data, steps: int, life: int, generator: torch.Generator
) -> Params:
    """Return a rater after ``steps`` outer steps; each model is replaced after ``life`` steps."""
    rater = layers({"of x": (196, 64), "of y": (WAYS, 64), "of loss": (2, 64)}, generator)
    rater["score"] = torch.zeros(64, 1)  # so all examples have the same weight at first
    rater = {name: tensor.requires_grad_() for name, tensor in rater.items()}
    optimizer = torch.optim.Adam(rater.values(), lr=RATER_RATE)
    models: list[tuple[Params, Any]] = [(new_model(generator), None) for _ in range(MODELS)]
    for step in range(steps):
        total = {name: torch.zeros_like(tensor) for name, tensor in rater.items()}
        for i in range(MODELS):
            if (step + i * life // MODELS) % life == 0:  # the models have different ages
                models[i] = new_model(generator), None
            start, optimizer_state = models[i]

            def state(
                rater: Params, start: Params = start, optimizer_state: Any = optimizer_state
            ) -> maml.Problem:
                return maml.Problem(
                    start, support, query, optimizer="adamw", lr=RATE, steps=TRUNCATION,
                    fixed=rater, optimizer_state=optimizer_state, lives_on=True,
                )  # fmt: skip

            batches = [given.batch(BATCH, generator) for _ in range(TRUNCATION)]
            inner = Data(*(torch.stack(parts)[None] for parts in zip(*batches, strict=True)))
            outer = Data(*(part[None] for part in right.batch(BATCH, generator)))
            found = maml.meta_gradient(state, rater, (inner, outer), batching="tasks")
            assert found.end is not None
            models[i] = found.end
            norm = torch.stack([g.norm() for g in found.gradients.values()]).norm() + 1e-12
            for name, gradient in found.gradients.items():  # one normalised gradient per model
                total[name] += gradient / norm / MODELS
        for name, tensor in rater.items():
            tensor.grad = total[name]
        optimizer.step()
    return rater


def accuracy(given: Data, test: Data, rater: Params | None, steps: int, seed: int) -> float:
    """Return the test accuracy in per cent of a new model, trained with or without a rater."""
    generator = torch.Generator().manual_seed(1000 + seed)
    model = {name: w.requires_grad_() for name, w in new_model(generator).items()}
    optimizer = torch.optim.AdamW(model.values(), lr=RATE)
    for _ in range(steps):
        batch = given.batch(BATCH, generator)
        losses, _ = each_loss(model, batch)
        with torch.no_grad():
            weight = 1.0 if rater is None else weights(rater, batch, losses)
        optimizer.zero_grad()
        (weight * losses).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return 100 * float((each_loss(model, test)[1].argmax(1) == test.y).float().mean())


def compare(seed: int, outer_steps: int, steps: int) -> dict[str, float]:
    """Return a seed's accuracies with the rater's weights, and without weights."""
    generator = torch.Generator().manual_seed(seed)
    given, right, test = (drawings(split) for split in ("train", "validation", "test"))
    wrong = torch.rand(len(given.y), generator=generator) < 0.5
    other = torch.randint(WAYS, given.y.shape, generator=generator)
    given = given._replace(y=torch.where(wrong, other, given.y))
    rater = train_rater(given, right, outer_steps, steps // TRUNCATION, generator)
    row = {"seed": seed, "rated": accuracy(given, test, rater, steps, seed)}
    row["unweighted"] = accuracy(given, test, None, steps, seed)
    return row | {"difference": row["rated"] - row["unweighted"]}


def main() -> None:
    """Compare over seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=at_least(2), default=5)
    parser.add_argument("--outer-steps", type=int, default=600, help="of the rater")
    parser.add_argument("--steps", type=int, default=400, help="of the models that are compared")
    parser.add_argument("--json", type=Path, help="write the accuracies to this file")
    options = parser.parse_args()
    rows: list[dict[str, float]] = []
    for seed in range(options.seeds):
        began = time.perf_counter()
        rows.append(compare(seed, options.outer_steps, options.steps))
        told = ", ".join(f"{name} {value:g}" for name, value in rows[-1].items())
        print(f"{told} ({time.perf_counter() - began:.0f} s)", flush=True)
    over_seeds = shown(np.array([row["difference"] for row in rows]))
    ci95 = over_seeds.high - over_seeds.mean
    print(f"difference {over_seeds.mean:.2f} ± {ci95:.2f} points")
    if options.json:
        columns = {
            "seed": "{seed}", "rated": "{rated:.2f} %", "unweighted": "{unweighted:.2f} %",
            "difference": "{difference:+.2f}",
        }  # fmt: skip
        record = {"rows": rows, "mean": over_seeds.mean, "ci95": ci95, "columns": columns}
        record["hardware"] = describe(torch.get_num_threads())
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
