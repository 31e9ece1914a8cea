r"""The weights that MAML's authors have released for MiniImageNet, tested as ours are.

    python -m benchmarks.released_maml maml/logs/…/model59000.data-00000-of-00001 \
        --beside launch/records/fomaml-miniimagenet-5way-1shot/seed-0 --json released.json

The file is in a checkout of https://github.com/cbfinn/maml (commit a7f45f1): 5-way 1-shot, second
order, after 59,000 iterations. The test is this project's, on this project's images. So it tells
whether they give the published number, whatever the training. Records of ours (``--beside``) are
tested on the same tasks, those of the seed 0, whatever seed they were trained with.

TensorFlow writes a checkpoint's tensors one after another, in the order of their names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import command_line, count, write
from benchmarks.hardware import describe
from benchmarks.markdown import grid
from datasets.errors import DataError
from datasets.paths import default_data_root
from maml.best import content_of
from maml.config import Config, saved
from maml.config.presets import PRESETS, experiment, spelled, with_values
from maml.errors import UserError
from maml.params import Params
from maml.processes.device import choose_device
from maml.processes.setup import init_process
from maml.processes.world import World
from maml.run import checkpoint
from maml.scores import mean_and_ci95, of_tasks
from maml.strategies.local import Local
from maml.worker import Worker

WAYS, FILTERS, SIDE, BLOCKS = 5, 32, 5, 4
"""Of the released network: the last maps are 5×5."""
NAMES = {"accuracy": "transductive", "non_transductive_accuracy": "non-transductive"}
OF_THE_TASKS = ("data", "ways", "shots")
"""What ours must have in common with the released weights; queries and seed are given here."""


def released() -> Config:
    """Return the configuration of the released weights: batch norms do not adapt there."""
    return with_values(PRESETS["maml-miniimagenet-5way-1shot"], adapt="*,@norm=0")


def read_released(path: Path) -> Params:
    """Return the released weights as our network's meta-parameters, float32.

    Its convolutions are ``[3, 3, in, out]`` there, and its maps ``[height, width, channels]``. Its
    batch norms have a shift alone: our scale is 1.

    Raises:
        UserError: if the file cannot be read, has another size, or holds what is not finite.
    """
    c, n = FILTERS, SIDE * SIDE * FILTERS
    shapes: list[tuple[int, ...]] = [
        *[(c,)] * BLOCKS,  # model/0/beta, …
        *[(c,)] * BLOCKS,  # model/Variable, …: the convolutions' biases
        (WAYS,),  # model/b5
        (3, 3, 3, c),  # model/conv1, …
        *[(3, 3, c, c)] * (BLOCKS - 1),
        (n, WAYS),  # model/w5
    ]
    sizes = [int(np.prod(shape)) for shape in shapes]
    try:
        # Of bytes that are no whole number numpy would say nothing.
        size = path.stat().st_size
        if size != 4 * sum(sizes):
            raise UserError(
                f"{path}: it has {size} bytes, not {4 * sum(sizes)}: give "
                "model59000.data-00000-of-00001"
            )
        values = np.fromfile(path, dtype="<f4")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    parts = torch.from_numpy(values).split(sizes)
    tensors = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    shifts, biases, (bias, *convolutions, head) = tensors[:4], tensors[4:8], tensors[8:]
    params = {}
    for i, (shift, of_block, weight) in enumerate(zip(shifts, biases, convolutions, strict=True)):
        params[f"network.blocks.{i}.conv.weight"] = weight.permute(3, 2, 0, 1)
        params[f"network.blocks.{i}.conv.bias"] = of_block
        params[f"network.blocks.{i}.norm.weight"] = torch.ones(c)
        params[f"network.blocks.{i}.norm.bias"] = shift
    params["network.head.weight"] = (
        head.reshape(SIDE, SIDE, c, WAYS).permute(3, 2, 0, 1).reshape(WAYS, n)
    )
    params["network.head.bias"] = bias
    _check_finite(params, path)
    return {name: tensor.contiguous() for name, tensor in params.items()}


def read_ours(folder: Path) -> tuple[str, Config, Params]:
    """Return what a record, or a run, is called in the table, its configuration and its model.

    Raises:
        UserError: naming ``--beside``, if it is of other tasks than the released weights, cannot be
            read, is not what was recorded, or holds what is not finite.
    """
    try:
        config = saved.read(folder / "config.yaml")
        others = released()
        other = [name for name in OF_THE_TASKS if getattr(config, name) != getattr(others, name)]
        if other:
            here, there = (spelled({n: getattr(of, n) for n in other}) for of in (config, others))
            raise UserError(f"{folder}: it is of {here}, the released weights of {there}")
        params: Params = content_of(folder, None, transductive=config.transductive)["model"]
        _check_finite(params, folder)
    except UserError as error:
        raise UserError(f"--beside {error}") from error
    seed = f", seed {config.seed}" if config.seed else ""
    return f"`{experiment(config)}`{seed}", config, params


def _check_finite(params: Params, path: Path) -> None:
    """Refuse what would be tested as a model that is always wrong."""
    checkpoint.check_finite({"model": params, "optimizer": {}}, path)


def measure(config: Config, params: Params, tasks: int) -> dict[str, Any]:
    """Return the test accuracies of ``params``, with intervals, on the released weights' tasks."""
    world = World(0, 1, 0, 1, launched=False)
    init_process(config, world)
    worker = Worker(config, choose_device(config, world), trains=False)
    # Now: what a network has drawn as it was made is of its own seed.
    worker.learner.config = with_values(config, seed=released().seed)
    strategy = Local(config, world, worker)
    checkpoint.check_model({"model": params}, worker.learner.meta_parameters(), "the model")
    with torch.no_grad():
        values = of_tasks(strategy, params, "test", tasks, progress=True)
    names = list(worker.evaluation_names)
    return {name: mean_and_ci95(values[:, names.index(name)]) for name in NAMES}


def table(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""

    def shown(value: tuple[float, float | None]) -> str:
        mean, ci95 = value
        interval = "?" if ci95 is None else f"{100 * ci95:.2f}"
        return f"{100 * mean:.2f} ± {interval} %"

    rows = [
        [
            row["model"],
            str(row["queries"]),
            f"{row['tasks']:,}",
            *(shown(row[name]) for name in NAMES),
        ]
        for row in report["records"]
    ]
    return grid(["model", "queries a class", "test tasks", *NAMES.values()], rows)


def main() -> None:
    """Run the benchmark."""
    parser = command_line("released_maml", __doc__)
    parser.add_argument("file", metavar="FILE", type=Path, help="the released weights")
    parser.add_argument(
        "--beside",
        metavar="DIR",
        type=Path,
        nargs="*",
        default=[],
        help="records, or runs, of ours",
    )
    parser.add_argument("--queries", type=count, nargs="+", default=[1, 15], help="of a class")
    parser.add_argument("--tasks", type=count, default=600, help="(default: 600)")
    parser.add_argument("--data-root", type=Path, default=default_data_root())
    options = parser.parse_args()
    try:
        models = [
            ("the released weights", released(), read_released(options.file)),
            *map(read_ours, options.beside),
        ]
        report: dict[str, Any] = {"hardware": describe(torch.get_num_threads()), "records": []}
        for queries in options.queries:
            for name, config, params in models:
                here = {"data_root": str(options.data_root), "eval_queries": queries}
                config = with_values(config, strategy="local", device="cpu", threads=None, **here)
                row = {"model": name, "queries": queries, "tasks": options.tasks}
                report["records"].append(row | measure(config, params, options.tasks))
                write(options.json, report)
    except (UserError, DataError) as error:
        parser.error(str(error))
    print(table(report))


if __name__ == "__main__":
    main()
