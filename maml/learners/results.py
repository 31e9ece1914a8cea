"""What learners return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from maml.metagradient.problem import Problem
from maml.params import Params


class Predictions(NamedTuple):
    """What a network answers to the queries of B tasks: ``[B, E, …]`` each.

    Attributes:
        transductive: Queries are normalised by the statistics of the whole query set, as in MAML's
            released code.
        non_transductive: By those of the same network on the support set, so that a query's answer
            depends on no other query. The same tensor where the network normalises nothing.
    """

    transductive: Tensor
    non_transductive: Tensor


class Adapted(NamedTuple):
    """What the inner loop has made of B tasks.

    Attributes:
        problem: The inner problem.
        at: What has adapted, ``{name: [B, …]}``.
    """

    problem: Problem
    at: Params
