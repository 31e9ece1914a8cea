"""A module whose tensors are read and changed between calls of its network."""

from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import Tensor, nn

from maml.learners import Learner
from maml.networks.calls import alone_with


class Waiting(nn.Module):
    """A module with a learner. A call puts a task's tensors into the network. So the methods that
    read or change tensors wait for calls in other threads to end.
    """

    learner: Learner

    def named_parameters(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return what torch's method returns."""
        with alone_with(self.learner.network):
            return iter([*super().named_parameters(*given, **named)])

    def state_dict(self, *given: Any, **named: Any) -> Any:
        """Return what torch's method returns."""
        with alone_with(self.learner.network):
            return super().state_dict(*given, **named)

    def load_state_dict(self, *given: Any, **named: Any) -> Any:
        """Do what torch's method does."""
        with alone_with(self.learner.network):
            return super().load_state_dict(*given, **named)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with alone_with(self.learner.network):
            return super()._apply(fn, recurse)
