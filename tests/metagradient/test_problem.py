"""All that an inner problem states is differentiated, with the same result in every way."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import maml
from datasets.tasks import Task
from maml.metagradient.differentiate import differentiate, meta_gradient
from maml.metagradient.native import native
from maml.metagradient.problem import Implicit, Outer, Problem, Tensors, Transform
from maml.metagradient.rules import OPTIMIZERS
from maml.networks.conv4 import Conv4
from maml.networks.loss import NetworkLoss
from maml.params import Params
from tests.compiler import needs_compiler
from tests.metagradient.peer import assert_near, by_hand, losses_of, randn

N_TASKS = 3


def losses(scale: float, off: int) -> dict[str, Any]:
    """Return made-up losses that depend on the step, read all parameters and weigh examples.

    The support loss has no gradient by the first ``off`` rows of "a", as of ReLUs that are off.
    """

    def outputs(params: Params, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ params["a"] + params["b"])
        return (hidden * params["gain"] + params["shift"]) @ params["c"]

    def support(params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        found = outputs(params, task.support_x * (torch.arange(4) >= off))
        weights = torch.sigmoid(params["of examples"])
        error = (found - task.support_y).square() * weights
        return error.mean() * (1 + 0.5 * step) + 0.1 * params["a"][off:].square().sum(), found

    def query(params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        found = outputs(params, task.query_x)
        error = (found - task.query_y).abs() ** 3
        return scale * error.mean() / (1 + step) + params["shift"].sum(), found

    return {"support": support, "query": query}


def turned(gradients: Params, own: Params) -> Params:
    return gradients | {"a": gradients["a"] * own["t"] + gradients["a"] ** 2}


def moved(gradients: Params, own: Params, weights: Params) -> Params:
    """As ALFA, with a decay of the weights, and a row's mean for the whole row."""
    decayed = own["t"].tanh() * weights["a"] + gradients["a"].mean(1, keepdim=True)
    return gradients | {"a": decayed, "c": gradients["c"].sum()}


def random_problem(number: int) -> tuple[Problem, Task]:
    """Return problem ``number``; chance decides which parts it has."""
    dice = random.Random(number)
    steps = dice.choice([0, 1, 2, 3, 9])
    shapes = {
        "a": (4, 5), "b": (5,), "c": (5,), "gain": (5,), "shift": (5,), "of examples": (6,),
    }  # fmt: skip
    values = {n: randn(*s, seed=number * 100 + i) for i, (n, s) in enumerate(shapes.items())}
    # If the query loss does not read a parameter, its last rate has no effect.
    able = [name for name in shapes if name != "of examples"]
    moving = [name for name in able if name in ("a", "c") or dice.random() < 0.3]
    of_step = [
        name for name in ("gain", "shift") if steps and name not in moving and dice.random() < 0.5
    ]

    def rate(name: str, step: int) -> Tensor:
        whole = randn(*shapes[name], seed=number * 1000 + step * 10 + len(name))
        return (whole.mean() if dice.random() < 0.5 else whole).requires_grad_()

    own = {"t": randn(4, 5, seed=number)}
    rated, proximal = steps and dice.random() < 0.5, dice.choice([0.0, 0.7])
    problem = Problem(
        start={name: values[name] for name in moving},
        fixed={n: v for n, v in values.items() if n not in moving and n not in of_step},
        # Adam at a tiny pull would enlarge rounding errors: it divides by 1e-8.
        **losses(1 + number, off=int(not proximal)),
        optimizer=dice.choice(sorted(OPTIMIZERS)),
        lr=0.03,
        steps=steps,
        order=dice.choice(["second", "second", "first"]),
        rates=[{n: rate(n, t) for n in moving} for t in range(steps)] if rated else None,
        step_params=[
            {n: randn(*shapes[n], seed=number * 50 + t) for n in of_step} for t in range(steps)
        ]
        if of_step
        else (),
        query_weights=[*(dice.choice([0.0, 0.3, 1.0]) for _ in range(steps - 1)), 0.6]
        if steps and dice.random() < 0.5
        else None,
        proximal=proximal,
        transform=dice.choice([None, Transform(turned, own), Transform(moved, own, weights=True)]),
    )
    sets = [(6, 4), (6,), (8, 4), (8,)]
    return problem, Task(*(randn(N_TASKS, *s, seed=number + i) for i, s in enumerate(sets)))


def by_place(tensors: Tensors) -> Params:
    """Return all tensors, by names such as ``.rates[1]['a']``."""
    return {pytree.keystr(path): t for path, t in pytree.tree_flatten_with_path(tensors)[0]}


def assert_same(found: Outer, expected: Outer, within: float = 1e-10) -> None:
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.outputs, expected.outputs, rtol=1e-9, atol=1e-10)
    assert_near(by_place(found.gradients), by_place(expected.gradients), within)


@pytest.mark.parametrize("number", range(60))
def test_a_random_problem_has_one_gradient(number: int) -> None:
    """Bias corrections are Python numbers: TorchOpt's are float32, a thousand times less exact."""
    problem, tasks = random_problem(number)
    if not problem.steps:  # only the support loss reads them
        problem.fixed.pop("of examples")
    mixed = differentiate(problem, tasks, "mixed")
    assert_same(mixed, differentiate(problem, tasks, "reverse"))
    kept = dataclasses.replace(problem, snapshots=number % 4)
    assert_same(differentiate(kept, tasks, batching="tasks"), mixed)
    assert_same(mixed, by_hand(problem, tasks))


@pytest.mark.parametrize("batching", ["vmap", "tasks"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_problem_begins_where_another_ended(name: str, batching: Any) -> None:
    """2 + 2 steps: the end is that of 4, and AdamW's gradient is that of the last 2 of them."""
    task = randn(1, 4, 6, 3, seed=1), randn(1, 4, 6, seed=2)
    fixed = {"weights": randn(6, seed=3).sigmoid()}

    def state(start: Params, begun: int, steps: int, **values: Any) -> Problem:
        def loss(params: Params, task: Any, i: int) -> tuple[Tensor, Tensor]:
            errors = (torch.tanh(task[0][i] @ params["w"]) - task[1][i]).square()
            return (params["weights"] * errors).mean(), errors

        return Problem(
            start,
            lambda params, task, step: loss(params, task, begun + step),
            lambda params, task, step: loss(params, task, 0),
            fixed=fixed, optimizer=name, lr=0.05, steps=steps, lives_on=True, **values,
        )  # fmt: skip

    start = {"w": randn(3, seed=4)}
    first = differentiate(state(start, 0, 2), task, "auto", batching).end
    whole = differentiate(state(start, 0, 4), task).end
    assert first is not None and whole is not None
    values = {"snapshots": 0, "optimizer_state": first.optimizer_state}
    carried = state(first.params, 2, 2, **values)
    found = differentiate(carried, task, "auto", batching)
    assert found.end is not None
    torch.testing.assert_close(found.end.params, whole.params, rtol=1e-12, atol=1e-12)
    if name == "adamw":
        begun = {"t": 2, "w": tuple(moment.total["w"][0] for moment in first.optimizer_state)}
        assert_same(found, by_hand(carried, task, begun))
    with pytest.raises(ValueError, match="give one task"):
        differentiate(carried, tuple(part.repeat_interleave(2, 0) for part in task))


@pytest.mark.parametrize("way", ["reverse", "mixed", "auto"])
def test_an_update_of_one_s_own_keeps_a_state(way: Any) -> None:
    """Momentum, stated by hand: its cells adapt, too, and no loss reads them."""

    def loss(params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        errors = (torch.tanh(task.support_x @ params["w"]) - task.support_y).square()
        return errors.mean(), errors

    def update(gradients: Params, own: Params, weights: Params) -> Params:
        cells, before = own["keep"] * weights["cells"] + gradients["w"], weights["cells"]
        weights["cells"] = cells  # the dictionary is its own
        return {"w": own["rate"] * cells, "cells": before - cells}

    def state(params: Params) -> Problem:
        own = {name: params[name] for name in ("keep", "rate")}
        start = {"w": params["w"], "cells": torch.zeros(3, dtype=torch.float64)}
        return Problem(start, loss, loss, lr=1.0, steps=3, transform=Transform(update, own, True))

    def known(params: Params) -> Problem:
        rates = [{"w": params["rate"]}] * 3
        return Problem(
            {"w": params["w"]}, loss, loss, "momentum", 1.0, 3, rates=rates, momentum=0.7
        )

    params = {
        "w": randn(3, seed=1),
        "rate": randn(3, seed=2),
        "keep": torch.tensor(0.7, dtype=torch.float64),
    }
    tasks = Task(*(randn(4, *size, seed=3) for size in ((5, 3), (5,)) * 2))
    expected = maml.meta_gradient(known, {n: params[n] for n in ("w", "rate")}, tasks, way)
    for batching in ("auto", "vmap", "tasks"):
        found = maml.meta_gradient(state, params, tasks, way, batching)  # type: ignore[arg-type]
        assert_near({"": found.losses}, {"": expected.losses})
        assert_near({n: found.gradients[n] for n in expected.gradients}, expected.gradients)

    def forgets(params: Params) -> Problem:
        def decayed(gradients: Params, own: Params, weights: Params) -> Params:
            return update(gradients, own, weights) | {"spare": own["keep"] * weights["spare"]}

        problem = state(params)
        own = Transform(decayed, {n: params[n] for n in ("keep", "rate")}, weights=True)
        start = {**problem.start, "spare": params["rate"]}
        return dataclasses.replace(problem, start=start, transform=own)

    def closes_over(params: Params) -> Problem:
        own = Transform(lambda gradients, _: {"w": params["rate"] * gradients["w"]}, {})
        return dataclasses.replace(known(params), rates=None, transform=own)

    def returns(found: dict[str, Any]) -> Callable[[Params], Problem]:
        own = Transform(lambda *_: found, {})
        return lambda params: Problem(params, loss, loss, transform=own)

    def losing(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Params], Problem]:
        own: Any = {part: lambda *given: (change(loss(*given)[0]), loss(*given)[1])}
        return lambda params: dataclasses.replace(Problem(params, loss, loss), **own)

    still, unmoved = (
        maml.meta_gradient(of, {"w": params["w"]}, tasks, way).gradients
        for of in (returns({"w": 0}), lambda params: Problem(params, loss, loss, steps=0))
    )
    assert_near(still, unmoved)

    for of, line in (
        (forgets, "'spare' appears to not"),
        (closes_over, "the transform reads"),
        (returns({}), "returns no gradient of 'keep'"),
        (losing("support", torch.detach), "the support loss depends on no parameter"),
        (losing("query", torch.detach), "the query loss depends on no parameter"),
        (losing("support", torch.atleast_1d), r"the loss is one tensor \[1\]: it must be"),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=line):
            maml.meta_gradient(of, params, tasks, way)


@pytest.mark.parametrize(("snapshots", "again"), [(None, 0), (0, 21), (1, 7), (2, 4), (8, 0)])
def test_states_that_are_not_kept_are_computed_again(snapshots: int | None, again: int) -> None:
    """8 steps, each once on the way there; on the way back again, unless the state is kept."""
    called = []

    def support(params: Params, task: Tensor, step: int) -> tuple[Tensor, Tensor]:
        called.append(step)
        return (params["w"] - task).square().sum() * params["w"].sum(), task

    problem = Problem(
        {"w": randn(3, seed=1)}, support, support, steps=8, optimizer="adamw", snapshots=snapshots
    )
    differentiate(problem, randn(1, 3, seed=2), "mixed", "tasks")
    assert len(called) == 1 + 8 + (0 if snapshots is None else 8) + again


def convnet_problem(pool: bool, mean: bool, **values: Any) -> tuple[Problem, Task]:
    torch.manual_seed(3)
    network = Conv4((1, 17, 17), 3, filters=16, pool=pool, mean=mean).double()
    weights = {n: p.detach() + 0.1 * torch.randn_like(p) for n, p in network.named_parameters()}
    support, query = (
        NetworkLoss(network, part, torch.nn.functional.cross_entropy)  # type: ignore[arg-type]
        for part in ("support", "query")
    )
    labels = torch.arange(3).repeat(N_TASKS, 2)
    tasks = Task(
        randn(N_TASKS, 6, 1, 17, 17, seed=1), labels, randn(N_TASKS, 6, 1, 17, 17, seed=2), labels
    )
    return Problem(weights, support, query, lr=0.2, **values), tasks


def by_torch(problem: Problem, tasks: Task, network: Any) -> Outer:
    """In reverse mode, without kernels."""
    with mock.patch.object(network, "kernels", False):
        return differentiate(problem, tasks, "reverse")


@needs_compiler
@pytest.mark.parametrize(("pool", "mean"), [(False, True), (True, False), (False, False)])
def test_kernels_find_the_same_of_all_that_a_problem_can_state(pool: bool, mean: bool) -> None:
    """MAML++'s parts and more: a fixed body, rates, parameters of each step, a pull."""
    problem, tasks = convnet_problem(pool, mean, steps=3)
    weights = dict(problem.start)
    own = [name for name in weights if "norm" in name]
    still = [name for name in weights if name.startswith("blocks.0.conv")]
    moving = {n: w for n, w in weights.items() if n not in own and n not in still}
    rates = [
        {n: (0.5 + 0.1 * t + 0.01 * i * torch.ones(())).double().requires_grad_()
         for i, n in enumerate(moving)}
        for t in range(3)
    ]  # fmt: skip
    whole = dataclasses.replace(
        problem,
        start=moving,
        fixed={n: weights[n] for n in still},
        step_params=[{n: weights[n] * (1 + 0.1 * t) for n in own} for t in range(3)],
        rates=rates,
        query_weights=[0.2, 0.0, 0.8],
        proximal=0.5,
    )
    for changed in (
        problem,
        dataclasses.replace(problem, steps=9),  # more than are remembered
        dataclasses.replace(whole, order="first"),
        dataclasses.replace(whole, rates=None),
        whole,
    ):
        assert native(changed, tasks) is not None
        assert_same(differentiate(changed, tasks), by_torch(changed, tasks, problem.query.network))  # type: ignore[attr-defined]


@needs_compiler
def test_kernels_are_chosen_by_the_loss() -> None:
    """Only the plain cross-entropy is compiled with its head; other losses only with the blocks."""
    problem, tasks = convnet_problem(False, True, steps=2)
    assert native(problem, tasks) is not None
    support, network = problem.support, problem.support.network  # type: ignore[attr-defined]

    def doubled(params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        loss, outputs = support(params, task, step)
        return 2 * loss, outputs

    def smoothed(outputs: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs, y, label_smoothing=0.1)

    others = [
        dataclasses.replace(problem, support=doubled),
        dataclasses.replace(problem, query=doubled),
        dataclasses.replace(problem, query=support),
        dataclasses.replace(problem, support=dataclasses.replace(support, loss=smoothed)),
        dataclasses.replace(problem, start=problem.start | {"stray": torch.zeros(2).double()}),
    ]
    for other in others:
        assert native(other, tasks) is None
    for other in others[:4]:
        found = differentiate(other, tasks, "mixed")
        assert_same(found, by_torch(other, tasks, network))
        apart = [
            (found.gradients.start[name] - gradient).abs().max()
            for name, gradient in differentiate(problem, tasks).gradients.start.items()
        ]
        assert max(apart) > 1e-3
    for part in ("support_y", "query_y"):  # cross-entropy ignores this label
        ignored = tasks._replace(**{part: getattr(tasks, part).clone()})
        getattr(ignored, part)[1, 2] = -100
        assert_same(differentiate(problem, ignored), by_torch(problem, ignored, network))
    # `test_stack.py` tests this for blocks; here the head is compiled, too.
    network.head = torch.nn.Linear(16, 3, bias=False)
    assert native(problem, tasks) is None


LEARNED = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"optimizer": "adma"}, "optimizer 'adma'"),
        ({"order": "third"}, "order"),
        ({"steps": -1}, "steps -1"),
        ({"steps": 2, "query_weights": [1.0]}, "query_weights: 1 of them for 2 steps"),
        ({"steps": 0, "query_weights": [1.0]}, "query_weights: 1 of them for 0 steps"),
        ({"steps": 1, "rates": [{"b": torch.ones(())}]}, "rates"),
        ({"lr": torch.tensor(0.1)}, "lr, proximal and query_weights are plain"),
        ({"query_weights": [torch.tensor(1.0)]}, "lr, proximal and query_weights are plain"),
        ({"fixed": {"a": torch.ones(())}}, "share a name"),
        ({"fixed": {"i": torch.arange(3)}}, "i is torch.int64: .* must be a floating-point"),
        ({"rates": [{"a": 0.1}]}, "a is float: .* must be a floating-point tensor"),
        ({"implicit": Implicit(3)}, "proximal"),
        ({"displacement": True, "query_weights": [1.0]}, "displacement"),
        ({"displacement": True, "rates": [{"a": LEARNED}]}, "no gradient by the rate of a"),
        ({"implicit": Implicit(3), "proximal": 1.0, "order": "first"}, "not with order"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], line: str) -> None:
    def loss(params: Params, task: None, step: int) -> tuple[Tensor, Tensor]:
        return params["a"].sum(), params["a"]

    with pytest.raises(ValueError, match=line):
        Problem({"a": torch.ones(2)}, loss, loss, **values)


def test_what_no_loss_reads_and_what_a_loss_closes_over_is_refused() -> None:
    """It is enough that one step's loss reads a parameter; its derivative may be zero.

    What a loss closes over would count as a constant, although it depends on meta-parameters.
    """
    x = randn(1, 3, seed=1)

    def state(meta_params: Params, closed: bool = False) -> Problem:
        def support(params: Params, task: Tensor, step: int) -> tuple[Tensor, Tensor]:
            loss = (params["w"] * task).square().sum() + params["late"].sum() * (step == 1)
            return loss + meta_params["w"].sum() if closed else loss, params["w"]

        def query(params: Params, task: Tensor, step: int) -> tuple[Tensor, Tensor]:
            return params["w"].square().sum(), params["w"]

        return Problem(meta_params, support, query, lr=0.1, steps=2)

    start = {"w": randn(3, seed=2), "late": randn(2, seed=3)}
    found = meta_gradient(state, start, x)
    assert found.gradients["w"].abs().min() > 0 and not found.gradients["late"].any()
    with pytest.raises(ValueError, match="support loss reads parameters that are not among"):
        meta_gradient(lambda params: state(params, closed=True), start, x)
    start["stray"] = torch.zeros(2).double()
    with pytest.raises(RuntimeError, match="'stray' appears to not have been used by any loss"):
        meta_gradient(state, start, x)


# Sets are [2, 4, 5]. Each entry: the number of scales and shifts, and the function.
NORMS: dict[str, tuple[int, Any]] = {
    "F.layer_norm": (5, lambda x, w, b: F.layer_norm(x, (5,), w, b)),
    "torch.layer_norm": (5, lambda x, w, b: torch.layer_norm(x, (5,), w, b)),
    "torch.native_layer_norm": (
        5, lambda x, w, b: torch.native_layer_norm(x, (5,), w, b, 1e-5)[0]
    ),
    "torch.native_batch_norm": (
        4, lambda x, w, b: torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)[0]
    ),
    "F.instance_norm": (4, lambda x, w, b: F.instance_norm(x, None, None, w, b)),
    "torch.instance_norm": (
        4, lambda x, w, b: torch.instance_norm(x, w, b, None, None, True, 0.1, 1e-5, False)
    ),
    "F.group_norm": (4, lambda x, w, b: F.group_norm(x, 2, w, b)),
    "F.batch_norm": (4, lambda x, w, b: F.batch_norm(x, None, None, w, b, True)),
    "torch.batch_norm": (
        4, lambda x, w, b: torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, False)
    ),
    "running": (
        4, lambda x, w, b: F.batch_norm(x, torch.ones(4).double(), torch.ones(4).double(), w, b)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_normalisations_that_torch_batches_wrongly(name: str) -> None:
    """Each way, against plain autograd, task by task."""
    size, normalise = NORMS[name]
    params = {"scale": randn(4, 5, seed=9), "weight": randn(size, seed=8)}
    params["bias"] = randn(size, seed=7)

    def outputs(params: Params, x: Tensor, step: int) -> Tensor:
        found: Tensor = normalise(x * params["scale"], params["weight"], params["bias"])
        return found

    tasks = Task(*(randn(N_TASKS, 2, 4, 5, seed=i) for i in range(4)))
    problem = Problem(params, **losses_of(outputs, F.mse_loss), lr=0.1, steps=2)
    expected = by_hand(problem, tasks)
    for way in ("reverse", "mixed"):
        assert_same(differentiate(problem, tasks, way), expected)
