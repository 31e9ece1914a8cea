"""One layer of a GRU in one direction, with first and second derivatives by the equations.

    p = h Wᵀ + b,   r, u = σ(a_r + p_r, a_u + p_u),   n = tanh(a_n + r p_n),   h⁺ = n + u (h − n)

a is what the inputs contribute. All derivatives of one step are linear in what they propagate, with
factors that one operation for all steps computes (`_factors`):

    tangent:   h⁺' = Σ F_a a' + Σ F_p p' + u h'
    gradient:  da = F_a dh⁺,   dp = F_p dh⁺,   dh = u dh⁺ + dp W

The order of the gates is torch's: r, u (torch calls it z), n.

Shape legend: G entries of leading dimensions, N rows of all steps, E sequences, H units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from maml.ops.operation import Operation, Tensors
from maml.ops.steps import Found, Steps, flat


class _Factors(NamedTuple):
    """F_a and F_p ``[G, N, 3H]``, u ``[G, N, H]``."""

    inputs: Tensor
    states: Tensor
    keep: Tensor


def _factors(a: Tensor, p: Tensor, h: Tensor) -> _Factors:
    a_n, p_n = a.chunk(3, -1)[2], p.chunk(3, -1)[2]
    r, u, _ = (a + p).sigmoid().chunk(3, -1)
    n = (a_n + r * p_n).tanh()
    by_n = (n * n - 1) * (u - 1)
    by_r, by_u = by_n * p_n * (r - r * r), (h - n) * (u - u * u)
    return _Factors(torch.cat([by_r, by_u, by_n], -1), torch.cat([by_r, by_u, by_n * r], -1), u)


def _tangents_of_factors(
    given: tuple[Tensor, Tensor, Tensor], along: tuple[Tensor, Tensor, Tensor]
) -> _Factors:
    """Return the tangents of `_factors`. Not by ``torch.func.jvp``, which threads would share."""
    (a, p, h), (of_a, of_p, of_h) = given, along
    a_n, p_n, of_p_n = a.chunk(3, -1)[2], p.chunk(3, -1)[2], of_p.chunk(3, -1)[2]
    r, u, _ = (a + p).sigmoid().chunk(3, -1)
    n = (a_n + r * p_n).tanh()
    dr, du, dn = r - r * r, u - u * u, 1 - n * n
    of_gates = (of_a + of_p).chunk(3, -1)
    of_r, of_u = dr * of_gates[0], du * of_gates[1]
    of_n = dn * (of_a.chunk(3, -1)[2] + of_r * p_n + r * of_p_n)
    by_n, of_by_n = dn * (1 - u), -2 * n * of_n * (1 - u) - dn * of_u
    by_r = (of_by_n * p_n + by_n * of_p_n) * dr + by_n * p_n * (1 - 2 * r) * of_r
    by_u = (of_h - of_n) * du + (h - n) * (1 - 2 * u) * of_u
    inputs, states = [by_r, by_u, of_by_n], [by_r, by_u, of_by_n * r + by_n * of_r]
    return _Factors(torch.cat(inputs, -1), torch.cat(states, -1), of_u)


class _Back(NamedTuple):
    """What a way back has found: dp and dh⁺ of all steps, and dh at the start."""

    p: Tensor
    states: Tensor
    h: Tensor


def _thrice(t: Tensor) -> Tensor:
    return torch.cat([t, t, t], -1)


def _summed(t: Tensor) -> Tensor:
    """Return the sum of the three parts of ``[G, n, 3H]``, ``[G, n, H]``."""
    return t.unflatten(-1, (3, -1)).sum(-2)


def _step(states: list[Tensor], of: dict[str, Tensor]) -> Found:
    """Return h⁺; and h⁺, p, h."""
    (h,) = states
    p, sizes = torch.baddbmm(of["b"], h, of["w"].mT), [2 * h.shape[-1], h.shape[-1]]
    gates, last = of["a"].split(sizes, -1)
    of_gates, of_last = p.split(sizes, -1)
    r, u = (gates + of_gates).sigmoid().chunk(2, -1)
    y = torch.lerp(torch.addcmul(last, r, of_last).tanh(), h, u)
    return (y,), (y, p, h)


def _step_back(states: list[Tensor], of: dict[str, Tensor]) -> Found:
    """Return dh; and dp, dh⁺."""
    own = states[0] + of["y"] if "y" in of else states[0]
    if "plus_p" not in of:
        p, moved = _thrice(own) * of["of_states"], own * of["keep"]
    else:
        p = torch.addcmul(of["plus_p"], _thrice(own), of["of_states"])
        moved = torch.addcmul(of["plus_h"], own, of["keep"])
    return (torch.baddbmm(moved, p, of["w"]),), (p, own)


def _step_along(states: list[Tensor], of: dict[str, Tensor]) -> Found:
    """Return h⁺'; and h⁺', p', h'."""
    (h,) = states
    p = torch.baddbmm(of["p"], h, of["w"].mT)
    y = torch.addcmul(of["y"], of["keep"], h) + _summed(p * of["of_states"])
    return (y,), (y, p, h)


@dataclass(frozen=True)
class Gru(Operation):
    """``a [N, 3H], h [E, H], W [3H, H], b [1, 3H]`` → ``h⁺ [N, H]``, and h at the end."""

    steps: Steps
    n_kept = 2
    exact = True  # states add up over the steps

    def plain(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """See `Operation.plain`."""
        return self.value(*inputs)[0]

    def value(self, *inputs: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """See `Operation.value`."""
        lead = inputs[0].shape[:-2]  # type: ignore[union-attr]
        a, h, w, b = flat([t for t in inputs if t is not None])
        (h,), (y, *kept) = self.steps.take(_step, [h], {"a": a}, {"w": w, "b": b})
        found = [t.view(*lead, *t.shape[-2:]) for t in (y, h, *kept)]
        return tuple(found[:2]), tuple(found[2:])

    def gradient(self, inputs: Tensors, kept: Tensors, cotangents: Tensors) -> Tensors:
        """See `Operation.gradient`."""
        a = flat([t for t in inputs if t is not None])[0]
        p, before = flat([t for t in kept if t is not None])
        factors = _factors(a, p, before)
        back = self._back(inputs, factors, cotangents)
        by_a, by_b = factors.inputs * _thrice(back.states), back.p.sum(1, keepdim=True)
        found = by_a, back.h, back.p.mT @ before, by_b
        return [g.view(t.shape) for g, t in zip(found, inputs, strict=True) if t is not None]

    def _back(
        self,
        inputs: Tensors,
        factors: _Factors,
        cotangents: Tensors,
        plus: tuple[Tensor, Tensor] | None = None,
    ) -> _Back:
        """Go back through all steps; ``plus`` is added to dp and dh of each step."""
        _, start, w, _ = flat([t for t in inputs if t is not None])
        dy, dh = (None if t is None else t.reshape(-1, *t.shape[-2:]) for t in cotangents)
        dh = torch.zeros_like(start) if dh is None else dh
        rows = {"of_states": factors.states, "keep": factors.keep}
        rows |= {} if dy is None else {"y": dy}
        rows |= {} if plus is None else {"plus_p": plus[0], "plus_h": plus[1]}
        (dh,), (ps, states) = self.steps.take(_step_back, [dh], rows, {"w": w}, back=True)
        return _Back(ps, states, dh)

    def tangents(
        self, inputs: Tensors, kept: Tensors, cotangents: Tensors, along: Tensors
    ) -> tuple[Tensors, Tensors]:
        """See `Operation.tangents`."""
        lead = inputs[0].shape[:-2]  # type: ignore[union-attr]
        filled = [
            torch.zeros_like(t) if v is None else v
            for t, v in zip(inputs, along, strict=True)
            if t is not None
        ]
        of_a, of_h, of_w, of_b = flat(filled)
        a, _, w, _ = flat([t for t in inputs if t is not None])
        p, before = flat([t for t in kept if t is not None])
        factors = _factors(a, p, before)
        # What the steps' own weights and inputs contribute is one operation for all steps.
        rows = {
            "p": torch.baddbmm(of_b, before, of_w.mT),
            "y": _summed(factors.inputs * of_a),
            "of_states": factors.states,
            "keep": factors.keep,
        }
        (of_h,), (ys, of_p, of_before) = self.steps.take(_step_along, [of_h], rows, {"w": w})
        of_factors = _tangents_of_factors((a, p, before), (of_a, of_p, of_before))
        back = self._back(inputs, factors, cotangents)
        states = _thrice(back.states)
        plus = (
            states * of_factors.states,
            torch.baddbmm(back.states * of_factors.keep, back.p, of_w),
        )
        of_back = self._back(inputs, factors, (None, None), plus)
        by_a = factors.inputs * _thrice(of_back.states) + of_factors.inputs * states
        by_w = of_back.p.mT @ before + back.p.mT @ of_before
        of_gradients = by_a, of_back.h, by_w, of_back.p.sum(1, keepdim=True)
        return (
            [t.view(*lead, *t.shape[-2:]) for t in (ys, of_h)],
            [t.view(*lead, *t.shape[-2:]) for t in of_gradients],
        )
