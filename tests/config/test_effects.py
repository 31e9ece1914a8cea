"""Every flag has an effect, and only the effect that it should have."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from maml import evaluate
from maml.config.presets import with_values
from maml.errors import UserError
from maml.evaluation.scores import summary
from maml.metagradient.rules import OPTIMIZERS
from maml.trainer import Trainer
from tests.runs import glyphs, last, result, sinusoid, supervised, train

pytestmark = pytest.mark.usefixtures("no_pictures")

# By family of runs: with each of these values, the trained parameters change.
TRAINS_OTHERWISE: dict[Any, list[tuple[str, Any]]] = {
    sinusoid: [
        ("inner_lr", 0.02), ("inner_steps", 2), ("order", "first"), ("adapt", "@head"),
        ("shots", 5), ("queries", 5), ("seed", 1), ("iterations", 3), ("meta_batch_size", 4),
        ("meta_lr", 0.002), ("grad_clip", 1e-9), ("grad_clip_norm", 1e-9), ("dtype", "float32"),
        ("meta_schedule", "linear"), ("meta_eps", 1e-3), ("weight_decay", 0.1),
        ("freeze", "@body"), ("meta_optimizer", "sgd"),
        *(("inner_optimizer", name) for name in OPTIMIZERS if name not in ("sgd", "momentum")),
    ],
    glyphs: [
        ("network", "conv4-pool"), ("leak", 0.01), ("norm_eps", 1e-5), ("head_init", "normal"),
        ("ways", 3),
    ],
    supervised: [("batch_size", 7), ("epochs", 1), ("meta_batch_size", 3)],
}  # fmt: skip
# With these they stay equal up to the rounding of a sum in another order: 1e-10, because Adam
# magnifies a gradient that is zero except for rounding (that of a bias before a batch norm).
TRAINS_THE_SAME: list[dict[str, Any]] = [
    {"meta_gradient": "reverse", "task_batch": 1, "threads": 2},
    {"meta_gradient": "mixed", "kernels": "torch", "task_batch": 2},
    {
        "batching": "tasks", "partition": "chunk", "rpc_threads": 2, "timeout": 5.0,
        "device": "cpu", "strategy": "local", "eval_draws": True, "eval_inner_steps": 3,
        "eval_queries": 5, "eval_every": 1, "eval_tasks": 3, "test_tasks": 3,
        "transductive": False, "checkpoint_every": 1, "keep_checkpoints": 1, "keep_best": 2,
        "log_every": 2, "data_root": "elsewhere", "resume": "never",
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Return the trained parameters of each family."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        family: train(family(dtype="float64"), folder / family.__name__)["model"]
        for family in TRAINS_OTHERWISE
    }


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between parameters, relative to the largest of them."""
    assert a.keys() == b.keys()
    scale = max(float(tensor.abs().max()) for tensor in a.values())
    return max(float((a[name] - b[name]).abs().max()) for name in a) / scale


@pytest.mark.parametrize("family", TRAINS_OTHERWISE)
def test_trains_otherwise(family: Any, bases: dict[Any, Any], tmp_path: Path) -> None:
    config = family(dtype="float64")
    for i, (name, value) in enumerate(TRAINS_OTHERWISE[family]):
        assert getattr(config, name) != value
        model = train(with_values(config, **{name: value}), tmp_path / str(i))["model"]
        assert all(tensor.isfinite().all() for tensor in model.values())
        if name == "dtype":
            assert {tensor.dtype for tensor in model.values()} == {torch.float32}
        elif name == "ways":
            assert model["network.head.weight"].shape == (3, 8)
        else:
            # Far above rounding, which is 1e-16 here.
            assert distance(model, bases[family]) > 1e-7, (name, value)


@pytest.mark.parametrize("values", TRAINS_THE_SAME, ids=lambda values: next(iter(values)))
@pytest.mark.parametrize("family", TRAINS_OTHERWISE)
def test_trains_the_same(
    family: Any, values: dict[str, Any], bases: dict[Any, Any], tmp_path: Path
) -> None:
    config = family(dtype="float64")
    assert all(getattr(config, name) != value for name, value in values.items())
    model = train(with_values(config, **values), tmp_path)["model"]
    assert distance(model, bases[family]) < 1e-10


# ---- the other flags --------------------------------------------------------------------------


def test_transductive_chooses_the_headline(tmp_path: Path) -> None:
    base = glyphs(iterations=1, test_tasks=8, ways=5)
    train(base, tmp_path / "yes")
    train(base, tmp_path / "no", transductive=False)
    yes, no = result(tmp_path / "yes"), result(tmp_path / "no")
    assert yes["accuracy"] == yes["transductive_accuracy"] == no["transductive_accuracy"]
    assert no["accuracy"] == no["non_transductive_accuracy"] == yes["non_transductive_accuracy"]
    assert yes["accuracy"] != no["accuracy"]
    assert (yes["transductive"], no["transductive"]) == (True, False)
    losses = {"loss": 1.0, "loss_ci95": 0.1}
    losses |= {f"non_transductive_{name}": 2 * value for name, value in losses.items()}
    said = summary({"split": "test", "tasks": 8, **losses}, sinusoid(), transductive=False)
    assert said.startswith("test loss 2.00 ± 0.20: mean")


def test_folder(tmp_path: Path) -> None:
    """A run trains on the images as the flags of a folder describe them."""
    for number in range(24):
        for i in range(2):
            path = tmp_path / "mine" / f"class {number}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (30, 20), (10 * number, 100 + i, 0)).save(path)
    config = glyphs(
        data="folder", data_root=str(tmp_path / "mine"), network="conv4-pool", filters=4,
        image_size=32, image_mode="grey", split_fractions="0.5,0.25,0.25", queries=1,
        eval_queries=1, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    trainer = Trainer(config)
    assert len(trainer.setup.worker.training.counts) == 12  # type: ignore[attr-defined]
    assert trainer.run() == 0
    # One channel in; 2 x 2 cells of four filters out.
    shapes = {tuple(tensor.shape) for tensor in last(tmp_path / "run")["model"].values()}
    assert {(4, 1, 3, 3), (config.ways, 16)} <= shapes
    with pytest.raises(UserError, match=r"--network conv4-pool: .* 15x15; .*--image-size"):
        Trainer(with_values(config, image_size=15))
    # With one more class the split changes: the run would be tested on classes it trained on.
    shutil.copytree(tmp_path / "mine" / "class 3", tmp_path / "mine" / "another class")
    for command in (lambda: Trainer(config), lambda: evaluate.main([str(tmp_path / "run")])):
        with pytest.raises(UserError, match="trained on other classes than the training split has"):
            command()
    for number in range(24):  # the same pictures under two names, in two splits
        shutil.copytree(tmp_path / "mine" / f"class {number}", tmp_path / "mine" / f"{number}")
    lines = Trainer(with_values(config, run_dir=str(tmp_path / "two"), test_tasks=2)).setup.lines
    assert any("test classes have the same images as a class of train" in line for line in lines)
