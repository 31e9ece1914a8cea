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
from maml.ops.steps import Steps, flat, put, top


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
        wt, of_step = w.mT, self.steps.of(a)
        n_units = h.shape[-1]
        ps, hs, ys = list[Tensor](), list[Tensor](), list[Tensor]()
        for step in self.steps.order():
            hs.append(top(h, self.steps.sizes[step]))
            ps.append(torch.baddbmm(b, hs[-1], wt))
            gates, last = of_step[step].split([2 * n_units, n_units], -1)
            of_gates, of_last = ps[-1].split([2 * n_units, n_units], -1)
            r, u = (gates + of_gates).sigmoid().chunk(2, -1)
            ys.append(torch.lerp(torch.addcmul(last, r, of_last).tanh(), hs[-1], u))
            h = put(ys[-1], h)
        y, *kept = (self.steps.join(each) for each in (ys, ps, hs))
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
        of_states, keep = self.steps.of(factors.states), self.steps.of(factors.keep)
        of_y = None if dy is None else self.steps.of(dy)
        more = None if plus is None else [*map(self.steps.of, plus)]
        ps, states = list[Tensor](), list[Tensor]()
        for step in reversed(self.steps.order()):
            own = top(dh, self.steps.sizes[step])
            own = own if of_y is None else own + of_y[step]
            states.append(own)
            if more is None:
                ps.append(_thrice(own) * of_states[step])
                moved = own * keep[step]
            else:
                ps.append(torch.addcmul(more[0][step], _thrice(own), of_states[step]))
                moved = torch.addcmul(more[1][step], own, keep[step])
            dh = put(torch.baddbmm(moved, ps[-1], w), dh)
        return _Back(self.steps.back(ps), self.steps.back(states), dh)

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
        factors, wt = _factors(a, p, before), w.mT
        of_states, keep = self.steps.of(factors.states), self.steps.of(factors.keep)
        # What the steps' own weights and inputs contribute is one operation for all steps.
        own = self.steps.of(torch.baddbmm(of_b, before, of_w.mT))
        given = self.steps.of(_summed(factors.inputs * of_a))
        ps, hs, ys = list[Tensor](), list[Tensor](), list[Tensor]()
        for step in self.steps.order():
            hs.append(top(of_h, self.steps.sizes[step]))
            ps.append(torch.baddbmm(own[step], hs[-1], wt))
            moved = torch.addcmul(given[step], keep[step], hs[-1])
            ys.append(moved + _summed(ps[-1] * of_states[step]))
            of_h = put(ys[-1], of_h)
        of_p, of_before = (self.steps.join(each) for each in (ps, hs))
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
            [t.view(*lead, *t.shape[-2:]) for t in (self.steps.join(ys), of_h)],
            [t.view(*lead, *t.shape[-2:]) for t in of_gradients],
        )
