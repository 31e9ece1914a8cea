"""The blocks of a `Conv4` as one differentiable operation, which compiled kernels compute.

Autograd and ``torch.func`` treat `features` as any operation of torch, under any head and loss. The
kernels compute its value, its derivative by the weights, and in a plain backward pass the
derivative of that derivative. Torch's own operations compute all other derivatives: by images, by
statistics, or of a higher order.

A tensor of B tasks has a leading dimension B; a shared tensor has none. So the same function serves
one task and many.

Shape legend: B tasks, E examples, C H W, F filters, L blocks, n features.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from maml.kernels import library
from maml.kernels.convnet import Shape, convnet
from maml.networks.tasks import Tensors, batched, n_tasks_of, of_each_task, of_tasks
from maml.ops.checkpoint import inside

_IMAGES, _GIVEN, _FEATURES, _ROW = 4, 3, 2, 1
"""How many dimensions one task's images, statistics, features and kept maps have."""


class Stack:
    """A stack of blocks; each has a convolution ``[F, C, 3, 3]``, bias, scale and shift ``[F]``."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.passes = shape, convnet(shape)
        self.ranks = [4, 1, 1, 1] * shape.layers
        self.biases = range(1, 4 * shape.layers, 4)
        self.others = [i for i in range(4 * shape.layers) if i not in self.biases]

    def of_passes(self, weights: Tensors) -> list[Any]:
        """Return the weights that the kernels read: all but the biases."""
        return [weights[i] for i in self.others]

    def plain(self, x: Tensor, given: Tensor | None, *weights: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one task by torch: see `features`."""
        shape, used = self.shape, []
        for i in range(shape.layers):
            weight, bias, scale, shift = weights[4 * i : 4 * i + 4]
            x = F.conv2d(x, weight, bias, 1 if shape.pool else 2, padding=1)
            if given is None:
                variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
            else:
                mean, variance = given[i]
            scale = scale * torch.rsqrt(variance + variance.new_full((), shape.eps))
            x = x * scale[:, None, None] + (shift - mean * scale)[:, None, None]
            x = F.leaky_relu(x, shape.leak) if shape.leak else F.relu(x)
            x = F.max_pool2d(x, 2) if shape.pool else x
            used.append(torch.stack([mean, variance]))
        return x.mean(dim=(2, 3)) if shape.mean else x.flatten(1), torch.stack(used)


stack_of = functools.cache(Stack)


def features(
    stack: Stack, x: Tensor, given: Tensor | None, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return features ``[E, n]``, and the mean and biased variance used, ``[L, 2, F]``."""
    inputs, keeps = (x, given, *weights), torch.is_grad_enabled()
    known: dict[Any, Any] | None = None if inside() else getattr(_memory, "known", None)
    key = None if known is None else (stack, keeps, *map(_identity, inputs))
    if known is not None and key in known:
        _, *results = known[key]
        # A tensor of a transform that has ended is unwrapped for the transforms around it.
        found, used = map(torch._C._functorch.unwrap_if_dead, results)
        return found, used
    found, used, *_ = _Features.apply(stack, keeps, *inputs)
    if known is not None:
        # Keep the inputs, too: an id is unique only as long as its tensor lives.
        known[key] = inputs, found, used
        if len(known) > _REMEMBERED:
            del known[next(iter(known))]
    return found, used


def _identity(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.requires_grad


_memory = threading.local()
_REMEMBERED = 4
"""How many results are remembered: support and query set, each with own or with other statistics.
When the weights move, no remembered result is of use."""


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Compute features only once in this context for the same images and the same weights.

    So an inner loop that moves only the output layer takes one pass forward through the blocks, and
    one back. In a block of a checkpoint, results are neither remembered nor reused.
    """
    before = getattr(_memory, "known", None)
    _memory.known = {}
    try:
        yield
    finally:
        _memory.known = before


def is_stack(node: Any) -> bool:
    """Return whether a node of autograd's graph belongs to `features`."""
    return isinstance(node, _Features._backward_cls)


class _Features(Function):
    """(images, statistics, weights) → features, statistics used; ``beside``; kept maps.

    ``beside`` holds only zeros. `_Pull` takes it in place of the maps between the layers: its
    cotangent carries the derivative of `_Pull` by these maps to this backward pass.
    """

    @staticmethod
    def forward(
        stack: Stack, keeps: bool, x: Tensor, given: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        passes, own = stack.passes, stack.of_passes(weights)
        n_tasks = n_tasks_of((x, given, *weights), (_IMAGES, _GIVEN, *stack.ranks))
        images = of_tasks(x, _IMAGES, n_tasks)
        # The kernels compute without biases.
        biases = torch.stack(torch.broadcast_tensors(*weights[1::4]), -2)
        if given is not None:
            given = of_tasks(given, _GIVEN, n_tasks).clone()
            given[..., 0, :] -= biases
        if keeps and given is None:
            found, used, kept = passes.features(own, images)
        else:
            found, used = passes.outputs(own, images, given)
            kept = found.new_empty(len(found), 0)
        used[..., 0, :] += biases
        beside = found.new_zeros(()).expand(
            len(found), passes.n_beside(found.dtype, images.shape[1])
        )
        if n_tasks is None:
            return found[0], used[0], beside[0], kept[0]
        return found, used, beside, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.stack, _, x, given, *weights = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[3])
        ctx.save_for_backward(x, given, *output[2:], *weights)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        stack, (x, given, beside, kept, *weights) = ctx.stack, ctx.saved_tensors
        cotangent, of_used, of_beside, _ = cotangents
        found: list[Tensor | None] = [None] * (2 + len(weights))
        plainly = of_used is not None or not kept.shape[-1] or any(ctx.needs_input_grad[2:4])
        if plainly and not (cotangent is None and of_used is None):
            inputs, ranks = (x, given, *weights), (_IMAGES, _GIVEN, *stack.ranks)
            function = of_each_task(stack.plain, ranks)
            found = _vjp(function, inputs, (cotangent, of_used))
            cotangent = None
        if cotangent is None and of_beside is None:
            return None, None, *found
        if cotangent is None:
            size = *kept.shape[:-1], x.shape[-4], stack.passes.n_features
            cotangent = kept.new_zeros(size)
        if of_beside is None and _may_go_on():
            gradients = _Pull.apply(stack, False, cotangent, x, beside, kept, *weights)[:-1]
        else:
            gradients, _ = _pulled(stack, False, cotangent, of_beside, kept, weights, again=False)
        if plainly:
            gradients = [g + f for g, f in zip(gradients, found[2:], strict=True)]
        return None, None, *found[:2], *gradients

    @staticmethod
    def vmap(info: Any, in_dims: Any, stack: Stack, keeps: bool, *inputs: Any) -> Any:
        def of_inputs(_: bool, *own: Any) -> Any:
            return _Features.apply(stack, keeps, *own)

        return batched(of_inputs, info, in_dims[2:], inputs, (_IMAGES, _GIVEN, *stack.ranks))


class _Pull(Function):
    """(cotangent, images, ``beside``, kept maps, weights) → gradient by each weight; kept maps.

    The gradient by a weight is summed over the tasks that share the weight, unless ``of_each`` is
    set. Only torch's own operations read the images.
    """

    @staticmethod
    def forward(
        stack: Stack, of_each: bool, cotangent: Tensor, x: Tensor, beside: Tensor, kept: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        found, back = _pulled(stack, of_each, cotangent, None, kept, weights, again=True)
        return *found, back

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.stack, ctx.of_each, cotangent, x, _, kept, *weights = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(cotangent, x, kept, output[-1], *weights)

    @staticmethod
    def backward(ctx: Any, *vs: Tensor | None) -> Any:
        stack, (cotangent, x, kept, back, *weights) = ctx.stack, ctx.saved_tensors
        vs = vs[:-1]
        if all(v is None for v in stack.of_passes(vs)):
            return (None,) * len(ctx.needs_input_grad)
        if _may_go_on() or ctx.needs_input_grad[3]:
            function = functools.partial(_plain_pull, stack, ctx.of_each)
            by_cotangent, by_x, *found = _vjp(function, (cotangent, x, *weights), vs)
            return None, None, by_cotangent, by_x, None, None, *found
        n_tasks = len(kept) if kept.dim() > _ROW else None
        own = stack.of_passes(weights)
        v = [
            torch.zeros_like(weight) if v is None else v
            for v, weight in zip(stack.of_passes(vs), own, strict=True)
        ]
        kept, back = of_tasks(kept, _ROW, None), of_tasks(back, _ROW, None)
        total = n_tasks is not None and n_tasks_of(weights, stack.ranks) is None
        moved, beside, direct = stack.passes.along(
            own, kept, back, v, cotangent.shape[-2], total=total
        )
        if n_tasks is None:
            moved, beside = moved[0], beside[0]
        found = [None] * len(weights)
        for i, part in zip(stack.others, direct or (), strict=bool(direct)):
            found[i] = part
        return None, None, moved, None, beside, None, *found

    @staticmethod
    def vmap(info: Any, in_dims: Any, stack: Stack, of_each: bool, *inputs: Any) -> Any:
        def of_inputs(again: bool, *own: Any) -> Any:
            return _Pull.apply(stack, of_each or not again, *own)

        ranks = (_FEATURES, _IMAGES, _ROW, _ROW, *stack.ranks)
        shared = in_dims[5] is None  # the kernels read one row of kept maps for each cotangent
        return batched(of_inputs, info, in_dims[2:], inputs, ranks, singly=shared)


def _pulled(
    stack: Stack, of_each: bool, cotangent: Tensor, beside: Tensor | None, kept: Tensor,
    weights: Sequence[Tensor], *, again: bool,
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """Return the gradient by each weight as `_Pull` does, and kept maps or None."""
    n_tasks = len(kept) if kept.dim() > _ROW else None
    total = n_tasks is not None and not of_each and n_tasks_of(weights, stack.ranks) is None
    found, back = stack.passes.pull_back(
        stack.of_passes(weights),
        of_tasks(kept, _ROW, None),
        of_tasks(cotangent, _FEATURES, n_tasks),
        None if beside is None else of_tasks(beside, _ROW, None),
        total=total,
        again=again,
    )
    for i in stack.biases:  # zero, because the norm subtracts biases; the size is the scale's
        found.insert(i, torch.zeros_like(found[i]))
    gradients = []
    for gradient, weight, rank in zip(found, weights, stack.ranks, strict=True):
        if n_tasks is None:
            gradient = gradient[0]
        elif not of_each and gradient.dim() > rank == weight.dim():
            gradient = gradient.sum(0)
        gradients.append(gradient)
    return gradients, back[0] if n_tasks is None and back is not None else back


def _may_go_on() -> bool:
    """Return whether the current computation may be differentiated again."""
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()


# ---- by torch ------------------------------------------------------------------------------------


def _plain_pull(
    stack: Stack, of_each: bool, cotangent: Tensor, x: Tensor, *weights: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of `_Pull`, computed by torch, without kept maps."""

    def pull(cotangent: Tensor, x: Tensor, *weights: Tensor) -> Any:
        function = of_each_task(stack.plain, (_IMAGES, _GIVEN, *stack.ranks))
        _, pull_back, *_ = torch.func.vjp(lambda *own: function(x, None, *own)[0], *weights)
        return pull_back(cotangent)

    if not of_each:
        return pull(cotangent, x, *weights)
    return of_each_task(pull, (_FEATURES, _IMAGES, *stack.ranks))(cotangent, x, *weights)


def _vjp(
    function: Callable[..., tuple[Tensor, ...]], inputs: Tensors, cotangents: Tensors
) -> list[Tensor | None]:
    """Return the derivative by each input that is not None; a None cotangent means zero."""
    places = range(len(inputs))
    there = {i: inputs[i] for i in places if inputs[i] is not None}
    outputs, pull_back, *_ = torch.func.vjp(lambda own: function(*map(own.get, places)), there)
    whole = tuple(
        torch.zeros_like(output) if cotangent is None else cotangent
        for output, cotangent in zip(outputs, cotangents, strict=True)
    )
    (found,) = pull_back(whole)
    return [found.get(i) for i in places]


# ---- one tiny task by kernels and torch, before a process uses the kernels -----------------------

CASES = ((torch.float64, False, 1e-10), (torch.float32, True, 1e-3))
"""Dtype, whether the blocks pool, and tolerance of a difference relative to the norm."""


@functools.cache
def fault() -> str | None:
    """Return what the compiled kernels compute wrongly, and print it on stderr; or None."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other longer than compute
    try:
        # In a new thread, where the first caller's modes and transforms are not active.
        with ThreadPoolExecutor(1) as alone:
            for dtype, pool, tolerance in CASES:
                for what, found, expected in alone.submit(results, dtype, pool).result():
                    off = float((found - expected).norm() / expected.norm())
                    if not off <= tolerance:  # also if it is NaN
                        wrong = (
                            f"the compiled kernels are wrong here: their {what} is off by {off:.1e}"
                        )
                        print(f"warning: {wrong} ({dtype}); computing by torch", file=sys.stderr)
                        return wrong
    finally:
        torch.set_num_threads(threads)
    return None


def results(dtype: torch.dtype, pool: bool) -> list[tuple[str, Tensor, Tensor]]:
    """Return (name, the kernels' result, torch's) for a task of six images."""
    lanes = library.lanes(dtype.itemsize)
    assert lanes is not None
    stack = Stack(Shape((1, 16, 16), lanes, 4, pool, True, 1e-3, 0.0))
    chance = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, dtype=dtype, device="cpu", generator=chance)
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
