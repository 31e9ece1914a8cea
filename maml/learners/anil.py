"""Almost No Inner Loop (Raghu et al. 2020, arXiv:1909.09157, section 4)."""

from __future__ import annotations

from maml.learners.maml import MAML


class ANIL(MAML):
    """MAML whose inner loop, in training and at test, adapts the network's output layer alone."""

    def adapts(self, name: str) -> bool:
        """The output layer's parameters."""
        head = self.network.head_prefix
        assert isinstance(head, str)
        return name.startswith(head)
