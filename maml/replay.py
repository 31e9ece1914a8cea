"""``python -m maml.replay RUN_DIR``: compute the tasks of a step that was not finite, one by one.

    python -m maml.replay runs/maml-omniglot-5way-1shot-… [--iteration 1234]

If a loss or gradient is not finite, training does not take the step, and keeps the step's tasks and
the model before it. This program computes each task alone, to find those that are not finite.
"""

import sys
from pathlib import Path

from maml.processes.program import run_program  # before torch

# isort: split
import torch

from datasets.words import counted
from maml.config.checks import check_values
from maml.config.parser import Parser, add_here, whole_number
from maml.networks.headless import in_short
from maml.params import Params
from maml.run import directory
from maml.run.checkpoint import check_model
from maml.run.provenance import warn_of_edits
from maml.strategies.local import alone
from maml.training.guard import not_finite_in, read_refused
from maml.worker import Share, Worker


def main(arguments: list[str]) -> int:
    """Print a line for each task of a refused step; return the exit code."""
    parser = Parser(prog="python -m maml.replay", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    text = "the step, counted from 1 (default: the last that was kept)"
    parser.add_argument("--iteration", type=whole_number, help=text)
    add_here(parser)
    options = parser.parse_args(arguments)
    run_dir: Path = options.run_dir
    config = directory.config_here(run_dir, options.data_root, options.device, trust=options.trust)
    check_values(config)
    row, tasks, saved = read_refused(run_dir, options.iteration)
    again = f"computing the {counted(len(tasks), 'task')} of iteration {row['iteration']} again"
    print(f"{run_dir}: {again}", file=sys.stderr, flush=True)
    worker = alone(config, trains=True).worker
    check_model(saved, worker.learner.meta_parameters(), str(run_dir))
    warn_of_edits(config, saved)
    model: Params = saved["model"]
    print(f"{run_dir}: iteration {row['iteration']}: {row.get('reason')}", flush=True)
    bad = [task for task in tasks.tolist() if not _is_fine(worker, model, task)]
    if bad:
        said = f"{len(bad)} of {counted(len(tasks), 'task')} not finite"
        print(f"{said}: {', '.join(map(str, bad))}")
    else:
        print(f"each of the {len(tasks)} tasks is finite when computed alone, on this machine")
        share = worker.share(model, tasks, worker.learner)
        print(f"together: {_numbers(worker, share)}{_faults(share.gradients)}")
    return 0


def _is_fine(worker: Worker, model: Params, task: int) -> bool:
    """Compute one task and print its line; return whether its numbers are finite."""
    share = worker.share(model, torch.tensor([task]), worker.learner)
    faults, of_data = _faults(share.gradients), not_finite_in(worker.training, torch.tensor([task]))
    line = f"task {task}: {_numbers(worker, share)}{faults}"
    print("; ".join(filter(None, [line, of_data])), flush=True)
    return not faults and bool(share.totals.isfinite().all())


def _numbers(worker: Worker, share: Share) -> str:
    """Return the mean loss and metrics of a share, and the norm of its mean gradient."""
    means = (share.totals / share.n_tasks).tolist()
    shown = [f"{n} {x:.4g}" for n, x in zip(worker.metric_names, means, strict=True)]
    # In double precision, so that the square of a large number stays finite.
    flat = torch.cat([each.reshape(-1).double() for each in share.gradients.values()])
    return ", ".join([*shown, f"gradient norm {float(flat.norm()) / share.n_tasks:.4g}"])


def _faults(gradients: Params) -> str:
    """Name the parameters whose gradient, or its square, is not finite: see `OuterOptimizer`."""
    names = [name for name, grad in gradients.items() if not (grad * grad).isfinite().all()]
    return f"; not finite in {in_short(names)}" if names else ""


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
