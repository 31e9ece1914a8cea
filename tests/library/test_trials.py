"""A trial of both ways, and a call, leave what is the user's and torch's as it was."""

import collections
import sys
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maml
from tests.library.own_networks import by_loop, dense, made, stacked

Keep = Callable[[Tensor], None]
TASKS, STEPS, LR = made((6, 6, 6, 6)), 2, 0.1
OTHERS = made((7, 7, 7, 7))
"""Tasks of another size, for which a cache is empty."""


def in_a_dict() -> tuple[Keep, Callable[[], Tensor]]:
    kept = {"mean": torch.zeros(())}
    return lambda m: kept.update(mean=0.9 * kept["mean"] + m), lambda: kept["mean"]


def in_a_list() -> tuple[Keep, Callable[[], Tensor]]:
    kept = list[Tensor]()
    return kept.append, lambda: torch.stack(kept)


def in_a_deque() -> tuple[Keep, Callable[[], Tensor]]:
    kept = collections.deque[Tensor](maxlen=5)
    return kept.append, lambda: torch.stack([*kept])


def in_an_object() -> tuple[Keep, Callable[[], Tensor]]:
    kept = types.SimpleNamespace(mean=torch.zeros(()))
    return lambda m: setattr(kept, "mean", kept.mean + m), lambda: kept.mean


def in_slots() -> tuple[Keep, Callable[[], Tensor]]:
    class Kept:
        __slots__ = ("mean",)

    kept = Kept()
    return lambda m: setattr(kept, "mean", m), lambda: kept.mean  # type: ignore[attr-defined]


def in_a_cell() -> tuple[Keep, Callable[[], Tensor]]:
    mean = torch.zeros(())

    def keep(m: Tensor) -> None:
        nonlocal mean
        mean = mean + m

    return keep, lambda: mean


def in_a_global() -> tuple[Keep, Callable[[], Tensor]]:
    def keep(m: Tensor) -> None:
        global _mean
        _mean = m

    return keep, lambda: _mean


_mean = torch.zeros(())


def in_place() -> tuple[Keep, Callable[[], Tensor]]:
    mean = torch.zeros((), dtype=torch.float64)
    return lambda m: mean.mul_(0.9).add_(m) and None, lambda: mean


PLACES = [
    in_a_dict,
    in_a_list,
    in_a_deque,
    in_an_object,
    in_slots,
    in_a_cell,
    in_a_global,
    in_place,
]


class Kept(nn.Module):
    """A loss that is a module, or a layer, which keeps the mean of its input."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.keep(x.detach().abs().mean())
        return x if y is None else F.cross_entropy(x, y)


def parts(by: str, keep: Keep) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    network = dense(*([Kept(keep)] if by == "layer" else []))
    if by == "hook":
        network[1].register_forward_hook(lambda _, x, outputs: keep(outputs.detach().mean()))
    return network, Kept(keep) if by == "loss" else None


@pytest.mark.parametrize("batching", ["auto", "tasks"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("by", ["layer", "hook", "loss"])
def test_what_is_kept_is_a_plain_loop_s(by: str, place: Any, batching: Any) -> None:
    keep, kept = place()
    network, loss = parts(by, keep)
    before, found = [], []
    for _ in range(2):
        before.append(by_loop(network, TASKS, STEPS, LR, loss or F.cross_entropy)[0])
        found.append(kept().clone())
    keep, kept = place()
    network, loss = parts(by, keep)
    learner = maml.MAML(network, inner_lr=LR, inner_steps=STEPS, loss=loss, batching=batching)
    for expected, last in zip(before, found, strict=True):
        torch.testing.assert_close(learner(TASKS).detach(), expected)
        if by != "layer":  # the learner calls a copy of the module
            torch.testing.assert_close(kept(), last)
    learner.adapt(*TASKS[0][:2]), learner.evaluate(TASKS)
    assert kept().isfinite().all()


def stating(network: nn.Module, loss: Any) -> Callable[[Any], maml.Problem]:
    def of(part: str) -> Any:
        def of_part(params: Any, task: Any, step: int) -> tuple[Tensor, Tensor]:
            outputs = torch.func.functional_call(network, params, (task[f"{part}x"],))
            return loss(outputs, task[f"{part}y"]), outputs

        return of_part

    return lambda params: maml.Problem(params, of("s"), of("q"), lr=LR, steps=STEPS)


def named(tasks: Any, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    sx, sy, qx, qy = stacked(tasks)
    return {"sx": sx.to(dtype), "sy": sy, "qx": qx.to(dtype), "qy": qy}


@pytest.mark.parametrize("place", PLACES)
def test_what_the_losses_of_a_problem_keep_is_of_the_last_task(place: Any) -> None:
    keep, kept = place()
    network, _ = parts("", keep)

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(outputs, y)
        keep(value.detach())
        return value

    params, expected = dict(network.named_parameters()), by_loop(network, TASKS, STEPS, LR)[0]
    for _ in range(2):
        found = maml.meta_gradient(stating(network, loss), params, named(TASKS))
        torch.testing.assert_close(found.losses.mean(), expected)
        if place in (in_a_list, in_a_deque):
            assert kept()[-1] == found.losses[-1]
        assert kept().isfinite().all()


class Table(nn.Module):
    """A layer that fills a cache, for each size, in the dtype of the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.linspace(0.5, 1, len(x))[:, None].to(x)
        return x * self.tables[len(x)]


def test_a_cache_has_the_dtype_at_hand_and_then_tasks_are_batched() -> None:
    network = dense(Table()).float()
    params = dict(network.named_parameters())
    state = stating(network, F.cross_entropy)
    for tasks in (TASKS, OTHERS):
        ways = []
        for _ in range(3):
            found = maml.meta_gradient(state, params, named(tasks, torch.float32))
            ways.append(found.losses)
            x = tasks[0][0].float()
            assert network(x).dtype == torch.float32  # the user's own
        torch.testing.assert_close(ways[0], ways[1])
    assert {table.dtype for table in network[2].tables.values()} == {torch.float32}
    learner = maml.MAML(network.double(), inner_lr=LR, inner_steps=STEPS)
    network[2].tables.clear()
    assert len({float(learner(TASKS).detach().round(decimals=9)) for _ in range(3)}) == 1
    assert learner._plans.known[True].batching == "vmap"


@pytest.mark.parametrize("batching", ["auto", "vmap", "tasks"])
def test_where_the_way_is_given_there_is_no_trial(batching: Any) -> None:
    """Calls are counted by what a trial cannot put back, and once more by what it can."""
    counted, seen = iter(range(10**9)), list[int]()

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        next(counted)
        if batching != "vmap":
            seen.append(len(y))
        return F.cross_entropy(outputs, y)

    flags: Any = {"inner_lr": LR, "inner_steps": STEPS, "batching": batching}
    learner = maml.MAML(dense(), loss=loss, compile=False, **flags)  # compiling would call it, too
    calls = []
    for _ in range(2):
        first = next(counted)
        learner(TASKS)
        calls.append(next(counted) - first - 1)
    assert len(seen) == (0 if batching == "vmap" else 2 * len(TASKS) * (STEPS + 1))
    # Does each loss read the parameters? For a batch, this is asked for its size, too.
    of_check = (STEPS + 1) * (2 if batching == "vmap" else 1)
    if batching == "auto":
        assert calls[0] > calls[1] + of_check
        network = dense()
        state, params = stating(network, loss), dict(network.named_parameters())
        for first in (next(counted) for _ in range(3)):
            seen.append(first)
            maml.meta_gradient(state, params, named(TASKS))
            calls.append(next(counted) - first - 1)
        assert calls[2] > calls[3] == calls[4]
    else:
        assert calls[0] == calls[1] + of_check


def test_there_is_no_trial_of_what_cannot_be_copied() -> None:
    lock, counted = threading.Lock(), iter(range(10**9))

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        with lock:
            next(counted)
        return F.cross_entropy(outputs, y)

    network = dense()
    learner = maml.MAML(network, inner_lr=LR, inner_steps=STEPS, loss=loss)
    torch.testing.assert_close(learner(TASKS).detach(), by_loop(network, TASKS, STEPS, LR)[0])
    assert next(counted) == (len(TASKS) + 1) * (STEPS + 1)  # and the check of what they read


class Making(OrderedDict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()  # fails for what is no function


def test_a_table_that_makes_its_values_is_not_asked_for_them() -> None:
    table = Making(one=1, other=lambda: 2.0)
    learner = maml.MAML(dense(), loss=lambda o, y: F.cross_entropy(o, y) * table["other"])
    assert learner(TASKS).isfinite()


def test_torch_s_warnings_of_vmap_stop_nothing() -> None:
    """Also in two threads, and the filters are the user's at each time after a call."""
    filters, n_filters, done = warnings.filters, len(warnings.filters), list[bool]()

    def trains() -> None:
        learner = maml.MAML(
            dense(), inner_lr=LR, order=1, loss=F.multi_margin_loss, batching="vmap"
        )
        for _ in range(5):
            learner(TASKS)
        done.append(True)

    with warnings.catch_warnings(action="error"):
        trains()
        threads = [threading.Thread(target=trains) for _ in range(2)]
        for step in (threading.Thread.start, threading.Thread.join):
            [step(thread) for thread in threads]
        with pytest.raises(UserWarning, match="performance drop"):
            labels = torch.zeros(3, 2, dtype=torch.int64)
            torch.func.vmap(F.multi_margin_loss)(torch.zeros(3, 2, 3), labels)
    assert len(done) == 3 and warnings.filters is filters and len(filters) == n_filters


UNTOUCHED = """
import gc, os, sys, warnings
import numpy, random, torch, torch.utils.checkpoint, torch.nn.utils.parametrizations, torch.func
import torch.utils.flop_counter, torch.autograd.forward_ad
from torch import nn
import torch.nn.functional as F

def of_torch():
    modules = {n: m for n, m in list(sys.modules.items()) if n.split(".")[0] == "torch"}
    found = {(n, a): id(v) for n, m in modules.items() for a, v in list(vars(m).items())}
    for name in ("_weight_norm", "_weight_norm_interface"):
        found["aten", name] = torch._C._dispatch_dump(f"aten::{name}")
    return found

def settings():
    flags = torch.backends.cuda
    return (
        [*warnings.filters], id(warnings.filters), torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), dict(os.environ),
        torch.get_default_device(), torch.backends.mkldnn.enabled, torch.is_autocast_enabled("cpu"),
        flags.flash_sdp_enabled(), flags.math_sdp_enabled(), flags.mem_efficient_sdp_enabled(),
        torch.autograd.forward_ad._current_level, torch.get_rng_state().tolist(),
        str(numpy.random.get_state()), random.getstate(), sys.getrecursionlimit(),
    )

def holds(value):
    parts = {f"{n}.{a}": v for n, m in value.named_modules() for a, v in vars(m).items()}
    inner = {(n, k): id(v) for n, d in parts.items() if isinstance(d, dict) for k, v in d.items()}
    numbers = {n: t.tolist() for n, t in value.state_dict().items()}
    return {n: id(v) for n, v in parts.items() if not isinstance(v, int)}, inner, numbers

torch.manual_seed(0)
class Loss(nn.Module):
    def forward(self, outputs, y):
        return F.cross_entropy(outputs, y)
body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = body
        self.head = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        self.register_buffer("scale", torch.ones(()))
    def forward(self, x):
        hidden = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
        return self.head(hidden) * self.scale
net, loss = Net(), Loss()
x, y = torch.randn(2, 6, 4), torch.arange(6).repeat(2, 1) % 3
p = {n: t.detach() for n, t in net.named_parameters()}
net(x[0]).sum().backward()  # torch imports parts of itself late
torch.func.vmap(torch.func.grad(lambda x: x.sum()))(x)
before = of_torch(), settings(), holds(net), holds(loss), {n: id(v) for n, v in globals().items()}
import maml
learner = maml.MAML(net, inner_lr=0.1, inner_steps=2, loss=loss)
value = learner((x, y, x, y))
value.backward()
fast = learner.adapt(x[0], y[0])
fast(x[1]).sum().backward()
learner.evaluate((x, y, x, y))
def of(params, task, step):
    outputs = torch.func.functional_call(net, params, (task["x"],))
    return loss(outputs, task["y"]), outputs
maml.meta_gradient(lambda m: maml.Problem(m, of, of, steps=2), p, {"x": x, "y": y})
after = of_torch(), settings(), holds(net), holds(loss), {n: id(v) for n, v in globals().items()}
for one, other in zip(before, after):
    names = one if isinstance(one, dict) else range(len(one))
    changed = [n for n in names if one[n] != other[n] and n not in ("before",)]
    assert not changed, changed
"""


def test_import_and_calls_leave_torch_and_the_user_s_own_as_they_were() -> None:
    launching = pytest.importorskip("tests.launching", reason="needs what trains")
    done = launching.run([sys.executable, "-W", "error::UserWarning", "-c", UNTOUCHED], timeout=300)
    assert done.returncode == 0, done.stderr
