"""One layer of an LSTM in one direction, with first and second derivatives by the equations.

    z = a + h Wᵀ,   i, f, o = σ(z_i, z_f, z_o),  g = tanh(z_g),   c⁺ = f c + i g,   h⁺ = o tanh(c⁺)

a is what the inputs contribute. All derivatives of one step are linear in what they propagate, with
factors that one operation for all steps computes:

    F = (g σ'_i, c σ'_f, i tanh'_g, tanh(c⁺) σ'_o),   K = o (1 − tanh²(c⁺))
    tangent:   c⁺' = f c' + Σ F_ifg z'_ifg,   h⁺' = F_o z'_o + K c⁺'
    gradient:  dc⁺ += K dh⁺,   dz = F (dc⁺, dc⁺, dc⁺, dh⁺),   dc = f dc⁺,   dh = dz W

So a step takes few operations. The order of the gates is torch's: i, f, g, o.

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
    """F ``[G, N, 4H]``, f and K ``[G, N, H]``."""

    gates: Tensor
    forget: Tensor
    cell: Tensor


def _factors(z: Tensor, c: Tensor) -> _Factors:
    i, f, _, o = z.sigmoid().chunk(4, -1)
    g = z.chunk(4, -1)[2].tanh()
    t = (f * c + i * g).tanh()
    gates = torch.cat([g * (i - i * i), c * (f - f * f), i - i * g * g, t * (o - o * o)], -1)
    return _Factors(gates, f, o - o * t * t)


def _tangents_of_factors(z: Tensor, c: Tensor, of_z: Tensor, of_c: Tensor) -> _Factors:
    """Return the tangents of `_factors`. Not by ``torch.func.jvp``, which threads would share."""
    i, f, _, o = z.sigmoid().chunk(4, -1)
    g = z.chunk(4, -1)[2].tanh()
    t = (f * c + i * g).tanh()
    di, df, dg, do = i - i * i, f - f * f, 1 - g * g, o - o * o
    zi, zf, zg, zo = of_z.chunk(4, -1)
    of_i, of_f, of_g, of_o = di * zi, df * zf, dg * zg, do * zo
    of_t = (1 - t * t) * (of_f * c + f * of_c + of_i * g + i * of_g)
    gates = [
        of_g * di + g * (1 - 2 * i) * of_i,
        of_c * df + c * (1 - 2 * f) * of_f,
        of_i * dg - 2 * i * g * of_g,
        of_t * do + t * (1 - 2 * o) * of_o,
    ]
    return _Factors(torch.cat(gates, -1), of_f, of_o * (1 - t * t) - 2 * o * t * of_t)


class _Back(NamedTuple):
    """A way back: dz and (dc⁺, dc⁺, dc⁺, dh⁺) of all steps, dh and dc at the start."""

    z: Tensor
    states: Tensor
    h: Tensor
    c: Tensor


def _step(states: list[Tensor], of: dict[str, Tensor]) -> Found:
    """Return h⁺ and c⁺; and h⁺, z, h, c."""
    h, c = states
    z = torch.baddbmm(of["a"], h, of["w"].mT)
    i, f, _, o = z.sigmoid().chunk(4, -1)
    now = torch.addcmul(f * c, i, z.chunk(4, -1)[2].tanh())
    y = o * now.tanh()
    return (y, now), (y, z, h, c)


def _step_back(states: list[Tensor], of: dict[str, Tensor]) -> Found:
    """Return dh and dc; and dz, (dc⁺, dc⁺, dc⁺, dh⁺)."""
    h, c = states
    if "y" in of:
        h = h + of["y"]
    if "plus_cell" in of:
        c = c + of["plus_cell"]
    c = torch.addcmul(c, h, of["cell"])
    both = torch.cat([c, c, c, h], -1)
    if "plus_z" not in of:
        z = both * of["gates"]
        return (z @ of["w"], c * of["forget"]), (z, both)
    z = torch.addcmul(of["plus_z"], both, of["gates"])
    before = torch.baddbmm(of["plus_h"], z, of["w"])
    return (before, torch.addcmul(of["plus_c"], c, of["forget"])), (z, both)


def _step_along(states: list[Tensor], of: dict[str, Tensor]) -> Found:
    """Return h⁺' and c⁺'; and h⁺', z', h', c'."""
    h, c = states
    z = torch.baddbmm(of["a"], h, of["w"].mT)
    parts = (z * of["gates"]).unflatten(-1, (4, -1))
    now = torch.addcmul(parts[..., :3, :].sum(-2), of["forget"], c)
    y = torch.addcmul(parts[..., 3, :], of["cell"], now)
    return (y, now), (y, z, h, c)


@dataclass(frozen=True)
class Lstm(Operation):
    """``a [N, 4H], h [E, H], c [E, H], W [4H, H]`` → ``h⁺ [N, H]``, and h and c at the end."""

    steps: Steps
    n_kept = 3
    exact = True  # states add up over the steps

    def plain(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """See `Operation.plain`."""
        (y, h, c), _ = self.value(*inputs)
        return y, h, c

    def value(self, *inputs: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """See `Operation.value`."""
        lead = inputs[0].shape[:-2]  # type: ignore[union-attr]
        a, h, c, w = flat([t for t in inputs if t is not None])
        states, (y, *kept) = self.steps.take(_step, [h, c], {"a": a}, {"w": w})
        found = [t.view(*lead, *t.shape[-2:]) for t in (y, *states, *kept)]
        return tuple(found[:3]), tuple(found[3:])

    def gradient(self, inputs: Tensors, kept: Tensors, cotangents: Tensors) -> Tensors:
        """See `Operation.gradient`."""
        z, before, c = flat([t for t in kept if t is not None])
        back = self._back(inputs, _factors(z, c), cotangents)
        found = back.z, back.h, back.c, back.z.mT @ before
        return [g.view(t.shape) for g, t in zip(found, inputs, strict=True) if t is not None]

    def _back(
        self, inputs: Tensors, factors: _Factors, cotangents: Tensors, plus: _Plus | None = None
    ) -> _Back:
        """Go back through all steps; ``plus`` is added to what each step finds."""
        w = flat([t for t in inputs if t is not None])[3]
        dy, dh, dc = (None if t is None else t.reshape(-1, *t.shape[-2:]) for t in cotangents)
        zero = w.new_zeros(()).expand(*flat([inputs[1]])[0].shape)  # type: ignore[list-item]
        begin = [zero if t is None else t for t in (dh, dc)]
        rows = factors._asdict() | ({} if dy is None else {"y": dy})
        rows |= {} if plus is None else {f"plus_{name}": t for name, t in plus._asdict().items()}
        (dh, dc), (zs, states) = self.steps.take(_step_back, begin, rows, {"w": w}, back=True)
        return _Back(zs, states, dh, dc)

    def tangents(
        self, inputs: Tensors, kept: Tensors, cotangents: Tensors, along: Tensors
    ) -> tuple[Tensors, Tensors]:
        """See `Operation.tangents`."""
        lead = inputs[0].shape[:-2]  # type: ignore[union-attr]
        z, before, c = flat([t for t in kept if t is not None])
        filled = [
            torch.zeros_like(t) if v is None else v
            for t, v in zip(inputs, along, strict=True)
            if t is not None
        ]
        of_a, of_h, of_c, of_w = flat(filled)
        w = flat([t for t in inputs if t is not None])[3]
        factors = _factors(z, c)
        # What the steps' own weights contribute is one product.
        rows = factors._asdict() | {"a": torch.baddbmm(of_a, before, of_w.mT)}
        ends, (ys, *moved) = self.steps.take(_step_along, [of_h, of_c], rows, {"w": w})
        of_factors = _tangents_of_factors(z, c, moved[0], moved[2])
        back = self._back(inputs, factors, cotangents)
        own_c, own_h = back.states.chunk(4, -1)[2:]
        plus = _Plus(
            own_h * of_factors.cell,
            back.states * of_factors.gates,
            own_c * of_factors.forget,
            back.z @ of_w,
        )
        of_back = self._back(inputs, factors, (None, None, None), plus)
        by_w = of_back.z.mT @ before + back.z.mT @ moved[1]
        of_outputs = [ys, *ends]
        of_gradients = of_back.z, of_back.h, of_back.c, by_w
        return (
            [t.view(*lead, *t.shape[-2:]) for t in of_outputs],
            [t.view(*lead, *t.shape[-2:]) for t in of_gradients],
        )


class _Plus(NamedTuple):
    """What the tangents of the factors add to the tangents of dc⁺, dz, dc and dh."""

    cell: Tensor
    z: Tensor
    c: Tensor
    h: Tensor
