"""Meta-learning with one definition of a meta-gradient for every topology.

As a library (docs/library.md)::

    maml.load("runs/…").adapt(support_x, support_y).predict(query_x)
    maml.episodes("omniglot", split="test", ways=5, shots=1).task(0)
    maml.meta_gradient(state, meta_params, tasks)

Each name is imported at its first use. So ``import maml`` does not load torch, and ``--help`` or
the error for a mistyped flag appears at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # "as" marks a name as public for type checkers
    from maml.errors import UserError as UserError
    from maml.errors import WorkerLostError as WorkerLostError
    from maml.library.family import *  # noqa: F403
    from maml.library.fast_module import FastModule as FastModule
    from maml.library.gradient import meta_gradient as meta_gradient
    from maml.library.joining import distributed as distributed
    from maml.library.meta_learner import MetaLearner as MetaLearner
    from maml.library.model import AdaptedModel as AdaptedModel
    from maml.library.model import Model as Model
    from maml.library.model import from_pretrained as from_pretrained
    from maml.library.model import load as load
    from maml.library.tasks import Tasks as Tasks
    from maml.library.tasks import episodes as episodes
    from maml.metagradient.differentiate import OuterGradient as OuterGradient
    from maml.metagradient.problem import Implicit as Implicit
    from maml.metagradient.problem import Problem as Problem
    from maml.metagradient.problem import Transform as Transform

_FROM = {
    "maml.errors": ("UserError", "WorkerLostError"),
    "maml.library.gradient": ("meta_gradient",),
    "maml.library.model": ("AdaptedModel", "Model", "from_pretrained", "load"),
    "maml.library.joining": ("distributed",),
    "maml.library.family": (
        *("ANIL", "BOIL", "CAVIA", "IMAML", "MAML", "MAMLpp", "MetaCurvature"),
        *("MetaSGD", "ProtoNet", "R2D2", "Reptile"),
    ),
    "maml.library.fast_module": ("FastModule",),
    "maml.library.meta_learner": ("MetaLearner",),
    "maml.library.tasks": ("Tasks", "episodes"),
    "maml.metagradient.differentiate": ("OuterGradient",),
    "maml.metagradient.problem": ("Implicit", "Problem", "Transform"),
}
_MODULE_OF = {name: module for module, names in _FROM.items() for name in names}

__all__ = sorted((*_MODULE_OF, "nn"))


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("maml.nn")
    if name not in _MODULE_OF:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; docs/migration.md has the calls of "
            "other libraries"
        )
    importlib.import_module("maml.params")  # first, because it looks at torch's version
    from datasets.errors import needs

    with needs("train", f"maml.{name}"):
        return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    # List only the public names, not the modules that define them.
    return __all__
