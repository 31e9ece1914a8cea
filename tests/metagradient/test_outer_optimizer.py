"""The outer loop's step and its rows: means over the tasks that were summed, however many."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maml.errors import UserError
from maml.metagradient.outer_optimizer import NotFiniteError, OuterOptimizer, rate_at
from maml.strategies.local import Local
from maml.worker import Share, Worker
from tests.metagradient.peer import randn
from tests.runs import glyphs, metrics, same, sinusoid, train


def meta_params() -> dict[str, Tensor]:
    return {"weight": randn(3, 4, seed=0), "bias": randn(5, seed=1)}


def sums(step: int) -> tuple[dict[str, Tensor], int]:
    """Return a step's gradients and task count; for biases they are so small that ε decides."""
    weight, bias = randn(3, 4, seed=10 + step), randn(5, seed=20 + step)
    return {"weight": 10 * weight, "bias": 1e-8 * bias}, step + 2


@pytest.mark.parametrize(
    ("clip", "norm", "decay"),
    [(None, None, 0.0), (0.5, None, 0.0), (None, 0.7, 0.0), (None, None, 0.1)],
)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_steps_as_pytorch_s_optimizer_does(
    optimizer: str, clip: float | None, norm: float | None, decay: float
) -> None:
    """Adam as published (arXiv:1412.6980, section 2), or SGD with momentum; the mean is clipped.

    Only the network's weights shrink, as PyTorch's AdamW shrinks them (arXiv:1711.05101), and as
    SGD without momentum does, where decoupling makes no difference. What is frozen stays.
    """
    momentum = 0.9 if optimizer == "sgd" and not decay else 0.0
    config = sinusoid(
        dtype="float64", meta_optimizer=optimizer, meta_lr=0.03, meta_momentum=momentum,
        grad_clip=clip, grad_clip_norm=norm, weight_decay=decay,
    )  # fmt: skip
    start = {f"network.{name}": tensor for name, tensor in meta_params().items()}
    start |= {"rates": torch.ones(3, dtype=torch.float64), "network.still": torch.ones(2).double()}
    outer = OuterOptimizer(config, start, ["network.still"])
    plain = {name: tensor.clone() for name, tensor in start.items() if name != "network.still"}
    groups = [
        {"params": [plain[name] for name in plain if name != "rates"], "weight_decay": decay},
        {"params": [plain["rates"]], "weight_decay": 0.0},
    ]
    if optimizer == "adam":
        peer = torch.optim.AdamW(groups, lr=0.03, betas=(0.9, 0.999), eps=1e-8)
    else:
        peer = torch.optim.SGD(groups, lr=0.03, momentum=momentum)
    for step in range(4):
        drawn, n_tasks = sums(step)
        gradients = {f"network.{name}": tensor for name, tensor in drawn.items()}
        # The gradient of a frozen parameter need not be finite.
        still = torch.tensor([1.0, math.inf], dtype=torch.float64)
        gradients |= {"rates": torch.ones(3).double() * step, "network.still": still}
        for name, tensor in plain.items():
            mean = gradients[name] / n_tasks
            tensor.grad = mean if clip is None else mean.clamp(-clip, clip)
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.values(), norm)
        peer.step()
        outer.step(gradients, n_tasks)
        for name, tensor in plain.items():
            torch.testing.assert_close(outer.params[name], tensor, rtol=0, atol=1e-14, msg=name)
    assert torch.equal(outer.params["network.still"], start["network.still"])
    with pytest.raises(UserError, match="all parameters are frozen"):
        OuterOptimizer(config, start, start.keys())


@pytest.mark.parametrize("clip", [None, 10.0])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e20])
def test_what_is_not_finite_changes_nothing(wrong: float, clip: float | None) -> None:
    """Else Adam would never move that weight again, or would make it NaN."""
    start = {name: tensor.float() for name, tensor in meta_params().items()}
    outer = OuterOptimizer(sinusoid(grad_clip=clip), start)
    fine = {name: torch.ones_like(tensor) for name, tensor in start.items()}
    outer.step(fine, 1)
    bad = {name: tensor.clone() for name, tensor in fine.items()}
    bad["bias"][2] = wrong
    params, state = copy.deepcopy((dict(outer.params), outer.state_dict()))
    if clip is not None and math.isfinite(wrong):
        outer.step(bad, 1)
        assert math.isfinite(outer.norm) and outer.norm >= clip
    else:
        with pytest.raises(
            NotFiniteError, match=r"^the gradient is (not finite|too large, 1e\+20)"
        ):
            outer.step(bad, 1)
        assert same(dict(outer.params), params) and same(outer.state_dict(), state)
    assert outer.is_finite()
    before = outer.params["bias"].clone()
    outer.step(fine, 1)
    assert (outer.params["bias"] != before).all()


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        ({}, [0.5, 0.5, 0.5, 0.5]),
        ({"meta_schedule": "linear"}, [0.5, 0.375, 0.25, 0.125]),
        ({"meta_schedule": "linear", "meta_lr_end": 0.1}, [0.5, 0.4, 0.3, 0.2]),
        ({"meta_schedule": "halving", "meta_halve_every": 2}, [0.5, 0.5, 0.25, 0.25]),
        # As PyTorch's CosineAnnealingLR.
        ({"meta_schedule": "cosine", "meta_lr_end": 0.1}, [0.5, 0.4414213562, 0.3, 0.1585786438]),
        (
            {"meta_schedule": "halving", "meta_halve_every": 1, "meta_decay": 0.2},
            [0.5, 0.1, 0.02, 0.004],
        ),
    ],
)
def test_the_rate_follows_the_schedule(values: dict[str, Any], rates: list[float]) -> None:
    config = sinusoid(meta_lr=0.5, iterations=4, **values)
    assert [rate_at(config, iteration) for iteration in range(4)] == pytest.approx(rates)


def test_steps_and_rows_are_means_over_the_tasks_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None
) -> None:
    """As with backup workers: divide by the tasks summed, not by the meta-batch or iterations.

    Late tasks are left out of a meta-batch of four. Plain SGD: Adam would hide the divisor.
    """
    kept, shares, whole = (2, 4, 1), list[Share](), Local.meta_step

    def meta_step(self: Local, meta_params: Any, ids: Tensor) -> Share:
        shares.append(whole(self, meta_params, ids[: kept[len(shares)]]))
        return shares[-1]

    monkeypatch.setattr(Local, "meta_step", meta_step)
    config = glyphs(
        dtype="float64", meta_batch_size=4, meta_optimizer="sgd", meta_lr=0.1, iterations=3,
        log_every=2, inner_lr=0.1,
    )  # fmt: skip
    start = Worker(config, torch.device("cpu")).learner.meta_parameters()
    found = train(config, tmp_path)["model"]
    assert [share.n_tasks for share in shares] == list(kept)
    for name, tensor in start.items():
        steps = [0.1 * share.gradients[name] / share.n_tasks for share in shares]
        expected = tensor.detach() - sum(steps)
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12, msg=name)
    rows = metrics(tmp_path)
    assert [row["iteration"] for row in rows] == [2, 3]
    both = (shares[0].totals + shares[1].totals) / 6
    for row, means in zip(rows, (both, shares[2].totals), strict=True):
        assert [row["loss"], row["accuracy"]] == pytest.approx(means.tolist(), rel=1e-12)
