"""Checks that need an RPC world, run in processes of their own by ``test_rpc.py``.

python -m tests.strategies.rpc_checks NAME… (under torchrun for more than one process)
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torchopt
from torch.distributed.rpc.internal import _internal_rpc_pickler

import maml.strategies.rpc as rpc_module
from maml.config import Config
from maml.config.presets import PRESETS
from maml.errors import WorkerLostError
from maml.params import Params
from maml.processes.program import run_program
from maml.processes.world import World
from maml.strategies.local import Local
from maml.strategies.reference import Reference
from maml.strategies.rpc import Rpc
from maml.worker import Worker

IDS = torch.arange(24)


def make_config(**changes: object) -> Config:
    changes = {"dtype": "float64", "timeout": 30.0, **changes}
    return dataclasses.replace(PRESETS["maml-glyphs-5way-1shot"], **changes)  # type: ignore[arg-type]


def make(**changes: object) -> Rpc:
    config = make_config(**changes)
    return Rpc(config, World.from_environment(), Worker(config, torch.device("cpu")))


def _square_of_first(module: torch.nn.Module) -> torch.Tensor:
    return next(iter(module._parameters.values())).square().sum()  # type: ignore[union-attr]


def parameter_is_detached() -> None:
    """An ``nn.Parameter`` sent over RPC loses its place in the graph; a plain tensor keeps it.

    If the first half stops holding, torch has changed and `Reference` may be simplified.
    """
    with make():
        linear = torch.nn.Linear(3, 2, bias=False)
        clone = torchopt.module_clone(linear, by="reference", detach_buffers=True)
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync(0, _square_of_first, args=(clone,))
            # Nothing fails, and nothing arrives.
            dist_autograd.backward(context, [loss])
            assert linear.weight not in dist_autograd.get_gradients(context)
        weight = linear.weight.detach().requires_grad_()
        clone._parameters["weight"] = weight  # type: ignore[assignment]
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync(0, _square_of_first, args=(clone,))
            dist_autograd.backward(context, [loss])
            gradient = dist_autograd.get_gradients(context)[weight]
        torch.testing.assert_close(gradient, 2 * weight.detach())


class Forgetful(Reference):
    """Sends the parameters outside the graph."""

    def to(self, meta_params: Params) -> torch.Tensor:
        leaf = super().to(meta_params)
        self.flat = leaf.detach()
        return leaf


def missing_gradient_is_refused() -> None:
    """A strategy whose calls carry parameters outside the graph must not step."""
    with make(partition="exclusive") as strategy:
        learner = strategy.worker.learner
        strategy._reference = Forgetful(learner, strategy.packing)
        try:
            strategy.meta_step(learner.meta_parameters(), IDS[:2])
        except WorkerLostError as error:
            assert "grad" in str(error), error
            return
        raise AssertionError("stepped without gradients")


def parameters_travel_as_one_tensor() -> None:
    """A reference is pickled as one tensor of P elements, and arrives as the same parameters."""
    with make() as strategy:
        params = strategy.worker.learner.meta_parameters()
        reference = strategy._reference
        leaf = reference.to(params)
        pickled, tensors = _internal_rpc_pickler.serialize(reference)
        assert [tensor.numel() for tensor in tensors] == [sum(p.numel() for p in params.values())]
        assert tensors[0].requires_grad and tensors[0].data_ptr() == leaf.data_ptr()
        # What else travels does not grow with the parameters: 450 kB of them here.
        assert len(pickled) < 10_000, len(pickled)
        learner, arrived = _internal_rpc_pickler.deserialize(pickled, tensors).resolve()
        assert learner is not strategy.worker.learner
        for found in (arrived, learner.meta_parameters()):
            assert list(found) == list(params)
            for name, tensor in found.items():
                assert torch.equal(tensor, params[name])


def concurrent_calls_do_not_mix() -> None:
    """8 calls at once in one process, each on its own module, equal the same tasks in turn."""
    torch.set_num_threads(8)
    with make(rpc_threads=16, partition="exclusive", inner_steps=2, threads=8) as strategy:
        params = strategy.worker.learner.meta_parameters()
        local = Local(strategy.config, strategy.world, strategy.worker)
        expected = local.meta_step(params, IDS)
        for _ in range(3):
            with counting(Worker, "meta_gradient") as most:
                share = strategy.meta_step(params, IDS)
            assert 4 < most[0] <= 8, most
            assert share.n_tasks == expected.n_tasks == len(IDS)
            torch.testing.assert_close(share.totals, expected.totals, rtol=0, atol=1e-9)
            for name, gradient in expected.gradients.items():
                torch.testing.assert_close(share.gradients[name], gradient, rtol=1e-9, atol=1e-10)
        rows = strategy.evaluate(params, "test", IDS)
        torch.testing.assert_close(rows, local.evaluate(params, "test", IDS))


def calls_in_flight_stay_below_threads() -> None:
    """Count the calls served at once; ``num_worker_threads`` is 4, one thread computes."""
    torch.set_num_threads(1)
    with make(rpc_threads=4, partition="exclusive", threads=1) as strategy:
        params = strategy.worker.learner.meta_parameters()
        with counting(rpc_module, "_outer_sums") as served, counting(Worker, "meta_gradient") as at:
            strategy.meta_step(params, IDS)
    assert 1 < served[0] < 4, served
    assert at[0] == 1, at


@contextmanager
def counting(owner: Any, name: str) -> Iterator[list[int]]:
    """Give the most calls of ``owner.name`` that ran at once."""
    function, lock, now, most = getattr(owner, name), threading.Lock(), 0, [0]

    def counted(*args: Any) -> Any:
        nonlocal now
        with lock:
            now += 1
            most[0] = max(most[0], now)
        try:
            return function(*args)
        finally:
            with lock:
                now -= 1

    setattr(owner, name, counted)
    try:
        yield most
    finally:
        setattr(owner, name, function)


def main(arguments: list[str]) -> None:
    for name in arguments:
        globals()[name]()
        print(f"{name}: holds", flush=True)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
