"""One tiny task by the compiled kernels and by torch, before they serve a process."""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from maml.kernels import library
from maml.kernels.convnet import ALL, ConvNetLoss
from maml.networks.conv4 import Conv4

CASES = ((torch.float64, False, 1e-10), (torch.float32, True, 1e-3))
"""Type of numbers, whether the blocks pool, tolerance of a difference relative to the norm."""


@functools.cache
def fault() -> str | None:
    """Return what the compiled kernels compute wrongly, which is also said on stderr; or None.

    It is asked once in a process, and takes some 50 ms. There must be kernels.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other for longer than they compute
    try:
        for dtype, pool, tolerance in CASES:
            for what, found, expected in _results(dtype, pool):
                off = float((found - expected).norm() / expected.norm())
                if not off <= tolerance:  # also where it is not a number
                    wrong = f"the compiled kernels are wrong here: their {what} is off by {off:.1e}"
                    print(f"warning: {wrong} ({dtype}); computing by torch", file=sys.stderr)
                    return wrong
    finally:
        torch.set_num_threads(threads)
    return None


def _results(dtype: torch.dtype, pool: bool) -> list[tuple[str, Tensor, Tensor]]:
    """Return (name, the kernels' result, torch's) for a task of six images of three classes."""
    lanes = library.lanes(dtype.itemsize)
    assert lanes is not None
    # A run's own draws stay as they are, whatever mode it is in.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(1)
        with torch.device("meta"):
            network = Conv4((1, 16, 16), 3, filters=lanes, pool=pool)
        draw = functools.partial(torch.randn, dtype=dtype, device="cpu")
        x, y = draw(6, 1, 16, 16), torch.arange(6, device="cpu") % 3
        weights = {
            name: draw(p.shape).mul_(0.3).requires_grad_() for name, p in network.named_parameters()
        }
        vector = {name: draw(w.shape) for name, w in weights.items()}
        outputs, _ = torch.func.functional_call(network, weights, (x, None))
        at = list(weights.values())
        loss = F.cross_entropy(outputs, y)
        gradient = torch.autograd.grad(loss, at, create_graph=True)
        product = torch.autograd.grad(gradient, at, list(vector.values()), materialize_grads=True)
    compiled = ConvNetLoss(network)
    with torch.no_grad():
        here, direction = ({ALL: compiled.enter(of)[ALL][None]} for of in (weights, vector))
        expected = [
            compiled.enter(dict(zip(weights, of, strict=True)))[ALL] for of in (gradient, product)
        ]
        found = compiled.gradient(here, x[None], y[None], again=True)
        again = compiled.hessian_vector(found.point, direction, total=False)
    return [
        ("gradient", found.gradients[ALL][0], expected[0]),
        ("product with the Hessian", again[ALL][0], expected[1]),
    ]
