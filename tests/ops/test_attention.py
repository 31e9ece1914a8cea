"""Attention by blocks: all derivatives against torch's plain way, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from maml.ops import attention_by_blocks as of_blocks
from maml.ops.attention_by_blocks import attention
from maml.ops.instead import instead

LEAD, L, M = (2, 3), 7, 9


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BLOCK": 60, "LEAST_ROWS": 2, "SHORT": 0}.items():
        monkeypatch.setattr(of_blocks, name, value)


def inputs(heads: int = LEAD[1]) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((*LEAD, L, 4), (LEAD[0], heads, M, 4), (LEAD[0], heads, M, 3))
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


def seen() -> Tensor:
    """Return which keys a query sees; the last query of the first example sees none."""
    mask = torch.rand(LEAD[0], 1, L, M, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0, :, -1] = False
    return mask


CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 3},
    "boolean mask": {"attn_mask": seen()},
    "additive mask": {"attn_mask": torch.linspace(-1, 1, M, dtype=torch.float64), "scale": 0.3},
    "grouped": {"enable_gqa": True, "is_causal": True},
}


def by_torch(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    window = options.pop("window", None)
    if window is not None:
        seen = torch.ones(L, M).tril().triu(1 - window) > 0
        options |= {"attn_mask": seen, "is_causal": False}
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("case", CASES)
def test_value_and_two_derivatives_equal_torchs(case: str) -> None:
    options = CASES[case]
    given = inputs(1 if case == "grouped" else LEAD[1])

    def found(function: Any) -> list[Tensor]:
        value = function(*given, **options)
        first = torch.autograd.grad(value.square().sum(), given, create_graph=True)
        total = sum((g.sin() * g).sum() for g in first)
        return [value, *first, *torch.autograd.grad(total, given)]

    for ours, theirs in zip(found(attention), found(by_torch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_gradcheck_with_dropout() -> None:
    """Every derivative draws the same: the numbers are those of one function of the inputs."""

    def dropped(*given: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attention(*given, dropout_p=0.4, is_causal=True)

    given = [t[:1, :1, :4, :2].detach().requires_grad_() for t in inputs()]
    assert torch.autograd.gradcheck(dropped, given)
    assert torch.autograd.gradgradcheck(dropped, given)
    assert float((dropped(*given) - attention(*given, is_causal=True)).detach().norm()) > 0.1


def test_vmap_and_further_derivatives_equal_torchs() -> None:
    """Over tasks with weights of their own; and a third derivative, which is torch's."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, L, 4, dtype=torch.float64)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def results(function: Any) -> list[Tensor]:
        def inner(w: Tensor, x: Tensor) -> Tensor:
            keys = x @ w.T
            seen = keys[..., 0].detach()[:, None] > -2
            return function(x @ w, keys, x, attn_mask=seen).square().mean()

        def outer(x: Tensor) -> Tensor:
            return inner(w - 0.5 * torch.func.grad(inner)(w, x), x)

        def further(w: Tensor) -> Tensor:
            return torch.func.grad(lambda w: torch.func.grad(inner)(w, x[0]).sin().sum())(w).sum()

        (of_tasks,) = torch.autograd.grad(torch.func.vmap(outer)(x).sum(), w)
        tangent = torch.func.jvp(lambda w: inner(w, x[0]), (w.detach(),), (x[0, 0, :4],))[1]
        return [of_tasks, torch.func.grad(further)(w), tangent]

    for ours, theirs in zip(results(attention), results(by_torch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_torchs_layers_are_served() -> None:
    """Multi-head attention, whose weights are not returned, and an encoder layer."""
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dtype=torch.float64).eval()
    x = torch.randn(2, L, 6, dtype=torch.float64)

    def second() -> list[Tensor]:
        params = list(layer.parameters())
        first = torch.autograd.grad(layer(x).square().sum(), params, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), params))

    with sdpa_kernel(SDPBackend.MATH):
        expected = second()
    with instead():
        found = second()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_torch_still_lacks_the_second_derivative() -> None:
    """When this fails, torch's own attention may serve."""
    given = inputs()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = F.scaled_dot_product_attention(given[0], given[1], given[1]).square().sum()
        first = torch.autograd.grad(found, given[:2], create_graph=True)
        with pytest.raises(RuntimeError, match="not implemented"):
            torch.autograd.grad(first[0].sum(), given[:2])
