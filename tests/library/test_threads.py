"""What threads share, and what they must not share."""

import contextvars
import copy
import functools
import pickle
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maml
from maml.execution.threads import spread
from tests.library.own_networks import by_loop, dense, made


@pytest.mark.parametrize("derives", [False, True])
def test_what_threads_would_share_is_computed_by_one(derives: bool) -> None:
    """Outputs that a loss keeps meanwhile, and torch's levels of forward derivatives."""
    kept = dict[str, Tensor]()

    def halved(outputs: Tensor) -> Tensor:
        time.sleep(0.01)
        return outputs.square() / 2

    def slow(outputs: Tensor, y: Tensor) -> Tensor:
        if derives:
            ones = torch.ones_like(outputs)
            return F.cross_entropy(torch.func.jvp(halved, (outputs,), (ones,))[1], y)
        kept["outputs"] = outputs
        time.sleep(0.01)
        return F.cross_entropy(kept["outputs"], y)

    torch.set_num_threads(2)
    network = dense()
    learner = maml.MAML(network, inner_lr=0.1, inner_steps=1, loss=slow, batching="tasks")
    expected, _ = by_loop(network, made(), 1, 0.1)
    torch.testing.assert_close(learner(made()), expected)


def test_threads_share_a_learner() -> None:
    """Parameters that one thread has adapted never reach another thread."""
    learner = maml.MAML(dense(), inner_lr=0.1, inner_steps=2, batching="tasks")
    expected, seen, done = learner(made()), set(), threading.Event()

    def adapts() -> None:
        while not done.is_set():
            with torch.no_grad():
                seen.add(float(learner.adapt(*made()[0][:2])(made()[0][2]).sum()))

    thread = threading.Thread(target=adapts)
    thread.start()
    try:
        for _ in range(30):
            learner.zero_grad()
            loss = learner(made())
            loss.backward()
            assert loss == expected
            assert all(parameter.grad is not None for parameter in learner.parameters())
    finally:
        done.set()
        thread.join()
    assert len(seen) == 1


@pytest.mark.parametrize("what", ["answer", "evaluate"])
def test_training_keeps_its_dropout_while_another_thread_tests(what: str) -> None:
    network, seen, done, me = dense(), set[bool](), threading.Event(), threading.current_thread()
    network[1].register_forward_hook(
        lambda module, *_: seen.add(module.training) if threading.current_thread() is me else None
    )
    learner = maml.MAML(network, inner_lr=0.1, inner_steps=2)
    learner(made()), seen.clear()  # the first call tests the network, without dropout
    fast = learner.adapt(*made()[0][:2]).eval()
    call = (lambda: fast(made()[0][2])) if what == "answer" else lambda: learner.evaluate(made())
    thread = threading.Thread(target=lambda: [call() for _ in iter(done.is_set, True)])
    thread.start()
    for _ in range(20):
        learner(made())
    done.set(), thread.join()
    assert seen == {True}


def test_loading_waits_for_a_call_in_another_thread() -> None:
    network, inside = dense(), threading.Event()
    network[1].register_forward_hook(lambda *_: inside.set() or time.sleep(0.1))
    learner = maml.MAML(network, inner_lr=0.1)
    with torch.no_grad():
        fast = learner.adapt(*made()[0][:2])
    new = {name: tensor + 1 for name, tensor in learner.state_dict().items()}
    inside.clear()
    thread = threading.Thread(target=fast, args=made()[0][2:3])
    thread.start(), inside.wait(), learner.load_state_dict(new), thread.join()
    torch.testing.assert_close(dict(learner.state_dict()), new)


class Slow(nn.Linear):
    """A layer that another thread has time to look at while a task's weights are in it."""

    inside, own = threading.Event(), torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.equal(self.weight, self.own):
            self.inside.set()
            time.sleep(0.05)
        return super().forward(x.flatten(1))


def test_a_copy_waits_for_a_call_in_another_thread() -> None:
    torch.set_num_threads(1)  # more threads would call copies
    layer = Slow(16, 3).double()
    Slow.own = layer.weight.detach().clone()
    learner = maml.MAML(layer, inner_lr=0.1, batching="tasks")
    learner(made())
    for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        Slow.inside.clear()
        thread = threading.Thread(target=learner, args=[made()])
        thread.start(), Slow.inside.wait()
        found = copied(learner)
        thread.join()
        torch.testing.assert_close(dict(found.state_dict()), dict(learner.state_dict()))


def test_threads_have_the_settings_of_the_caller() -> None:
    setting, me = contextvars.ContextVar[int]("setting"), threading.get_ident()
    setting.set(2), torch.set_num_threads(2)

    def found(owner: nn.Module) -> list[tuple[bool, int]]:
        here = lambda *_: (threading.get_ident() == me, setting.get())  # noqa: E731
        return [*spread(owner, here, range(2))]

    assert found(nn.Linear(1, 1)) == [(False, 2)] * 2
    assert found(nn.Linear(1, 1, device="meta")) == [(True, 2)] * 2
    with torch.device("meta"):
        assert found(nn.Linear(1, 1, device="cpu")) == [(True, 2)] * 2


def test_a_hook_keeps_for_the_loss_what_it_saw() -> None:
    """Threads would share the list, so one thread computes."""
    network, saw = dense(), list[Tensor]()
    network[2].register_forward_hook(lambda module, inputs, output: saw.append(output))
    network[3].register_forward_hook(lambda module, inputs, output: time.sleep(1e-3))

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) + saw.pop().square().mean()

    def gradient(batching: Any) -> Any:
        learner = maml.MAML(network, loss=loss, batching=batching)
        return torch.autograd.grad(learner(made((6,) * 8)), [*network.parameters()])

    torch.set_num_threads(2)
    expected = gradient("vmap")
    torch.testing.assert_close(gradient("tasks"), expected, rtol=1e-9, atol=1e-12)
    network[2]._forward_hooks.clear()
    network[2].register_forward_hook(functools.partial(lambda to, *given: to.append(given[2]), saw))
    torch.testing.assert_close(gradient("tasks"), expected, rtol=1e-9, atol=1e-12)
