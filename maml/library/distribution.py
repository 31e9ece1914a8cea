"""Distribute a user's own loop with torchrun: split the tasks and average the gradients."""

import atexit
import os
import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets.tasks import Task
from maml.errors import UserError
from maml.params import ParamLayout, Params

OF_TORCH = vars(nn.Module()).keys()
ROUNDING = 1e-4
"""The sums of the parameters may differ by this part of their norm: hosts may round differently."""
_joined = False


def distributed() -> int:
    """Join the processes that torchrun has started, and return this process's rank.

    After this call, a meta-learner computes only its process's share of the tasks. The loss and the
    gradient are means over all tasks. So give every process the same tasks (others are refused),
    and do not change the rest of the loop. Without torchrun, this function only returns rank 0.
    """
    global _joined
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        atexit.register(_leave)  # else its threads may still run when the process ends
    if not _joined:
        on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // on_host))
    _joined = True
    return dist.get_rank()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@torch.no_grad()
def same_everywhere(*given: object) -> None:
    """Give all processes what rank 0's modules hold: tensors, and attributes of plain values."""
    modules = [part for each in given if isinstance(each, nn.Module) for part in each.modules()]
    if _joined:
        plain = [[_plain(part) for part in modules]]
        dist.broadcast_object_list(plain, 0)
        for part, values in zip(modules, plain[0], strict=True):
            vars(part).update(values)
    held = pytree.tree_leaves(list(map(vars, modules))) if _joined else []
    for tensor in {id(t): t for t in held if isinstance(t, Tensor)}.values():
        of_first = [tensor.data.cpu().clone()]  # a clone, because a view's whole storage is sent
        dist.broadcast_object_list(of_first, 0)
        try:
            tensor.copy_(of_first[0])
        except RuntimeError:  # made by `expand`, say
            tensor.data = of_first[0].to(tensor.device)


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
    size, rank = (dist.get_world_size(), dist.get_rank()) if _joined else (1, 0)
    return range(n * rank // size, n * (rank + 1) // size)


def mean(losses: Tensor, sums: Params) -> tuple[Tensor, Params]:
    """Average the losses ``[B]`` and the summed gradients over the tasks of all processes."""
    count = losses.new_full((1,), len(losses))
    layout = ParamLayout(sums)
    flat = torch.cat([count, losses.sum()[None], *layout.parts(sums)])
    if _joined:
        dist.all_reduce(flat)
    _, total, gradients = (flat / flat[0]).split([1, 1, layout.n_params])
    return total[0], layout.to_params(gradients)


def draw_number() -> Tensor:
    """Draw a number of 62 bits from torch's global generator."""
    return torch.randint(2**62, (), device="cpu")


def same_number(tasks: list[Task], params: Params) -> int:
    """Return the next number of torch's global generator; all processes get that of rank 0.

    One process does not draw it: see `draw_number`.

    Raises:
        UserError: on every rank, if the processes have other tasks, in values, sizes or order, or
            other parameters.
    """
    before = torch.get_rng_state()
    drawn = draw_number()
    if not _joined:
        torch.set_rng_state(before)
        return int(drawn)
    # A checksum, as quick as `torch.hash_tensor`, which sees no order.
    digest = 0
    for path, tensor in pytree.tree_flatten_with_path(tasks)[0]:
        form = f"{pytree.keystr(path)} {tensor.dtype} {[*tensor.shape]}"
        digest = zlib.crc32(form.encode(), digest)
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest = zlib.crc32(raw.numpy().data, digest)
    flat = torch.cat([p.detach().reshape(-1).double() for p in params.values()])
    # Weights, because the sum alone sees no order.
    weighted = flat @ torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
    size = torch.stack([weighted, flat.norm()]).cpu()
    mine = torch.cat([torch.stack([drawn, torch.tensor(digest)]), size.view(torch.int64)])
    of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, mine)
    first, norm = of_all[0][2:].view(torch.float64)
    near = ROUNDING * float(norm.nan_to_num())
    for rank, here in enumerate(of_all):
        there = here[2:].view(torch.float64)[0]
        if not torch.isclose(first, there, rtol=0, atol=near, equal_nan=True):
            raise UserError(
                f"the parameters of rank {rank} are not those of rank 0: call maml.distributed() "
                "before maml.MAML(…), which gives all processes rank 0's; later, load a state on "
                "every rank alike"
            )
        if here[1] != of_all[0][1]:
            raise UserError(
                f"the tasks of rank {rank} are not those of rank 0: under maml.distributed(), give "
                "every process the same tasks in the same order, by the same seed and without a "
                "DistributedSampler; each process computes its part of them"
            )
    return int(of_all[0][0])
