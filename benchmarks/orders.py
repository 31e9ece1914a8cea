"""The angle between MAML's first-order and second-order gradients, as cosines.

    python -m benchmarks.orders --batches 100 --json orders.json

Both differentiate the same training tasks, which come after the last ones of the record's run, by
the run's initial weights and by the record's.
"""

import sys
from typing import Any

import torch

import maml
from benchmarks import record
from maml.config import Config
from maml.config.parser import at_least
from maml.config.presets import with_values
from maml.learners import build_learner
from maml.params import Params
from maml.processes.program import run_program
from maml.run.provenance import describe

COLUMNS = {
    "weights": "{weights}",
    "tasks": "{tasks}",
    "cosine of the two orders": "{cosine:.2f} ({interval[0]:.2f} to {interval[1]:.2f})",
    "two halves, first order": "{first_halves:.2f}",
    "two halves, second order": "{second_halves:.2f}",
}


def gradients(config: Config, params: Params, batches: int) -> torch.Tensor:
    """Return the gradient of each meta-batch: ``[batches, P]``."""
    learner = build_learner(config)
    episodes, size, rows = learner.open_tasks("train"), config.meta_batch_size, []
    for batch in range(config.iterations, config.iterations + batches):
        tasks = episodes.tasks(torch.arange(batch * size, (batch + 1) * size))
        found = learner.outer_gradient(params, tasks).gradients
        rows.append(torch.cat([gradient.reshape(-1) for gradient in found.values()]))
    return torch.stack(rows)


def compare(config: Config, params: Params, batches: int) -> dict[str, Any]:
    """Return a row's figures. The interval (95 %) is a bootstrap over meta-batches."""
    first = gradients(with_values(config, order="first"), params, batches)
    second = gradients(with_values(config, order="second"), params, batches)
    drawn = torch.randint(batches, (2000, batches), generator=torch.Generator())
    cosines = torch.tensor([_cosine(first[some], second[some]) for some in drawn])
    return {
        "tasks": batches * config.meta_batch_size,
        "cosine": _cosine(first, second),
        "interval": torch.quantile(cosines, torch.tensor([0.025, 0.975])).tolist(),
        "first_halves": _cosine(first[::2], first[1::2]),
        "second_halves": _cosine(second[::2], second[1::2]),
    }


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.cosine_similarity(a.mean(0), b.mean(0), dim=0).item()


def main(arguments: list[str]) -> None:
    """Run the measurement, on one thread."""
    parser = record.parser("orders", __doc__)
    record_of_maml = "launch/records/maml-miniimagenet-5way-1shot/seed-0"
    parser.add_argument("--record", default=record_of_maml, help="the record of a MAML run")
    parser.add_argument("--batches", type=at_least(2), default=100, help="meta-batches")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = maml.load(options.record, device="cpu")
    initial = build_learner(model.config).meta_parameters()
    report: dict[str, Any] = {"hardware": describe(1), "columns": COLUMNS, "rows": []}
    for name, params in (("initial", initial), ("trained", model.meta_params)):
        report["rows"].append({"weights": name} | compare(model.config, params, options.batches))
    record.write(options.json, report)
    print(record.table(report))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
