"""Every flag does something, and only what it should."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from maml import evaluate
from maml.config import MUST_MATCH
from maml.config.fields import Common
from maml.config.presets import with_values
from maml.errors import UserError
from maml.metagradient.optimizers import OPTIMIZERS
from maml.run import checkpoint
from maml.trainer import Trainer
from maml.training.setup import Setup
from tests.runs import (
    glyphs,
    metrics,
    name_of,
    result,
    same,
    sinusoid,
    supervised,
    train,
)

pytestmark = pytest.mark.usefixtures("no_pictures")

# Whatever these are changed to, the trained parameters change: (family of runs, field, value).
TRAINS_OTHERWISE: list[tuple[Any, str, Any]] = [
    (sinusoid, "inner_lr", 0.02),
    (sinusoid, "inner_steps", 2),
    (sinusoid, "inner_steps", 0),
    (sinusoid, "order", "first"),
    (sinusoid, "adapt", "@head"),
    (sinusoid, "shots", 5),
    (sinusoid, "queries", 5),
    (sinusoid, "seed", 1),
    (sinusoid, "iterations", 3),
    (sinusoid, "meta_batch_size", 4),
    (sinusoid, "meta_lr", 0.002),
    (sinusoid, "grad_clip", 1e-9),
    (sinusoid, "grad_clip_norm", 1e-9),
    (sinusoid, "dtype", "float32"),
    (sinusoid, "meta_schedule", "linear"),
    (sinusoid, "meta_schedule", "cosine"),
    (sinusoid, "meta_eps", 1e-3),
    (sinusoid, "weight_decay", 0.1),
    (sinusoid, "freeze", "@body"),
    (glyphs, "network", "conv4-pool"),
    (glyphs, "leak", 0.01),
    (glyphs, "norm_eps", 1e-5),
    (glyphs, "head_init", "normal"),
    (glyphs, "head_init", "xavier"),
    (glyphs, "ways", 3),
    (glyphs, "shots", 2),
    (glyphs, "queries", 3),
    (glyphs, "seed", 1),
    (sinusoid, "inner_optimizer", "adam"),
    (sinusoid, "meta_optimizer", "sgd"),
    (supervised, "batch_size", 7),
    (supervised, "epochs", 1),
    (supervised, "meta_batch_size", 3),
    (supervised, "seed", 1),
]
# And with these they stay as they are, to the rounding of a sum in another order: 1e-10, as Adam
# magnifies what is left of a gradient that is zero but for rounding (a bias before a batch norm).
COMPUTES_OTHERWISE: list[tuple[str, Any]] = [
    ("meta_gradient", "reverse"),
    ("meta_gradient", "mixed"),
    ("kernels", "torch"),
    ("batching", "tasks"),
    ("task_batch", 1),
    ("task_batch", 2),
    ("threads", 2),
]
TRAINS_THE_SAME: list[tuple[str, Any]] = [
    *COMPUTES_OTHERWISE,
    ("partition", "chunk"),
    ("rpc_threads", 2),
    ("timeout", 5.0),
    ("device", "cpu"),
    ("strategy", "local"),
    ("eval_draws", True),
    ("eval_inner_steps", 3),
    ("eval_queries", 5),
    ("eval_every", 1),
    ("eval_tasks", 3),
    ("test_tasks", 3),
    ("transductive", False),
    ("checkpoint_every", 1),
    ("keep_checkpoints", 1),
    ("keep_best", 2),
    ("log_every", 2),
    ("data_root", "elsewhere"),
    ("resume", "never"),
]
# What a field does is shown by a test of its own, here or in the file named.
BY_THEMSELVES = {
    "preset": "test_presets.py",
    "source": "test_presets.py",
    "published": "test_presets.py",
    "claim": "test_presets.py",
    "learner": "learners",
    "data": "test_folder",
    "horizon": "datasets/test_environments.py",
    "discount": "acting/test_policies.py",
    "test_model": "run/test_best_model.py",
    "stop_after": "run/test_best_model.py",
    "run_dir": "test_run_directory.py",
    "logger": "run/test_log.py",
    "meta_momentum": "test_meta_momentum",
    "init": "training/test_initial.py",
    "train_ways": "learners/test_embedding.py",
    "train_shots": "learners/test_embedding.py",
    "meta_lr_end": "metagradient/test_outer_optimizer.py",
    "meta_decay": "metagradient/test_outer_optimizer.py",
    "meta_halve_every": "metagradient/test_outer_optimizer.py",
    "batch_wait": "acting/test_observers.py",
    "on_nonfinite": "run/test_guard.py",
    "compile": "test_compiled.py",
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """The trained parameters of each family as it is, and the same again."""
    folder = tmp_path_factory.mktemp("bases")
    found = {}
    for family in (sinusoid, glyphs, supervised):
        config = family(dtype="float64")
        first, second = (train(config, folder / f"{family.__name__}{i}") for i in (1, 2))
        assert same(first["model"], second["model"]), "a run differs from its own repetition"
        found[family] = first["model"]
    return found


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between parameters, relative to the largest of them."""
    assert a.keys() == b.keys()
    scale = max(float(tensor.abs().max()) for tensor in a.values())
    return max(float((a[name] - b[name]).abs().max()) for name in a) / scale


@pytest.mark.parametrize(
    ("family", "name", "value"),
    TRAINS_OTHERWISE,
    ids=lambda v: v.__name__ if callable(v) else str(v),
)
def test_trains_otherwise(
    family: Any, name: str, value: Any, bases: dict[Any, Any], tmp_path: Path
) -> None:
    config = family(dtype="float64")
    assert getattr(config, name) != value
    model = train(with_values(config, **{name: value}), tmp_path)["model"]
    assert all(tensor.isfinite().all() for tensor in model.values())
    if name == "dtype":
        assert {tensor.dtype for tensor in model.values()} == {torch.float32}
        assert not all(tensor.dtype == torch.float32 for tensor in bases[family].values())
    elif name == "ways":
        assert model["network.head.weight"].shape == (3, 8)
    else:
        # Far above rounding, which is 1e-16 here.
        assert distance(model, bases[family]) > 1e-7


def test_inner_optimizers_are_all_different(tmp_path: Path) -> None:
    # The first step of momentum is a plain step.
    config = sinusoid(dtype="float64", inner_steps=2)
    models = {
        name: train(config, tmp_path / name, inner_optimizer=name)["model"] for name in OPTIMIZERS
    }
    names = sorted(models)
    alike = [
        (a, b) for a in names for b in names if a < b and distance(models[a], models[b]) <= 1e-9
    ]
    assert alike == []


FAMILIES = (sinusoid, glyphs, supervised)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        *((family, *changed) for changed in COMPUTES_OTHERWISE for family in FAMILIES),
        # What does not touch the computation, with one family each.
        *(
            (FAMILIES[i % len(FAMILIES)], *changed)
            for i, changed in enumerate(TRAINS_THE_SAME[len(COMPUTES_OTHERWISE) :])
        ),
    ],
    ids=name_of,
)
def test_trains_the_same(
    family: Any, name: str, value: Any, bases: dict[Any, Any], tmp_path: Path
) -> None:
    config = family(dtype="float64")
    assert getattr(config, name) != value
    model = train(with_values(config, **{name: value}), tmp_path)["model"]
    assert distance(model, bases[family]) < 1e-10


def test_what_a_field_says_of_itself_is_so() -> None:
    """What a resumed run must share changes the parameters, as does how long it trains: each such
    field is tried above, or has a test of its own; and whatever else there is changes nothing.

    A component's own flags are tested with the component.
    """
    common = {field.name for field in dataclasses.fields(Common)}
    otherwise = {name for _, name, _ in TRAINS_OTHERWISE}
    the_same = {name for name, _ in TRAINS_THE_SAME}
    how_long = {"iterations", "epochs"}
    assert otherwise - how_long <= set(MUST_MATCH)
    assert set(MUST_MATCH) & common <= otherwise | BY_THEMSELVES.keys()
    others = common - set(MUST_MATCH) - how_long
    assert the_same <= others <= the_same | BY_THEMSELVES.keys()


# ---- what the others do -----------------------------------------------------------------------


def test_grad_clip_bounds_each_element(tmp_path: Path) -> None:
    """One Adam step moves every element by the rate, whatever its size, unless it is clipped to
    where Adam's ε rules: there the step is rate · g / (g + ε).
    """
    config = sinusoid(dtype="float64", iterations=1, meta_lr=1.0)
    initial = Setup(with_values(config, run_dir=str(tmp_path / "0"))).worker.learner
    start = {name: tensor.detach().clone() for name, tensor in initial.meta_parameters().items()}
    clip = 1e-8  # Adam's ε
    clipped = train(config, tmp_path / "1", grad_clip=clip)["model"]
    moves = torch.cat([(clipped[name] - start[name]).abs().flatten() for name in start])
    assert moves.max().item() == pytest.approx(0.5, rel=1e-9)


def test_meta_momentum(tmp_path: Path) -> None:
    """θ ← θ − α (g₁ + (1 + μ) g₂ …): the second step repeats μ of the first."""
    config = sinusoid(dtype="float64", meta_optimizer="sgd", meta_lr=1e-5, iterations=2)
    start = Setup(with_values(config, run_dir=str(tmp_path / "0"))).worker.learner
    initial = {name: tensor.detach().clone() for name, tensor in start.meta_parameters().items()}
    one = train(config, tmp_path / "1", iterations=1, meta_momentum=0.5)["model"]
    with_it = train(config, tmp_path / "2", meta_momentum=0.5)["model"]
    without = train(config, tmp_path / "3")["model"]
    for name, tensor in initial.items():
        # The gradients of the second step are the same: momentum changes none before it.
        moved = with_it[name] - without[name]
        torch.testing.assert_close(moved, 0.5 * (one[name] - tensor), rtol=0, atol=1e-15)


def test_evaluation_flags(tmp_path: Path) -> None:
    base = glyphs(dtype="float64", iterations=1, test_tasks=4, threads=1)
    results = {}
    for name, value in {
        "meta_lr": base.meta_lr, "eval_inner_steps": 3, "eval_queries": 3, "test_tasks": 6,
    }.items():  # fmt: skip
        train(base, tmp_path / name, **{name: value})
        results[name] = result(tmp_path / name)
    asked = results.pop("meta_lr")
    assert asked["tasks"] == 4
    assert results["test_tasks"]["tasks"] == 6
    for name, other in results.items():
        assert other["loss"] != asked["loss"], name


def test_transductive_chooses_the_headline(tmp_path: Path) -> None:
    base = glyphs(iterations=1, test_tasks=8, ways=5)
    train(base, tmp_path / "yes")
    train(base, tmp_path / "no", transductive=False)
    yes, no = result(tmp_path / "yes"), result(tmp_path / "no")
    assert yes["accuracy"] == yes["transductive_accuracy"] == no["transductive_accuracy"]
    assert no["accuracy"] == no["non_transductive_accuracy"] == yes["non_transductive_accuracy"]
    assert yes["accuracy"] != no["accuracy"]
    assert (yes["transductive"], no["transductive"]) == (True, False)
    assert yes["ci95"] != no["ci95"]


def test_rhythms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    monkeypatch.setattr(
        checkpoint, "save_in", lambda run_dir, content: saved.append(content["iteration"])
    )
    config = sinusoid(
        iterations=7, log_every=3, eval_every=2, checkpoint_every=4, eval_tasks=3,
        run_dir=str(tmp_path),
    )  # fmt: skip
    assert Trainer(config).run() == 0
    rows = metrics(tmp_path)
    assert [row["iteration"] for row in rows if "split" not in row] == [3, 6, 7]
    validations = [row for row in rows if "split" in row]
    assert [row["iteration"] for row in validations] == [2, 4, 6]
    assert {row["tasks"] for row in validations} == {3}
    assert saved == [4, 7]


def test_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads_after(**values: Any) -> int:
        torch.set_num_threads(1)
        Trainer(sinusoid(run_dir=str(tmp_path), **values))
        return torch.get_num_threads()

    assert threads_after(threads=3) == 3
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_after(threads=None) == len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_after(threads=None) == 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"network": "lenet"}, "there are no compiled kernels for the network LeNet"),
        ({"network": "lenet", "kernels": "torch"}, None),
    ],
)
def test_says_why_the_kernels_do_not_serve(
    values: dict[str, str], says: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(glyphs(iterations=0, device="cpu", **values), tmp_path)
    found = [line for line in capsys.readouterr().out.splitlines() if "compiled kernels" in line]
    assert len(found) == (says is not None)
    slower = ": it is differentiated by torch, which is slower"
    assert says is None or found[0].endswith(f"{says}{slower}")


def test_folder(tmp_path: Path) -> None:
    """What the flags of a folder of images say is what is trained on."""
    for number in range(24):
        for i in range(2):
            path = tmp_path / "mine" / f"class {number}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (30, 20), (10 * number, 100 + i, 0)).save(path)
    config = glyphs(
        data="folder",
        data_root=str(tmp_path / "mine"),
        network="conv4-pool",
        filters=4,
        image_size=20,
        image_mode="grey",
        split_fractions="0.5,0.25,0.25",
        queries=1,
        eval_queries=1,
        eval_tasks=2,
        test_tasks=2,
        run_dir=str(tmp_path / "run"),
    )
    worker = Setup(config).worker
    assert len(worker.training.counts) == 12  # type: ignore[attr-defined]
    assert worker.training.tasks(torch.arange(2)).support_x.shape == (2, config.ways, 1, 20, 20)
    model = train(with_values(config, image_mode="rgb", image_size=32), tmp_path / "run")["model"]
    # Three channels in; 2 x 2 cells of four filters out.
    assert {(4, 3, 3, 3), (config.ways, 16)} <= {tuple(tensor.shape) for tensor in model.values()}
    with pytest.raises(UserError, match=r"--network conv4-pool: .* 15x15; .*--image-size"):
        Trainer(with_values(config, image_size=15))
    # One more class, and what was learned from would be tested on.
    shutil.copytree(tmp_path / "mine" / "class 3", tmp_path / "mine" / "another class")
    again = with_values(config, image_mode="rgb", image_size=32)
    for command in (lambda: Trainer(again), lambda: evaluate.main([str(tmp_path / "run")])):
        with pytest.raises(UserError, match="trained on other classes than the training split has"):
            command()
    begins = with_values(again, init=str(tmp_path / "run"), run_dir=str(tmp_path / "begun"))
    said = "\n".join(Setup(begins).lines)
    assert re.search(r"--init .*: it was trained on \d of the 6 .* classes, by their names", said)
