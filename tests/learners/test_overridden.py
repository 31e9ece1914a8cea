"""Methods that a learner's author overrides are differentiated and evaluated, or refused."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from datasets.tasks import Task
from maml.config import Config, registry
from maml.config.presets import PRESETS, with_values
from maml.learners import Learner
from maml.params import Params
from tests.runs import worker_of

IDS = torch.tensor([3, 11, 12])
LEARNERS: dict[str, type[Learner]] = {
    name: registry.learner(name).load() for name in registry.known("learner")
}
LOSSES = ("support_loss", "query_loss", "set_loss")
# Their gradient is no derivative of the loop, so --meta-gradient reverse is refused.
NOT_BACKWARDS = ("imaml", "reptile")
POLICIES = {"reinforce": "reinforce-cartpole", "maml-policy": "maml-cartpole"}
# Losses without effect on training's gradient, most because there is no inner loop.
NO_SAY = {
    **dict.fromkeys(("noadapt", "supervised"), ("support_loss",)),
    **dict.fromkeys(("protonet", "r2d2"), ("support_loss", "set_loss")),
    "finetune": {"support_loss"},
    "reptile": {"query_loss"},
    "reinforce": {"support_loss", "set_loss"},
    "maml-policy": {"set_loss"},
}


def configuration(name: str, meta_gradient: str) -> Config:
    values: dict[str, Any] = {"dtype": "float64", "meta_gradient": meta_gradient}
    if name in POLICIES:
        small = {"horizon": 8, "shots": 3, "queries": 3, "filters": 8}
        return with_values(PRESETS[POLICIES[name]], **values, **small)
    values |= {
        "learner": name, "network": "conv4", "filters": 16, "inner_steps": 2,
        "inner_optimizer": "sgd", "proximal": 2.0,
    }  # fmt: skip
    if name == "supervised":
        return with_values(PRESETS["supervised-glyphs-lenet"], **values, ways=5, batch_size=10)
    if name == "finetune":
        values["train_ways"] = 800
    return with_values(PRESETS["maml-glyphs-5way-1shot"], **values, inner_lr=0.1)


def doubled(learner: type[Learner], method: str) -> type[Learner]:
    """Return a subclass, as a user would write it, whose ``method`` returns twice the loss."""

    def override(self: Any, *args: Any) -> tuple[Tensor, Tensor]:
        loss, outputs = getattr(super(cls, self), method)(*args)
        return 2 * loss, outputs

    cls = type("Doubled", (learner,), {method: override})
    return cls


def gradient(learner: Learner, meta_params: Params, tasks: Task) -> Tensor:
    found = learner.outer_gradient(meta_params, learner.materialise(meta_params, tasks))
    return torch.cat([tensor.flatten() for tensor in found.gradients.values()])


@pytest.mark.parametrize(
    ("name", "meta_gradient"),
    [
        (name, way)
        for name in LEARNERS
        for way in ("auto", "mixed")
        if way == "auto" or name in ("maml", "mamlpp", "cavia", "maml-policy")
    ],
)
def test_a_loss_that_is_doubled_is_obeyed(name: str, meta_gradient: str) -> None:
    """In a subclass and in one changed object; through the defaults, and with kernels."""
    config = configuration(name, meta_gradient)
    plain = LEARNERS[name](config)
    params = plain.meta_parameters()
    tasks = plain.open_tasks("train").tasks(IDS)
    before = gradient(plain, params, tasks)
    for method in LOSSES:
        learner = doubled(LEARNERS[name], method)(config)
        found = gradient(learner, params, tasks)
        # Without kernels, and in reverse if it is a loop's derivative, the gradient is the same.
        slow = dataclasses.replace(config, kernels="torch")
        if name not in NOT_BACKWARDS:
            slow = dataclasses.replace(slow, meta_gradient="reverse")
        expected = gradient(doubled(LEARNERS[name], method)(slow), params, tasks)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
        if method in NO_SAY.get(name, ()):
            torch.testing.assert_close(found, before, rtol=1e-9, atol=1e-10)
        elif method == "query_loss":
            torch.testing.assert_close(found, 2 * before, rtol=1e-9, atol=1e-10)
        else:
            assert (found - before).norm() > 1e-3 * before.norm()
        if method == "support_loss":
            changed = LEARNERS[name](config)
            setattr(changed, method, getattr(learner, method))
            again = gradient(changed, params, tasks)
            torch.testing.assert_close(again, found, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["reptile", "imaml"])
def test_a_problem_that_is_overridden_is_trained_on(name: str) -> None:
    """Also if training has its own problem: a doubled lr equals twice --inner-lr."""
    config = configuration(name, "auto")

    def doubled_rate(self: Any, meta_params: Params, steps: int) -> Any:
        found = LEARNERS[name].problem(self, meta_params, steps)
        return dataclasses.replace(found, lr=2 * found.lr)

    found = type("Mine", (LEARNERS[name],), {"problem": doubled_rate})(config)
    expected = LEARNERS[name](dataclasses.replace(config, inner_lr=2 * config.inner_lr))
    params, tasks = found.meta_parameters(), found.open_tasks("train").tasks(IDS)
    assert torch.equal(gradient(found, params, tasks), gradient(expected, params, tasks))


def test_what_is_overridden_is_evaluated() -> None:
    """A support loss of the other sign adapts the other way at test, too."""

    class Backwards(LEARNERS["maml"]):  # type: ignore[misc, valid-type]
        def support_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
            loss, outputs = super().support_loss(params, task, step)
            return -loss, outputs

    class Blind(LEARNERS["maml"]):  # type: ignore[misc, valid-type]
        def answers(self, params: Params, task: Task) -> tuple[Tensor, Tensor]:
            nothing = task.query_x.new_zeros(len(task.query_y), 5)
            return nothing, nothing

    class Erased(LEARNERS["maml"]):  # type: ignore[misc, valid-type]
        def modulated(self, params: Params) -> Params:
            return {name: 0 * tensor for name, tensor in params.items()}

    config = configuration("maml", "auto")
    learners = [cls(config) for cls in (LEARNERS["maml"], Backwards, Blind, Erased)]
    params = learners[0].meta_parameters()
    tasks = learners[0].open_tasks("test", evaluation=True).tasks(IDS)
    plain, backwards, *blind = (one.evaluate(params, tasks)["loss"].mean() for one in learners)
    assert plain < blind[0] < backwards
    assert [each.item() for each in blind] == pytest.approx([math.log(5)] * 2)
    assert not gradient(learners[-1], params, tasks).any()


class Sampled(LEARNERS["maml"]):  # type: ignore[misc, valid-type]
    """Answers by noisy weights."""

    def answers(self, params: Params, task: Task) -> tuple[Tensor, Tensor]:
        noisy = {name: p + 0.1 * torch.randn_like(p) for name, p in params.items()}
        outputs, _ = self.call_network(noisy, task.query_x)
        return outputs, outputs


class ByNumpy(LEARNERS["maml"]):  # type: ignore[misc, valid-type]
    """Answers at a temperature that numpy draws."""

    def answers(self, params: Params, task: Task) -> tuple[Tensor, Tensor]:
        outputs, own = super().answers(params, task)
        return outputs * np.random.rand(), own


@pytest.mark.parametrize("batching", ["vmap", "tasks"])
@pytest.mark.parametrize("name", ["Sampled", "ByNumpy"])
def test_answers_that_draw_have_the_task_s_address(name: str, batching: str) -> None:
    """A task's answers are the same in every share, and training goes on as before."""
    values = {"learner": f"tests.learners.test_overridden:{name}", "eval_draws": True}
    worker = worker_of("maml-glyphs-5way-1shot", batching=batching, eval_inner_steps=1, **values)
    params = worker.learner.meta_parameters()
    whole, again, alone = (worker.evaluate(params, "test", ids) for ids in (IDS, IDS, IDS[1:]))
    assert torch.equal(whole, again) and torch.equal(whole[1:], alone)
    assert (worker.learner.plan.draws, worker.learner.batching) == (False, batching)
