"""Tiny runs, and workers, inside the test's own process."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from maml.config import FLAGS, Config
from maml.config.presets import PRESETS, spelled, with_values
from maml.errors import UserError
from maml.params import Params
from maml.run import checkpoint
from maml.run.files import read_rows
from maml.trainer import Trainer
from maml.worker import Worker

SINUSOID: dict[str, Any] = {
    "shots": 4, "queries": 4, "eval_queries": 4, "meta_batch_size": 3, "eval_inner_steps": 2,
}  # fmt: skip
GLYPHS: dict[str, Any] = {
    "ways": 2, "queries": 2, "eval_queries": 2, "meta_batch_size": 2, "eval_inner_steps": 1,
    "filters": 8,
}  # fmt: skip
SUPERVISED: dict[str, Any] = {
    "ways": 4, "batch_size": 8, "meta_batch_size": 2, "transductive": True,
    "eval_inner_steps": 1,
}  # fmt: skip
BRIEF: dict[str, Any] = {
    "iterations": 2, "eval_every": 0, "test_tasks": 0, "eval_tasks": 4, "log_every": 1,
    "logger": "none", "threads": 1, "compile": "off",
}  # fmt: skip


def sinusoid(**values: Any) -> Config:
    """The cheapest run there is; ``values`` are fields of `Config`."""
    return with_values(PRESETS["maml-sinusoid-10shot"], **(BRIEF | SINUSOID | values))


def glyphs(**values: Any) -> Config:
    """The cheapest run with images, batch norm and accuracies."""
    return with_values(PRESETS["maml-glyphs-5way-1shot"], **(BRIEF | GLYPHS | values))


def supervised(**values: Any) -> Config:
    """The cheapest run of an ordinary classifier: 56 drawings, 7 mini-batches an epoch."""
    return with_values(PRESETS["supervised-glyphs-lenet"], **(BRIEF | SUPERVISED | values))


def as_flags(config: Config) -> list[str]:
    """Return the command-line arguments that parse to ``config``."""
    values = {name: value for name in FLAGS if (value := getattr(config, name)) is not None}
    return [config.preset, *shlex.split(spelled(values))]


def train(config: Config, run_dir: Path, **values: Any) -> dict[str, Any]:
    """Run ``config`` in ``run_dir`` to its end and return its last checkpoint."""
    code = Trainer(with_values(config, run_dir=str(run_dir), **values)).run()
    assert code == 0
    return last(run_dir)


def last(run_dir: Path) -> dict[str, Any]:
    """Return the newest checkpoint of a run."""
    return checkpoint.load(checkpoint.last_checkpoint(run_dir))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run."""
    return read_rows(run_dir / "metrics.jsonl")


def result(run_dir: Path) -> dict[str, Any]:
    """Return a run's result.json."""
    content: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return content


def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return the message of the error that a call raises, which is one line."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert len(caught.value.args[0].splitlines()) == 1  # what is shown is one line anyway
    return str(caught.value)


def same(a: Any, b: Any) -> bool:
    """Whether two nests of containers, numbers and tensors are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def worker_of(preset: str, **values: Any) -> Worker:
    """Return a worker of a preset on the CPU, in float64; ``values`` are fields of `Config`."""
    config = with_values(PRESETS[preset], **{"dtype": "float64", **values})
    return Worker(config, torch.device("cpu"))


def moved(worker: Worker) -> Params:
    """Return meta-parameters that all differ from how they begin: no one, zero or identity."""
    generator = torch.Generator().manual_seed(5)
    params = {}
    for name, tensor in worker.learner.meta_parameters().items():
        noise = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        params[name] = tensor.detach() + 0.05 * noise
    return params
