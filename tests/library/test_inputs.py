"""The forms of tasks that the library takes, and what it makes of their targets."""

import copy
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import maml
from datasets.tasks import Task
from tests.library.own_networks import by_loop, dense, made, of_words, stacked


class Gated(nn.Linear):
    """Has several inputs."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) * gate[:, None]


def test_tasks_of_different_ways_and_modes_are_each_their_own() -> None:
    torch.manual_seed(0)
    learner = maml.ProtoNet(dense(nn.Dropout(0.5)), head="4").eval()
    three, two = made((6,)), [tuple(part[:4] % 2 if part.dtype == torch.int64 else part[:4]
                                    for part in made((6,))[0])]  # fmt: skip
    alone = [learner([*one]).item() for one in (three, two)]
    together = [*three, *two]
    assert learner(together).item() == pytest.approx(sum(alone) / 2, rel=1e-12)  # type: ignore[arg-type]
    assert learner.evaluate(together)["loss"].isfinite().all()  # type: ignore[arg-type]
    learner.train()
    assert learner(stacked(made())).item() != learner(stacked(made())).item()
    fast = maml.MAML(dense(nn.Dropout(0.5))).adapt(*made()[0][:2])
    x = made()[0][2]
    assert not torch.equal(fast(x), fast(x))
    fast.eval()
    assert torch.equal(fast(x), fast(x))


@pytest.mark.parametrize("kind", [maml.ProtoNet, maml.R2D2])
def test_support_and_query_may_be_padded_to_two_lengths(kind: type[maml.MetaLearner]) -> None:
    words, ids, y = (
        nn.EmbeddingBag(9, 4, padding_idx=0),
        torch.arange(1, 7)[:, None],
        torch.arange(6) % 3,
    )
    learner, padded = kind(words), [(ids, y, F.pad(ids, (0, 2)), y)]
    torch.testing.assert_close(learner(padded), learner([(ids, y, ids, y)]))
    torch.testing.assert_close(learner.evaluate(padded), learner.evaluate([(ids, y, ids, y)]))
    with pytest.raises(
        maml.UserError, match=r"have examples \[1\] and \[3\], which batch norms would"
    ):
        kind(nn.Sequential(words, nn.BatchNorm1d(4)))(padded)


def test_examples_may_have_several_inputs() -> None:
    """In order, or by name; as a batch or a list of tasks; also arrays."""
    several = [((a, a[:, 0, 0]), b, (c, c[:, 0, 0]), d) for a, b, c, d in made()]
    named = [
        ({"gate": gate, "x": x.numpy()}, b, UserDict(x=asked[0], gate=asked[1]), d)
        for (x, gate), b, asked, d in several
    ]
    together = pytree.tree_map(lambda *parts: torch.stack(parts), *several)
    collated = [list(part) if isinstance(part, tuple) else part for part in together]
    network = Gated(16, 3).double()
    expected, gradients = by_loop(network, several, 2, 0.1)
    learners = [
        maml.MAML(network, inner_lr=0.1, inner_steps=2),
        maml.ProtoNet(network),
        maml.Reptile(network, inner_lr=0.1, inner_steps=3, inner_batch=2),
    ]
    for form in (several, named, [named[0], *several[1:]], together, collated):
        network.zero_grad()
        loss = learners[0](form)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        for learner in learners:
            torch.manual_seed(0)
            loss = learner(form)
            torch.manual_seed(0)
            torch.testing.assert_close(loss, learner(several))
    for learner in learners:
        (x, y, (asked, gate), _), (other, _, by_name, _) = several[0], named[0]
        fast, of_name = learner.adapt(x, y), learner.adapt(other, y)
        expected = fast((asked, gate))
        for answers in (
            *(fast(asked, gate), fast(asked, gate=gate), fast(gate=gate, x=asked.numpy())),
            *(fast(asked, gate, "support"), fast(asked, gate, batch_statistics="support")),
            *(of_name(by_name), copy.deepcopy(fast)(asked, gate)),
        ):
            assert torch.equal(answers, expected)
        with pytest.raises(TypeError, match="gate"):
            fast(asked)


def test_targets_may_be_several() -> None:
    def loss(outputs: Tensor, y: Any) -> Tensor:
        return F.cross_entropy(outputs, y["class"]) + (outputs[:, 0] - y["size"]).square().mean()

    def of_two(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"size": x[:, 0, 0], "class": y}

    tasks: Any = [(a, of_two(a, b), c, of_two(c, d)) for a, b, c, d in made((6, 6, 3))]
    short = [(a, b | {"class": b["class"].int()}, c, d) for a, b, c, d in tasks]
    network = dense()
    expected, gradients = by_loop(network, tasks, 2, 0.1, loss)
    learner = maml.MAML(network, inner_lr=0.1, inner_steps=2, loss=loss)
    for form in (tasks, short):
        network.zero_grad()
        learner(form).backward()
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        tested = learner.evaluate(form, steps=2)
        torch.testing.assert_close(tested["loss"].mean(), expected)
        assert {*tested} == {*learner.metrics, "loss"} == {"loss"}
    x, y, query, asked = tasks[0]
    own = loss(learner.adapt(x, y, steps=2)(query), asked)
    torch.testing.assert_close(own.detach(), tested["loss"][0])
    assert maml.Reptile(network, inner_batch=2, loss=loss)(tasks).isfinite()


def test_tasks_move_as_tensors_do() -> None:
    several, y = (
        (torch.ones(2, 3), {"mask": torch.ones(2, 3) > 0}),
        torch.zeros(2, dtype=torch.int64),
    )
    task = Task(several, y, several, y).to(torch.float64)  # type: ignore[arg-type]
    assert isinstance(task, Task) and task.support_x[0].dtype == torch.float64
    assert task.support_x[1]["mask"].dtype == torch.bool and task.query_y.dtype == torch.int64
    for moved in (
        task.to("meta"),
        task.to(device="meta", dtype=torch.float64),
        task.to(y.to("meta")),
    ):
        assert {part.device.type for part in pytree.tree_leaves(moved)} == {"meta"}
    glyphs = maml.episodes("glyphs", "test", ways=2, queries=1)
    assert torch.equal(
        glyphs.task(0).to("cpu", torch.float64).query_x, glyphs.task(0).query_x.double()
    )


def test_one_query_is_answered_by_the_support_set_alone() -> None:
    """Where a batch norm would normalise a query by itself; other tasks have both results."""
    network = dense(nn.BatchNorm1d(8))
    many = made((6, 6))
    alone: Any = [(*task[:2], task[2][:1], task[3][:1]) for task in many]
    for kind in (maml.MAML, maml.MAMLpp, maml.Reptile):
        learner = kind(network)
        both = learner.evaluate(many)
        assert {*both} == {p + n for p in ("", "non_transductive_") for n in ("loss", "accuracy")}
        expected = [
            F.cross_entropy(learner.adapt(x, y)(query, batch_statistics="support"), asked)
            for x, y, query, asked in alone
        ]
        for tasks in (alone, stacked(alone), [*alone, many[0]]):
            with pytest.warns(UserWarning, match="^task 0: one query has no statistics") as seen:
                found = learner.evaluate(tasks)
            assert [warning.filename for warning in seen] == [__file__]
            assert {*found} == {"non_transductive_loss", "non_transductive_accuracy"}
            torch.testing.assert_close(found["non_transductive_loss"][:2], torch.stack(expected))
    joint = maml.ProtoNet(network).evaluate([(*t[:2], t[2][:1], t[1][:1]) for t in many])
    assert {"loss", "non_transductive_loss"} <= {*joint}  # normalised with the support set


@pytest.mark.parametrize("kind", [maml.MAML, maml.ProtoNet])
def test_inputs_of_other_dtypes_are_no_batch(kind: type[maml.MetaLearner]) -> None:
    """`torch.cat` would make the booleans numbers, and networks tell masks apart by their dtype."""

    class Masked(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x.flatten(1)) * (mask if mask.dtype == torch.bool else -mask)

    def tasks(of_booleans: Callable[[Tensor], Tensor]) -> Any:
        (a, b, c, d), (e, f, g, h) = made((5, 5))
        signs = [x[:, :3, 0].sign() for x in (a, c, e, g)]
        signs[0], signs[3] = (of_booleans(signs[i] > 0) for i in (0, 3))
        a, c, e, g = zip((a, c, e, g), signs, strict=True)
        return [(a, b, c, d), (e, f, g, h)]

    learner = kind(Masked(16, 3).double())
    mixed, alike = tasks(lambda mask: mask), tasks(lambda mask: -mask.double())
    torch.testing.assert_close(learner(mixed), learner(alike))
    torch.testing.assert_close(learner.evaluate(mixed), learner.evaluate(alike))


def test_accuracy_is_of_classes_where_they_are() -> None:
    y = torch.arange(60).reshape(3, 5, 4) % 4
    last = 5.0 * F.one_hot(y, 4)
    ignored = y.clone()
    ignored[..., 2:] = -100
    half = torch.where(torch.arange(4) < 2, y, 3 - y)
    cases: list[tuple[Any, Tensor, Tensor, dict[str, float]]] = [
        (None, last.transpose(-1, -2), y, {"accuracy": 1.0}),
        (of_words, last, y, {"accuracy": 1.0}),
        (of_words, last, ignored, {"accuracy": 1.0}),
        (of_words, last, half, {"accuracy": 0.5}),
        (None, last.flatten(1, 2), ignored.flatten(1), {"accuracy": 1.0}),
        (nn.CrossEntropyLoss(), last.flatten(1, 2), y.flatten(1), {"accuracy": 1.0}),
        (lambda outputs, y: (outputs[:, 0] - y).square().mean(), y[..., :1] * 1.0, y[..., 0], {}),
    ]
    for loss, x, labels, expected in cases:
        same = nn.PReLU(init=1.0)  # returns its input, and has a parameter
        learner = maml.MAML(same, inner_lr=1e-3, loss=loss)
        learner((x, labels, x, labels))
        assert {name: float(found.mean()) for name, found in learner.metrics.items()} == expected


def test_labels_are_what_the_loss_takes() -> None:
    """Only a call of the loss tells: labels may be ignored, or be no classes at all."""
    x, y = torch.randn(4, 6, 3), torch.randint(3, (4, 6))
    y[:, 4:] = -100

    def of_pairs(outputs: Tensor, y: Tensor) -> Tensor:
        distances = (outputs[:, None] - outputs[None]).square().sum(-1)
        return distances[y[:, None] == y[None]].mean()

    maml.MAML(nn.Linear(3, 3), loss=lambda o, y: F.cross_entropy(o.mT, y))([(x, y, x, y)])
    flat = x[:, 0], torch.tensor([7, 7, 9, 9])
    maml.MAML(nn.Linear(3, 3), loss=of_pairs)([(*flat, *flat)])
    maml.MAML(nn.Linear(3, 3), loss=lambda o, y: of_pairs(o.double(), y))([(*flat, *flat)])
    with torch.autocast("cpu", torch.bfloat16):
        maml.R2D2(nn.Linear(3, 3))([(x[0], torch.arange(6) % 3, x[1], torch.arange(6) % 3)])
    frozen = dense()
    frozen[1].requires_grad_(False)
    turns = torch.polar(torch.ones(4), x[:, 1, 0])
    maml.MAML(nn.Linear(3, 2), loss=lambda o, y: (torch.view_as_complex(o) - y).abs().mean())(
        [(flat[0], turns, flat[0], turns)]
    )
    with pytest.raises(maml.UserError, match="label 9"):
        maml.MAML(nn.Linear(3, 3))([(flat[0], y[0, :4], flat[0], torch.tensor([0, 1, 9, -100]))])
    with pytest.raises(maml.UserError, match="head="):  # what is refused leaves the module alone
        maml.ANIL(frozen)
    assert not frozen[1].weight.requires_grad


def test_outputs_may_differ_in_size() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1))[x[:, 0, 0] > 0]

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.square().mean()

    network = Masked(16, 3).double()
    tasks, learner = made(), maml.MAML(network, loss=loss, inner_lr=0.1, inner_steps=1)
    expected, _ = by_loop(network, tasks, 1, 0.1, loss)
    with torch.device("meta"):  # which draws would take
        found = learner(tasks)
    torch.testing.assert_close(found, expected)


def test_tasks_may_be_of_several_forms() -> None:
    """Fields may have any order. A reader by position would silently swap support and query."""
    other = namedtuple("other", reversed(Task._fields))  # type: ignore[misc]
    named = [dict(zip(Task._fields, task, strict=True)) for task in made()]
    learner = maml.MAML(dense())
    of_numpy = [[part.numpy() for part in task] for task in made()]
    short = [(a, b.int(), c, d.int()) for a, b, c, d in made()]
    for tasks in (named, [other(**task) for task in named], of_numpy, short):
        assert learner(tasks) == learner(made())
    x, y, query, _ = made()[0]
    adapted = learner.adapt(x.numpy(), y.int().numpy())
    assert torch.equal(adapted(query.numpy()), learner.adapt(x, y)(query))
