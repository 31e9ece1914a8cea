"""The program's flags as arguments of meta-learners: their types, and the signatures they make."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict, get_type_hints

from torch import Tensor

from maml.config import Config, registry
from maml.errors import UserError

NOT_HERE = (
    *("ways", "shots", "queries", "eval_queries", "train_ways", "train_shots"),
    *("keep_moment", "msl_epochs", "first_order_epochs", "iterations_per_epoch"),
)
"""Flags about data or iterations. They are no arguments here: the user's code controls both."""

Rate: TypeAlias = float | Tensor | Sequence[float | Tensor]
"""An inner rate; one for each inner step. A ``torch.nn.Parameter`` learns."""


class Flags(TypedDict, total=False):
    """The flags that are arguments of some meta-learner; `known` has those of each."""

    freeze: str | None
    inner_lr: Rate | Mapping[str, Rate]
    inner_steps: int
    eval_inner_steps: int | None
    inner_optimizer: Literal["sgd", "momentum", "adam", "adamw", "adam0"]
    inner_momentum: float
    order: Literal[1, 2]
    adapt: str | None
    label_smoothing: float
    context: int
    context_layer: str | None
    proximal: float
    cg_steps: int
    cg_damping: float
    cg_lambda: float | None
    pull: Literal["each-step", "end"]
    eval_proximal: float | None
    lslr: bool
    per_step_norm: bool
    inner_batch: int | None
    eval_inner_batch: int | None


def facts_of(kind: type) -> registry.LearnerFacts:
    """Return the facts of the learner that ``kind``, or its base in the family, names."""
    for base in kind.__mro__:
        if base.__module__ == "maml.library.family":
            name = base.__name__.lower().replace("metacurvature", "metacurv")
            return registry.learner(name)
    raise UserError(f"{kind.__name__} is no learner: derive it from maml.MAML or another")


def known(kind: type) -> list[str]:
    """Return the names of the flags that are arguments of the meta-learner ``kind``."""
    reads = ("freeze", *(facts_of(kind).reads or ()))
    layer = ("context_layer",) if "context" in reads else ()  # the network's own, in a program
    return [name for name in reads if name not in NOT_HERE] + [*layer]


class Signature:
    """The signature of a meta-learner that `help` shows: each flag with its type and default."""

    def __get__(self, instance: object, kind: type) -> inspect.Signature:
        """Return the signature of a class, unless it has an ``__init__`` of its own."""
        made = next(vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base))
        *own, last = inspect.signature(made, eval_str=True).parameters.values()
        if instance is not None or last.name != "flags":
            raise AttributeError("__signature__")
        try:
            names = known(kind)
        except UserError as error:  # it is no learner
            raise AttributeError("__signature__") from error
        types = get_type_hints(Flags)
        # As many steps at test as in training.
        other = {"order": 2, "context_layer": None, "eval_inner_steps": None}
        defaults = vars(Config()) | other
        by_name = inspect.Parameter.KEYWORD_ONLY
        flags = [
            inspect.Parameter(name, by_name, annotation=types[name], default=defaults[name])
            for name in names
        ]
        given = [each for each in own if each.name not in ("self", "more")]
        return inspect.Signature([*given, *flags])
