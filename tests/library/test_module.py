"""A learner as an ``nn.Module``: state, frozen parts, output layer, `adapt` against its loss."""

import copy
import inspect
import threading
import weakref
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maml
from maml.config import Config
from maml.library import family
from maml.library.flags import Flags
from maml.networks.stack import remembering
from tests.library.own_networks import Blockwise, Tied, by_loop, dense, found_with, made, stacked


class Linked(nn.Module):
    """A function that leads to the module itself; and a hook, a reference, and a lock."""

    def __init__(self, *, more: bool) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(1.5)), nn.Linear(16, 3)
        self.drop = lambda h: F.dropout(h, 0.5, self.training) * self.scale
        self.double().kept = dict[str, Tensor]()
        if more:
            self.layer.whole, self.lock = weakref.ref(self), threading.Lock()  # type: ignore
            self.layer.register_forward_hook(
                lambda layer, _, h: self.kept.update(h=h * layer.whole().scale)
            )
            drop = self.drop
            self.drop = lambda h, own=(self,): drop(h) * own[0].scale
            self.last = self(torch.zeros(1, 16).double())  # torch cannot copy it

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x.flatten(1))
        return self.drop(self.kept.get("h", hidden))


HEAD = {"head": "3"}
LEARNERS: list[tuple[type[maml.MetaLearner], dict[str, Any]]] = [
    (maml.MAML, {"adapt": "*,1.*=0.5"}),
    (maml.MAML, {"inner_optimizer": "adam"}),
    (maml.MAML, {"order": 1}),
    (maml.MAML, {}),
    (maml.ANIL, HEAD),
    (maml.BOIL, HEAD),
    (maml.MetaSGD, {}),
    (maml.MetaCurvature, {}),
    (maml.MAMLpp, {}),
    (maml.ProtoNet, HEAD),
    (maml.ProtoNet, {}),
    (maml.R2D2, HEAD),
]


def test_a_checkpoint_may_be_loaded_after_wrapping() -> None:
    network = dense(nn.BatchNorm1d(8)).eval()
    learner, other = maml.MAML(network), dense(nn.BatchNorm1d(8)).eval()
    other[2].running_mean.fill_(3.0)
    network.load_state_dict(other.state_dict())
    assert learner(made()) == maml.MAML(other)(made())


@pytest.mark.parametrize("more", [False, True])
def test_what_leads_to_the_module_leads_to_the_copy(more: bool) -> None:
    torch.manual_seed(0), torch.set_num_threads(2)
    network = Linked(more=more)
    learner = maml.MAML(network, inner_lr=0.1, inner_steps=2)
    network.eval()
    for sizes in ((6, 6), (3, 6)):
        expected, gradients = by_loop(network, made(sizes), 2, 0.1)
        loss = learner.eval()(made(sizes))
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(loss, [*network.parameters()])
        torch.testing.assert_close(found, tuple(gradients), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(learner.train().evaluate(made(sizes))["loss"].mean(), expected)


def test_a_view_of_a_parameter_is_refused() -> None:
    network = dense()
    loss = maml.MAML(network)(made())
    network.register_forward_hook(lambda own, _, outputs: outputs.retain_grad())
    torch.testing.assert_close(maml.MAML(network)(made()), loss)
    network.last = network[1].weight.t()
    network.register_forward_hook(lambda own, _, outputs: outputs * own.last.sum())
    with pytest.raises(maml.UserError, match="a view of it: made in forward"):
        maml.MAML(network)(made())


def test_what_has_adapted_is_its_own() -> None:
    """It keeps no memory of the caller's, and the mode in which it was made."""
    torch.manual_seed(0)
    (x, y, query, _), network = made()[0], dense(nn.Dropout(0.5))
    for learner in (maml.MAML(network), maml.ProtoNet(network), maml.R2D2(network)):
        given = x.clone()
        fast = learner.eval().adapt(given, y)
        answers = fast(query)
        given.zero_(), learner.train()
        assert torch.equal(fast(query), answers)
        assert "Dropout(p=0.5" in repr(fast)


def test_forward_may_write_into_its_input_and_into_buffers() -> None:
    class Writing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x.sub_(1).flatten(1))

    network, plain = Writing(16, 3).double(), nn.Linear(16, 3).double()
    network.register_buffer("count", torch.tensor(0))
    network.register_buffer("gain", torch.ones(2))
    plain.load_state_dict(network.state_dict(), strict=False)
    learner, (x, y, query, _) = maml.MAML(network, inner_steps=1), made()[0]
    fast = maml.MAML(plain, inner_steps=1).adapt(x.flatten(1) - 1, y, steps=1)
    expected = fast(query.flatten(1) - 1)
    torch.testing.assert_close(learner.adapt(x.clone(), y, steps=1)(query.clone()), expected)
    with (
        pytest.warns(UserWarning, match="its buffer count"),
        pytest.raises(ValueError, match="in place"),
    ):
        learner(made())
    learner.float()
    assert network.gain.dtype == torch.float32
    network.gain.fill_(3.0)
    assert torch.equal(learner.learner.network.module.gain, network.gain)


def test_what_is_frozen_later_is_refused() -> None:
    network = dense()
    learner = maml.MetaSGD(network)
    network.requires_grad_(False), learner(made()).backward()  # the rates learn alone
    network.requires_grad_(True)[1].bias.requires_grad_(False)
    for call in (learner, lambda tasks: learner.adapt(*tasks[0][:2])):
        with pytest.raises(maml.UserError, match=r"^1.bias was frozen after"):
            call(made())
    learner = maml.MAML(dense(nn.BatchNorm1d(8).eval()))
    learner.requires_grad_(False).requires_grad_(True)(made()).backward()
    assert [p.requires_grad for p in learner.parameters()].count(False) == 2  # running statistics


def test_an_output_layer_may_share_its_weight() -> None:
    """The weight is the output layer's under any name, and stays when this layer is removed."""
    of_head = {"first": {"first.weight", "first.bias"}, "second": {"first.weight", "second.bias"}}
    for head, names in of_head.items():
        learner = maml.ANIL(Tied(), head=head).learner
        assert learner.adapting.keys() == {f"module.{name}" for name in names}
        adapting = maml.MAML(Tied(), adapt=f"{head}.*").learner.adapting
        assert adapting.keys() == learner.adapting.keys()
    twice = Tied()
    twice.last = twice.second  # the layer itself under a second name
    assert maml.ANIL(twice, head="last").learner.adapting.keys() == learner.adapting.keys()
    network = Tied().double()
    network.second.bias.requires_grad_(False)
    maml.ProtoNet(network, head="second")
    assert not network.second.bias.requires_grad
    network.second.bias.requires_grad_(True)
    plain: Any = copy.deepcopy(network)
    plain.first = nn.Identity()
    for learner in (maml.ProtoNet(network, head="first"), maml.ProtoNet(plain)):
        learner(made()).backward()
    torch.testing.assert_close(network.first.weight.grad, plain.second.weight.grad)
    frozen = maml.ProtoNet(network, head="first", freeze="first.*").learner.frozen
    assert frozen == ["module.second.weight"]


def test_a_class_of_one_s_own_may_have_any_name() -> None:
    network, own = dense(), type("NoAdapt", (maml.MAML,), {})
    assert own(network)(made()) == maml.MAML(network)(made())


@pytest.mark.parametrize(("kind", "flags"), LEARNERS)
def test_an_outer_loss_of_one_s_own_has_the_same_gradient(
    kind: type[maml.MetaLearner], flags: dict[str, Any]
) -> None:
    """The graph of `adapt` gives the gradient of the fast way, for all parameters."""
    torch.manual_seed(0)
    steps = {} if kind in (maml.ProtoNet, maml.R2D2) else {"inner_steps": 2}
    network = dense()
    if kind is maml.MAML and not flags:  # fused attention has no second derivative
        network.insert(0, nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).double())
    learner = kind(network, **steps, **flags)
    network[-1].weight.register_hook(lambda slope: 2 * slope)  # of the meta-gradient alone
    tasks = made()
    loss = learner(tasks)
    loss.backward()
    found = [parameter.grad for parameter in learner.parameters()]
    assert torch.compile(learner, backend="eager")(tasks) == loss
    own = torch.stack([F.cross_entropy(learner.adapt(*t[:2])(t[2]), t[3]) for t in tasks]).mean()
    expected = torch.autograd.grad(own, list(learner.parameters()))
    torch.testing.assert_close(loss, own)
    torch.testing.assert_close(found, [*expected], rtol=1e-10, atol=1e-12)
    evaluated = learner.evaluate(tasks)
    torch.testing.assert_close(evaluated["loss"].mean(), own.detach())
    assert {*evaluated} == {"loss", "accuracy"}  # no norm makes two results


def test_it_trains_as_any_module(tmp_path: Path) -> None:
    """Optimizer, scheduler, clipping and ``state_dict`` are torch's; the module's tensors learn."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.2),
                            nn.Linear(8, 3))  # fmt: skip
    learner = maml.MAML(network, inner_lr=0.1, inner_steps=2)
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    tasks = tuple(t.float() if t.is_floating_point() else t for t in stacked(made()))
    before = learner.evaluate(tasks)["loss"].mean()
    assert torch.equal(learner.evaluate(tasks)["loss"].mean(), before)  # without dropout
    for _ in range(20):
        loss = learner(tasks)
        loss.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert learner.training
    assert learner.metrics["accuracy"].shape == (3,)
    after = learner.evaluate(tasks)["loss"].mean()
    assert after < before - 0.2
    with torch.no_grad():  # the outer loss needs no graph
        assert not learner(tasks).requires_grad
    assert isinstance(network[2], nn.BatchNorm1d)
    torch.save(maml.MAML(network, loss=nn.CrossEntropyLoss()), tmp_path / "whole.pt")
    assert torch.load(tmp_path / "whole.pt", weights_only=False)(tasks).isfinite()
    torch.save(learner.state_dict(), tmp_path / "learner.pt")
    other = maml.MAML(copy.deepcopy(network), inner_lr=0.1, inner_steps=2)
    other.load_state_dict(torch.load(tmp_path / "learner.pt", weights_only=True))
    torch.testing.assert_close(other.evaluate(tasks)["loss"].mean(), after)
    fast = other.eval().adapt(tasks[0][0], tasks[1][0])
    torch.testing.assert_close(
        fast(tasks[2][0][:1], "support"), fast(tasks[2][0], "support")[:1], rtol=1e-4, atol=1e-5
    )


def test_blocks_for_networks_of_one_s_own() -> None:
    """They equal torch's layers, in training and with the support set's statistics."""
    torch.manual_seed(0)
    blocks = maml.nn.ConvBlocks((1, 12, 12), filters=8, layers=2, pool=True).double()
    own = nn.Sequential(blocks, nn.Linear(blocks.n_features, 3).double())
    layers: list[nn.Module] = []
    for block in blocks.blocks:
        norm = nn.BatchNorm2d(8, eps=blocks.eps).double()
        norm.weight, norm.bias = block.norm.weight, block.norm.bias
        layers += [block.conv, norm, nn.ReLU(), nn.MaxPool2d(2)]
    plain = nn.Sequential(*layers, nn.Flatten(), own[1])
    torch.testing.assert_close(found_with(own, 2), found_with(plain, 2), rtol=1e-9, atol=1e-11)
    # Two stacks that share weights stay two stacks.
    means = maml.nn.ConvBlocks((1, 12, 12), filters=8, layers=2, pool=True, mean=True)
    means.blocks, x = blocks.blocks, torch.rand(6, 1, 12, 12).double()
    with remembering():
        assert [stack(x).shape[1] for stack in (blocks, means)] == [72, 8]
    with pytest.raises(ValueError, match="4 poolings leave nothing"):
        maml.nn.ConvBlocks((1, 12, 12), pool=True)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_checkpointed_block_is_computed_again_by_its_own_weights(steps: int) -> None:
    """With batch norms and compiled blocks in it."""
    torch.manual_seed(0)
    blocks = maml.nn.ConvBlocks((1, 12, 12), filters=8, layers=1)
    size = blocks.n_features
    network = Blockwise(size, blocks, nn.BatchNorm1d(size), nn.Tanh(), again=False).double()
    expected = found_with(network, steps)
    network.again = True
    torch.testing.assert_close(found_with(network, steps), expected, rtol=1e-9, atol=1e-11)


def test_help_lists_what_a_learner_takes() -> None:
    """By name, type and default; type checkers know the same names."""
    named = set[str]()
    kinds = [each for each in vars(family).values() if isinstance(each, type)]
    for kind in {*kinds} - {maml.MetaLearner}:
        shown = inspect.signature(type("Own", (kind,), {})).parameters
        named |= (flags := {*shown} & {*get_type_hints(Flags)})
        assert {*shown} - flags == {"module", "loss", "inner_loss", "head", "batching", "compile"}
        network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        given: Any = {name: shown[name].default for name in flags}
        given |= {"context_layer": "1"} if "context_layer" in given else {}
        assert type(kind(network, head="2", **given)) is kind  # each is taken, with its default
    assert named == {*get_type_hints(Flags)}
    own = type("Own", (maml.MAML,), {"__init__": lambda self: None})
    assert not inspect.signature(own).parameters
    types = get_type_hints(Config)
    differ = {name for name, of in get_type_hints(Flags).items() if of != types.get(name)}
    assert differ == {"inner_lr", "order", "eval_inner_steps", "context_layer"}
