"""Scaled dot-product attention, twice differentiable with memory linear in the length.

Torch's fused kernels have no second derivative, and its plain way keeps the weights of all pairs of
positions. Here each derivative goes through blocks of queries and computes their weights again, so
only one block of weights exists at a time. For a block of queries q, with all keys k and values v:

    S = s·q kᵀ + mask,  P = softmax(S),  o = (D∘P) v                         D: dropout's factors
    gradient:  dP = D∘(do vᵀ),  dS = P∘(dP − Σ P∘dP),
               dq = s·dS k,  dk = s·dSᵀ q,  dv = (D∘P)ᵀ do
    tangents along q', k', v':  S' = s·(q' kᵀ + q k'ᵀ),  P' = P∘(S' − Σ P∘S'),
               o' = (D∘P') v + (D∘P) v',  and each line of the gradient by the product rule.

The sums are over keys. Backward passes in blocks: Dao et al. 2022, arXiv:2205.14135; forward
derivatives in blocks: arXiv:2411.01077.

Shape legend: … leading dimensions (batch, heads, tasks), L queries, M keys, d their size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from maml.ops.operation import Operation, Tensors

_OF_TORCH = F.scaled_dot_product_attention
BLOCK = 2**20
"""About as many weights are computed at once, over all leading dimensions."""
LEAST_ROWS = 32
"""A block has at least so many queries: smaller products would be slow."""
SHORT = 128 * 128
"""For at most as many pairs of positions, torch's plain way is at least as fast."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | None = None,
) -> Tensor:
    """Return softmax(s·q kᵀ + mask) v, ``[…, L, dv]``. The arguments are torch's, but ``window``.

    Args:
        query: Queries q ``[…, L, d]``, floating point.
        key: Keys k ``[…, M, d]``.
        value: Values v ``[…, M, dv]``.
        attn_mask: ``[…, L, M]``, or of a shape that broadcasts to it. Boolean: True where a query
            sees a key. Floating point: added to the scores.
        dropout_p: The probability with which a weight becomes zero. Short sequences draw as torch's
            plain way does. Else one number of torch's global generator seeds all weights' draws.
        is_causal: Whether query i sees keys 0 … i only.
        scale: s; None: 1/√d.
        enable_gqa: Whether k and v have fewer heads (dimension −3), each for a group of q's heads.
        window: Query i sees keys i − window + 1 … i only; needs ``is_causal``.

    Raises:
        ValueError: for a ``window`` without ``is_causal``.
    """
    if window is not None and not is_causal:
        raise ValueError("window: needs is_causal=True")
    q, k, v, mask = query, key, value, attn_mask
    if enable_gqa:
        k, v = (_repeated(t, q.shape[-3] // t.shape[-3]) for t in (k, v))
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (q, k, v))
    if mask is not None:
        mask = mask.reshape(*(1,) * (q.dim() - mask.dim()), *mask.shape)
    s = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    learned = mask is not None and mask.requires_grad  # then the mask's gradient has all pairs
    if q.shape[-2] * k.shape[-2] <= SHORT or learned:
        return Attention(s, is_causal, window, dropout_p).plain(q, k, v, mask)[0]
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout_p else None
    return Attention(s, is_causal, window, dropout_p, seed)(q, k, v, mask)[0]


def _repeated(heads: Tensor, n: int) -> Tensor:
    """Return each of the heads ``[…, H, M, d]`` n times, ``[…, H·n, M, d]``."""
    return heads.unsqueeze(-3).expand(*heads.shape[:-2], n, *heads.shape[-2:]).flatten(-4, -3)


class _Block(NamedTuple):
    """The weights of the queries ``rows`` for the keys ``seen``; ``dropped``: D∘P."""

    rows: slice
    seen: slice
    weights: Tensor
    factors: Tensor | None

    def drop(self, t: Tensor) -> Tensor:
        return t if self.factors is None else t * self.factors


@dataclass(frozen=True)
class Attention(Operation):
    """`attention` of ``q, k, v, mask``, whose leading dimensions are the same or 1 (mask)."""

    scale: float
    causal: bool = False
    window: int | None = None
    dropout: float = 0.0
    seed: int | None = None

    def plain(self, *inputs: Tensor | None) -> tuple[Tensor]:
        """See `Operation.plain`."""
        q, k, v, mask = inputs
        assert q is not None and k is not None and v is not None
        whole = slice(0, q.shape[-2]), slice(0, k.shape[-2])
        scores = _masked(self.scale * (q @ k.mT), self._visible(*whole, q.device), mask)
        weights = _softmax(scores, may_be_empty=mask is not None)
        if self.seed is not None:
            weights = weights * torch.cat(list(self._factors(q, k.shape[-2])), -2)
        elif self.dropout:
            weights = F.dropout(weights, self.dropout)
        return (weights @ v,)

    def value(self, *inputs: Tensor | None) -> tuple[tuple[Tensor], tuple[()]]:
        """See `Operation.value`."""
        q, k, v, mask = inputs
        assert q is not None and k is not None and v is not None
        if self.dropout or self.window is not None:
            found = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
            for block in self._blocks(q, k, mask):
                found[..., block.rows, :] = block.drop(block.weights) @ v[..., block.seen, :]
            return (found,), ()
        # Fused attention takes two leading dimensions.
        heads = q.shape[-3:-2] if q.dim() > 2 else (1,)
        own_q, own_k, own_v = (t.reshape(-1, *heads, *t.shape[-2:]) for t in (q, k, v))
        if mask is not None:
            mask = _flat(mask, q.shape[:-3]).expand(-1, -1, q.shape[-2], k.shape[-2])
        found = _OF_TORCH(own_q, own_k, own_v, mask, is_causal=self.causal, scale=self.scale)
        return (found.view(*q.shape[:-1], v.shape[-1]),), ()

    def gradient(self, inputs: Tensors, kept: Tensors, cotangents: Tensors) -> Tensors:
        """See `Operation.gradient`."""
        q, k, v, mask = inputs
        (do,) = cotangents
        assert q is not None and k is not None and v is not None and do is not None
        q, k, v, do = (t.contiguous() for t in (q, k, v, do))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in self._blocks(q, k, mask):
            rows, seen = block.rows, block.seen
            p, own = block.weights, do[..., rows, :]
            by_scores = _by_scores(p, block.drop(own @ v[..., seen, :].mT))
            dq[..., rows, :] = self.scale * (by_scores @ k[..., seen, :])
            dk[..., seen, :] += self.scale * (by_scores.mT @ q[..., rows, :])
            dv[..., seen, :] += block.drop(p).mT @ own
        return dq, dk, dv, None

    def tangents(
        self, inputs: Tensors, kept: Tensors, cotangents: Tensors, along: Tensors
    ) -> tuple[Tensors, Tensors]:
        """See `Operation.tangents`."""
        q, k, v, mask = inputs
        (do,) = cotangents
        assert q is not None and k is not None and v is not None and do is not None
        q, k, v, do = (t.contiguous() for t in (q, k, v, do))
        qt, kt, vt = (
            torch.zeros_like(t) if a is None else a.contiguous()
            for t, a in zip((q, k, v), along, strict=False)
        )
        of_output = torch.empty_like(do)
        of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        s = self.scale
        # q' kᵀ + q k'ᵀ as one product.
        q2, k2 = torch.cat([qt, q], -1), torch.cat([k, kt], -1)
        for block in self._blocks(q, k, mask):
            rows, seen = block.rows, block.seen
            p, own, keys = block.weights, do[..., rows, :], k[..., seen, :]
            by_p = block.drop(own @ v[..., seen, :].mT)
            by_pt = block.drop(own @ vt[..., seen, :].mT)
            by_scores = _by_scores(p, by_p)
            pt = _by_scores(p, s * (q2[..., rows, :] @ k2[..., seen, :].mT))
            dropped = block.drop(pt)
            of_output[..., rows, :] = dropped @ v[..., seen, :] + block.drop(p) @ vt[..., seen, :]
            of_v[..., seen, :] += dropped.mT @ own
            # The tangent of P∘(dP − Σ P∘dP).
            centred = by_p - (p * by_p).sum(-1, keepdim=True)
            moved = (pt * by_p + p * by_pt).sum(-1, keepdim=True)
            of_scores = pt * centred + p * (by_pt - moved)
            of_q[..., rows, :] = s * (of_scores @ keys + by_scores @ kt[..., seen, :])
            of_k[..., seen, :] += s * (
                of_scores.mT @ q[..., rows, :] + by_scores.mT @ qt[..., rows, :]
            )
        return (of_output,), (of_q, of_k, of_v, None)

    def _blocks(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[_Block]:
        """Yield the weights of all queries, block by block."""
        n_keys = k.shape[-2]
        factors = self._factors(q, n_keys) if self.dropout else None
        for rows in _row_blocks(q, n_keys):
            last = min(rows.stop, n_keys) if self.causal else n_keys
            first = 0 if self.window is None else max(0, rows.start - self.window + 1)
            seen = slice(first, max(last, first + 1))
            scores = self.scale * (q[..., rows, :] @ k[..., seen, :].mT)
            own = mask
            if mask is not None:
                own = mask if mask.shape[-2] == 1 else mask[..., rows, :]
                own = own if mask.shape[-1] == 1 else own[..., seen]
            scores = _masked(scores, self._visible(rows, seen, q.device), own)
            weights = _softmax(scores, may_be_empty=mask is not None)
            yield _Block(rows, seen, weights, None if factors is None else next(factors)[..., seen])

    def _visible(self, rows: slice, seen: slice, device: torch.device) -> Tensor | None:
        """Return which of the keys ``seen`` the queries ``rows`` may see; None: all."""
        if not self.causal:
            return None
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        j = torch.arange(seen.start, seen.stop, device=device)
        visible = j <= i
        return visible if self.window is None else visible & (j > i - self.window)

    def _factors(self, q: Tensor, n_keys: int) -> Iterator[Tensor]:
        """Yield dropout's factors, 0 or 1/(1 − p), of each block of queries; the same each time."""
        assert self.seed is not None
        generator = torch.Generator(q.device).manual_seed(self.seed)
        for rows in _row_blocks(q, n_keys):
            size = *q.shape[:-2], rows.stop - rows.start, n_keys
            drawn = torch.rand(size, generator=generator, device=q.device)
            yield (drawn >= self.dropout).to(q.dtype) / (1 - self.dropout)


def _row_blocks(q: Tensor, n_keys: int) -> Iterator[slice]:
    n, rows = q.shape[-2], max(LEAST_ROWS, BLOCK // max(1, n_keys * math.prod(q.shape[:-2])))
    for first in range(0, n, rows):
        yield slice(first, min(first + rows, n))


def _masked(scores: Tensor, visible: Tensor | None, mask: Tensor | None) -> Tensor:
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask


def _softmax(scores: Tensor, *, may_be_empty: bool) -> Tensor:
    """Return the weights; they are zero, not NaN, for a query that sees no key, as torch has it."""
    weights = torch.softmax(scores, -1)
    if not may_be_empty:
        return weights
    return weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)


def _flat(mask: Tensor, lead: torch.Size) -> Tensor:
    """Return a mask ``[*lead or 1, heads or 1, L, M]`` with one dimension for ``lead``, or 1."""
    own = mask.shape[-3:] if mask.dim() > 2 else (1, *mask.shape[-2:])
    if mask.shape[:-3].numel() > 1:
        mask = mask.expand(*lead, *own)
    return mask.reshape(-1, *own)


def _by_scores(weights: Tensor, by_weights: Tensor) -> Tensor:
    """Return P∘(t − Σ P∘t): softmax's tangent, and its gradient, as its Jacobian is symmetric."""
    return weights * (by_weights - (weights * by_weights).sum(-1, keepdim=True))
