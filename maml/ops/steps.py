"""The time steps of a recurrent layer, for rows of sequences that may differ in length.

The rows of all steps stand one after the other, step by step, as in torch's ``PackedSequence``. The
sequences are sorted by length, so a step's rows belong to the first sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from maml.execution.recorded import RECORDING

Named: TypeAlias = dict[str, Tensor]
Found: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]
Step: TypeAlias = Callable[[list[Tensor], Named], Found]
"""(states ``[G, e, H]`` of e sequences, rows of a step, and what all steps read, by name) → states
after the step, and what the step has found ``[G, e, …]``."""


LONG = 32
"""A recording has the body of a loop over more steps, and not each step. The code is two thirds as
quick, because rows are copied around the loop; but its compilation does not grow with the steps."""


@dataclass(frozen=True)
class Steps:
    """How many rows each step has, and the direction. Tensors are ``[G, rows, …]``."""

    sizes: tuple[int, ...]
    backwards: bool = False

    def take(
        self, step: Step, states: Sequence[Tensor], rows: Named, fixed: Named, *, back: bool = False
    ) -> Found:
        """Take all steps; return the states at the end, and all that they find, as rows.

        Args:
            step: See `Step`. It reads nothing but its arguments.
            states: At the start, ``[G, E, H]``.
            rows: Of all steps, ``[G, N, …]``.
            fixed: What all steps read.
            back: Whether to take them against the layer's direction.
        """
        descending = self.backwards != back
        if RECORDING.now and len(self.sizes) > LONG and len({*self.sizes}) == 1 and _is_lowest():
            return self._scanned(step, states, rows, fixed, descending)
        parts = {name: tensor.split(self.sizes, 1) for name, tensor in rows.items()}
        found = list[Sequence[Tensor]]()
        for at in range(len(self.sizes))[:: -1 if descending else 1]:
            own = [top(state, self.sizes[at]) for state in states]
            now, of_step = step(own, fixed | {name: part[at] for name, part in parts.items()})
            states = [put(new, state) for new, state in zip(now, states, strict=True)]
            found.append(of_step)
        in_order = found[:: -1 if descending else 1]
        return states, [torch.cat(each, 1) for each in zip(*in_order, strict=True)]

    def _scanned(
        self, step: Step, states: Sequence[Tensor], rows: Named, fixed: Named, descending: bool
    ) -> Found:
        """Take all steps as one operation of a recording, whose size is then that of one step."""
        from torch._higher_order_ops.scan import scan_op  # late: it imports a compiler

        n, n_states = len(self.sizes), len(states)

        def body(*given: Tensor) -> list[Tensor]:
            named = zip([*rows, *fixed], given[n_states:], strict=True)
            now, of_step = step([*given[:n_states]], dict(named))
            found, taken = [*now, *of_step], {*map(id, given)}
            for place, tensor in enumerate(found):  # what is returned may not share memory
                found[place] = tensor.clone() if id(tensor) in taken else tensor
                taken.add(id(tensor))
            return found

        of_steps = [t.unflatten(1, (n, -1)).transpose(0, 1) for t in rows.values()]
        of_steps = [t.flip(0) if descending else t.contiguous() for t in of_steps]
        begin = [state.clone(memory_format=torch.contiguous_format) for state in states]
        found = scan_op(body, begin, of_steps, (*fixed.values(),))
        in_order = [t.flip(0) if descending else t for t in found[n_states:]]
        return found[:n_states], [t.transpose(0, 1).flatten(1, 2) for t in in_order]


def _is_lowest() -> bool:
    """Return whether nothing differentiates or batches what is computed now."""
    return not (torch.is_grad_enabled() or torch._C._are_functorch_transforms_active())


def top(state: Tensor, n: int) -> Tensor:
    """Return the state of the first ``n`` sequences, of ``[G, E, H]``."""
    return state if state.shape[1] == n else state[:, :n]


def put(new: Tensor, state: Tensor) -> Tensor:
    """Return ``state`` with ``new`` as the state of the first sequences."""
    n = new.shape[1]
    return new if n == state.shape[1] else torch.cat([new, state[:, n:]], 1)


def flat(tensors: Iterator[Tensor] | list[Tensor]) -> list[Tensor]:
    """Return tensors ``[…, a, b]`` as ``[G, a, b]``."""
    return [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in tensors]
