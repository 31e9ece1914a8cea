"""One tiny task by the compiled kernels and by torch, before they serve a process."""

import functools
import sys

import torch
from torch import Tensor

from maml.kernels import library
from maml.kernels.convnet import Shape
from maml.networks.stack import Stack, features

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
            for what, found, expected in results(dtype, pool):
                off = float((found - expected).norm() / expected.norm())
                if not off <= tolerance:  # also where it is not a number
                    wrong = f"the compiled kernels are wrong here: their {what} is off by {off:.1e}"
                    print(f"warning: {wrong} ({dtype}); computing by torch", file=sys.stderr)
                    return wrong
    finally:
        torch.set_num_threads(threads)
    return None


def results(dtype: torch.dtype, pool: bool) -> list[tuple[str, Tensor, Tensor]]:
    """Return (name, the kernels' result, torch's) for a task of six images."""
    lanes = library.lanes(dtype.itemsize)
    assert lanes is not None
    # A run's own draws stay as they are, whatever mode it is in.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(1)
        stack = Stack(Shape((1, 16, 16), lanes, 4, pool, True, 1e-3, 0.0))
        draw = functools.partial(torch.randn, dtype=dtype, device="cpu")
        sizes = [
            (lanes, 1 if i < 4 else lanes, 3, 3) if rank == 4 else (lanes,)
            for i, rank in enumerate(stack.ranks)
        ]
        x, weights = draw(6, 1, 16, 16), [draw(s).mul_(0.3).requires_grad_() for s in sizes]
        vector = [draw(size) for size in sizes]
        found = []
        for outputs in (features(stack, x, None, weights)[0], stack.plain(x, None, *weights)[0]):
            loss = outputs.square().mean().sqrt()
            gradient = torch.autograd.grad(loss, weights, create_graph=True)
            product = torch.autograd.grad(gradient, weights, vector, materialize_grads=True)
            parts = map(stack.of_passes, (gradient, product))
            found.append([torch.cat([p.detach().flatten() for p in each]) for each in parts])
    kernels, by_torch = found
    names = ("gradient", "product with the Hessian")
    return list(zip(names, kernels, by_torch, strict=True))
