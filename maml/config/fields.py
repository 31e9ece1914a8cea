"""The configuration: one frozen, flat dataclass; every field is a flag of the same name."""

from dataclasses import dataclass
from dataclasses import replace as with_values
from pathlib import Path
from typing import Any

from maml.config.flags import HOST, RESULT, SAME_RUN, Role, facts_of
from maml.config.learning import Data, Learner, OuterLoop
from maml.config.running import Distribution, Evaluation, Output
from maml.errors import UserError

__all__ = ["with_values"]  # mypy knows what `dataclasses.replace` takes


@dataclass(frozen=True)
class Row:
    """The fields that describe a preset. They are not flags."""

    preset: str = ""
    source: str = ""
    published: float | None = None
    claim: str = ""  # as in the published table, with its interval and its kind ("ensemble")


@dataclass(frozen=True)
class Config(Output, Evaluation, Distribution, OuterLoop, Data, Learner, Row):
    """All flags, and what describes a preset. The fields of the last base come first."""


FACTS = facts_of(Config)
"""The `FieldFacts` of each field, by name."""
FLAGS = tuple(name for name, facts in FACTS.items() if facts.group)
"""The fields that are flags."""


def _with_role(role: Role) -> tuple[str, ...]:
    return tuple(name for name, facts in FACTS.items() if facts.role is role)


MUST_MATCH = _with_role(SAME_RUN)
"""Fields in which a resumed run must match its beginning."""
OF_THE_RESULT = _with_role(RESULT)
"""Further fields that a result depends on. A resumed run may change them."""
CHOOSING = tuple(name for name, facts in FACTS.items() if facts.chooses)
"""Fields that define a validation. With ``--test-model best``, validations choose the model."""
OF_A_CHECKPOINT = tuple(dict.fromkeys((*MUST_MATCH, *CHOOSING, *OF_THE_RESULT)))
"""Fields that a checkpoint saves."""
OF_A_HOST = _with_role(HOST)
"""Fields that describe a host, or that only rank 0 reads. They may differ between processes, and no
result depends on them."""


def must_match(config: Config) -> tuple[str, ...]:
    """Return the fields in which a run that resumes with ``config`` must match its beginning."""
    # The same kind of validation must choose all models that are kept as the best.
    choosing = CHOOSING if config.test_model == "best" or config.keep_best else ()
    # If the rate falls over the whole run, every step depends on the length of the run.
    falls = config.meta_schedule in ("linear", "cosine")
    end = ("iterations" if config.epochs is None else "epochs",) if falls else ()
    return (*MUST_MATCH, *choosing, *end)


def settings(config: Config) -> tuple[str, ...]:
    """Return the fields that a result of ``config`` depends on, including the seed."""
    choosing = CHOOSING if config.test_model == "best" else ()
    names = dict.fromkeys((*MUST_MATCH, *choosing, *OF_THE_RESULT))
    # The number of iterations follows from --epochs.
    return tuple(name for name in names if name != "iterations" or config.epochs is None)


def from_values(values: dict[str, Any]) -> Config:
    """Return a `Config` with ``values``. A `UserError` names an unknown field or a wrong value."""
    values = dict(values)
    for name, value in values.items():
        if name not in FACTS:
            raise UserError(f"unknown field {name!r}")
        facts = FACTS[name]
        if facts.type is float and type(value) is int:
            value = values[name] = float(value)  # else 1 and 1.0 would name two experiments
        fits = value in facts.choices if facts.choices else type(value) is facts.type
        if not fits and not (facts.optional and value is None):
            one = f"one of {', '.join(facts.choices)}" if facts.choices else facts.type.__name__
            raise UserError(f"{name}: {value!r} is not {one}")
    return Config(**values)


def user_path(name: str, value: str) -> Path:
    """Return a flag's value as a path. Expand ``~``, because a shell does not do so in quotes."""
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise UserError(f"{flag(name)} {value}: {error}") from error


def flag(name: str) -> str:
    """Return the command-line spelling of a field."""
    return "--" + name.replace("_", "-")
