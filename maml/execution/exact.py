"""Operations that torch computes wrongly and without an error, put right here (torch 2.15)."""

import torch
from torch import Tensor


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return ``v`` with the norm ``g``, as `torch._weight_norm` does.

    Torch's own has a wrong second derivative: `torch.autograd.gradgradcheck` refuses it.
    """
    others = [i for i in range(v.dim()) if i != dim]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=dim >= 0))


def _embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return what `torch.embedding` returns, under ``torch.func.vmap``.

    Torch's own applies the padding only to the first task, and counts frequencies over all tasks.
    """
    if scale_grad_by_freq:
        raise NotImplementedError("an embedding with scale_grad_by_freq, batched")
    rows = weight.index_select(0, indices.reshape(-1)).reshape(*indices.shape, -1)
    if padding_idx < 0:
        return rows
    return torch.where((indices == padding_idx)[..., None], rows.detach(), rows)


def _in_elements(name: str) -> None:
    """Give a norm under ``torch.func.vmap`` torch's own decomposition into elementary operations.

    Else gradients of ``torch.func.grad`` are differentiated wrongly if the norm has a weight: the
    mean and the variance count as constants.
    """
    operation = getattr(torch.ops.aten, name).default
    decomposed = torch._decomp.get_decompositions([operation])[operation]
    _OF_TORCH.impl(name, decomposed, "FuncTorchBatched")


def _renormed(*given: object) -> None:
    raise NotImplementedError("an embedding with max_norm, batched")


_OF_TORCH = torch.library.Library("aten", "IMPL")
_OF_TORCH.impl("_weight_norm", _weight_norm, "CompositeImplicitAutograd")
_OF_TORCH.impl("_weight_norm", _weight_norm, "FuncTorchBatched")
_OF_TORCH.impl("embedding", _embedding, "FuncTorchBatched")
_OF_TORCH.impl("embedding_renorm_", _renormed, "FuncTorchBatched")
for _norm in ("native_layer_norm", "native_batch_norm", "cudnn_batch_norm"):
    _in_elements(_norm)
    _in_elements(f"{_norm}_backward")
