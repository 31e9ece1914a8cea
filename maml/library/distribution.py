"""Distribute a user's own loop with torchrun: split the tasks and average the gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets.tasks import Task
from maml.errors import UserError, first_difference
from maml.learners import Learner
from maml.library.agreement import OF_TORCH, forms, held, parts
from maml.params import ParamLayout, Params, in_reals

if TYPE_CHECKING:  # `joining` imports it, if a process is one of many
    from maml.processes.collectives import Collectives

ROUNDING = 1e-4
"""The sums of the parameters may differ by this part of their norm: hosts may round differently."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers to look at numbers as, by their size in bytes."""
_WIDTH = 4096
DOING = "make", "call"
SAME = "under maml.distributed(), make the same meta-learner on every rank"

group: Collectives | None = None
"""All processes, once `maml.library.joining.distributed` has joined the others."""
calls = 0
"""The calls of meta-learners that this process has finished."""


def _of_all(doing: int, made_of: dict[str, str], numbers: list[int]) -> Tensor:
    """Return the five numbers of all processes ``[ranks, 5]``, which must do the same now.

    ``doing``: an index of `DOING`.

    Raises:
        UserError: on every rank, if a process does something else, or its meta-learner is of other
            parts than ``made_of``.
    """
    assert group is not None
    digest = zlib.crc32(repr(made_of).encode())
    of_all = group.of_all([doing, digest, *numbers])
    for rank, (does, has, *_) in enumerate(of_all.tolist()):
        if does != of_all[0, 0]:
            raise UserError(
                f"rank {rank} begins to {DOING[does]} a meta-learner, and rank 0 to "
                f"{DOING[int(of_all[0, 0])]} one: under maml.distributed(), every rank must make "
                "and call the same ones, in the same order"
            )
        if has != of_all[0, 1]:
            here, there = (group.from_rank(source, made_of) for source in (0, rank))
            order = f"the parts of rank {rank} are in another order than those of rank 0"
            found = first_difference(here, there, rank) or order
            raise UserError(f"{found}: {SAME}")
    return of_all[:, 2:]


@torch.no_grad()
def same_everywhere(made_of: Callable[[], dict[str, str]], learner: Learner, loss: Any) -> None:
    """Give all processes what rank 0's modules hold: tensors, and attributes of plain values.

    Raises:
        UserError: on every rank, if a process has another meta-learner, or other tensors.
    """
    if group is None:
        return
    tensors = held(learner, loss)
    _of_all(0, made_of() | forms(tensors), [0] * 5)
    modules = [part for _, part in parts(learner, loss)]
    for part, values in zip(modules, group.from_rank(0, [*map(_plain, modules)]), strict=True):
        vars(part).update(values)
    for tensor in {id(t): t for t in tensors.values()}.values():
        # A clone, because a view's whole storage is sent.
        of_first = group.from_rank(0, tensor.data.cpu().clone() if dist.get_rank() == 0 else None)
        try:
            tensor.copy_(of_first)
        except RuntimeError:  # made by `expand`, say
            tensor.data = of_first.to(tensor.device)


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes that hold numbers, text and arrays alone."""
    kinds = int, float, complex, str, bytes, np.ndarray, np.generic
    return {
        name: value
        for name, value in vars(module).items()
        if name not in OF_TORCH and all(isinstance(v, kinds) for v in pytree.tree_leaves(value))
    }


def part(n: int) -> range:
    """Return this process's share of the indices 0 … ``n`` − 1."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if group else (1, 0)
    return range(n * rank // size, n * (rank + 1) // size)


def mean(losses: Tensor, sums: Params) -> tuple[Tensor, Params]:
    """Average the losses ``[B]`` and the summed gradients over the tasks of all processes."""
    global calls
    count = losses.new_full((1,), len(losses))
    layout = ParamLayout(sums)
    flat = torch.cat([count, losses.sum()[None], *layout.parts(sums)])
    if group:
        if not calls:  # now it is known where the parameters are
            group.meet_on(flat.device)
        flat = group.together(dist.all_reduce, flat)
        calls += 1
    _, total, gradients = (flat / flat[0]).split([1, 1, layout.n_params])
    return total[0], layout.to_params(gradients)


def draw_number() -> int:
    """Draw a number of 62 bits from torch's global generator."""
    return int(torch.randint(2**62, (), device="cpu"))


def _digest(tasks: list[Task], device: torch.device) -> Tensor:
    """Return a checksum ``[1]`` int64 of tasks, on ``device``: of forms, values and their order."""
    words, seen = dict[torch.dtype, list[Tensor]](), 0
    for path, tensor in pytree.tree_flatten_with_path(tasks)[0]:
        form = f"{pytree.keystr(path)} {tensor.dtype} {[*tensor.shape]}"
        seen = zlib.crc32(form.encode(), seen)
        whole = in_reals(tensor.detach()).reshape(-1)
        if whole.is_cpu:  # many times as quick as sums
            seen = zlib.crc32(whole.view(torch.uint8).numpy().data, seen)
            continue
        whole = whole.view(_WORDS[whole.element_size()])
        words.setdefault(whole.dtype, []).append(whole)
    found = torch.zeros(1, dtype=torch.int64, device=device) + seen
    if words:
        sums = [_sum_in_order(torch.cat(some)) for some in words.values()]
        found += _sum_in_order(torch.stack(sums)).to(device)
    return found


def _sum_in_order(words: Tensor) -> Tensor:
    """Return a number, int64, of integers ``[n]``; it differs in another order."""
    rows = F.pad(words, (0, -len(words) % _WIDTH)).view(-1, _WIDTH)
    of_rows = (rows * _weights(_WIDTH, words.device)).sum(1)
    return (of_rows * _weights(len(rows), words.device)).sum()


def _weights(n: int, device: torch.device) -> Tensor:
    """Return ``n`` numbers of all 64 bits, without a pattern that sums of images may share."""
    mixed = torch.arange(1, n + 1, device=device) * 0x1E3779B97F4A7C15
    return (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9


def same_number(tasks: list[Task], params: Params, made_of: Callable[[], dict[str, str]]) -> int:
    """Return the next number of torch's global generator; all processes get that of rank 0.

    It is not drawn: see `draw_number`.

    Raises:
        UserError: on every rank, if the processes have other tasks, in values, sizes or order,
            other parameters, or another meta-learner.
    """
    before = torch.get_rng_state()
    drawn = draw_number()
    torch.set_rng_state(before)
    if group is None:
        return drawn
    flat = torch.cat([p.detach().reshape(-1).double() for p in params.values()])
    # Weights, because the sum alone sees no order.
    weighted = flat @ torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
    size = torch.stack([weighted, flat.norm()]).view(torch.int64)
    numbers = torch.cat([_digest(tasks, flat.device), size]).tolist()  # one wait for a device
    kind = zlib.crc32(flat.device.type.encode())  # each has a checksum of its own
    of_all = _of_all(1, made_of(), [drawn, *numbers, kind])
    sizes = of_all[:, 2:4].contiguous().view(torch.float64)
    near = ROUNDING * float(sizes[0, 1].nan_to_num())
    for rank, there in enumerate(sizes[:, 0]):
        if not torch.isclose(sizes[0, 0], there, rtol=0, atol=near, equal_nan=True):
            raise UserError(
                f"the parameters of rank {rank} are not those of rank 0: call maml.distributed() "
                "before maml.MAML(…), which gives all processes rank 0's; later, load states and "
                "take an optimizer's steps on every rank alike"
            )
        if of_all[rank, 1] != of_all[0, 1] and of_all[rank, 4] == of_all[0, 4]:
            raise UserError(
                f"the tasks of rank {rank} are not those of rank 0: under maml.distributed(), give "
                "every process the same tasks in the same order, by the same seed and without a "
                "DistributedSampler; each process computes its part of them"
            )
    return int(of_all[0, 0])
