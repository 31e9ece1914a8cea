"""Flags from fields: an argument parser whose mistakes are one line each."""

import argparse
import contextlib
import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from maml.config import registry
from maml.config.fields import FACTS, FLAGS, Config, flag
from maml.config.flags import MOST, FieldFacts
from maml.errors import Done, UserError


class Parser(argparse.ArgumentParser):
    """The parser of every command. No flag may be shortened, and a mistake is a `UserError`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse all of ``args``. The error for an unknown flag suggests similar flags."""
        for word in args or ():
            if word.startswith("--") and word.endswith("=--"):  # argparse makes a list of it
                self.error(f"{word}: -- is no value")
        namespace, unknown = self.parse_known_args(args)
        if unknown:
            word = next((word for word in unknown if word.startswith("-")), unknown[0])
            if not word.startswith("-"):
                self.error(f"unexpected argument {word!r}")
            near = self._near(word.partition("=")[0])
            hint = f": did you mean {' or '.join(near)}?" if near else "; --help lists all flags"
            self.error(f"unknown flag {word}{hint}")
        return namespace

    def _near(self, word: str) -> list[str]:
        """Return the flags, or the flags with a value, that an unknown ``word`` may mean."""
        actions = self._option_string_actions
        for known, action in actions.items():
            for value in action.choices or ():
                if word == f"--{value}-{known[2:]}":
                    return [f"{known} {value}"]  # --first-order is --order first
        word = word.replace("outer", "meta")
        if word in actions:
            return [word]
        begun = [known for known in actions if known.startswith(word)]
        for near in (begun, [known for known in actions if known.endswith(word[1:])]):
            if 0 < len(near) <= 3:  # --lr is --meta-lr, or …
                return near
        close = difflib.get_close_matches(word, actions, n=5, cutoff=0.7)
        return sorted(close, key=lambda known: not known.startswith(word[:6]))[:1]

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        # argparse writes "argument --ways: …" or "argument --transductive/--no-transductive: …".
        raise UserError(re.sub(r"^argument ", "", message).replace(": must be ", " must be ", 1))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End after the help, as `run_program` tells apart from a user's ``sys.exit``."""
        raise Done(status)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that keeps the line breaks of every text."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        split = super()._split_lines
        return [line for part in text.splitlines() for line in split(part, width)]


def add_trust(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--trust`` for code that a file names. ``what`` describes the file in the help."""
    text = f"import the code that {what} names (module:attribute): only if you trust its maker"
    parser.add_argument("--trust", action="store_true", help=text)


def add_here(parser: argparse.ArgumentParser) -> None:
    """Add flags that may replace a run's values here; see `maml.run.directory.config_here`."""
    parser.add_argument("--data-root", help="where the data sets are now (default: as in the run)")
    parser.add_argument("--device", help="cpu, cuda, cuda:N or auto (default: as in the run)")
    add_trust(parser, "the run's config.yaml")


def add_iteration(parser: argparse.ArgumentParser) -> None:
    """Add ``--iteration``, which chooses a checkpoint; see `maml.evaluation.best.content_of`."""
    text = "the checkpoint after iteration N, or the kept one that validated best (default: what "
    text += "the run tests: the last, or as its --test-model says)"
    parser.add_argument("--iteration", metavar="N|best", help=text)


def add_fields(parser: argparse.ArgumentParser, default: Config) -> None:
    """Add a flag for every field, in groups. The last group: flags that ``default`` ignores."""
    groups: dict[str, Any] = {}
    unread = {name: not registry.is_read(name, default) for name in FLAGS}
    for name in sorted(FLAGS, key=unread.__getitem__):
        facts = FACTS[name]
        title = OTHERS if unread[name] else facts.group
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        said, _, unset = facts.help.removesuffix("].").partition(" [")  # [what None means]
        value = (unset or "none") if getattr(default, name) is None else getattr(default, name)
        text = f"{_readers(name)}{said.removesuffix('.')} (default: {value})"
        if name in registry.KINDS:
            known = registry.known(name)
            text += "".join(f"\n  {one.name}: {one.help}" for one in known.values())
            text += "\n  or module:attribute, for one of your own; with arguments of its own: "
            text += "module:attribute(name=value)"
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if facts.choices:
            options = {"choices": facts.choices}
        elif facts.type is not bool:
            metavar = "NAME" if name in registry.KINDS else facts.type.__name__.upper()
            options = {"type": _reader(facts), "metavar": metavar}
        options |= {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        groups[title].add_argument(flag(name), **options)


OTHERS = "other learners, networks, data sets and strategies"


def _readers(name: str) -> str:
    """Return a prefix for a field's help: the few components, or the value, that it is for."""
    for kind in registry.KINDS:
        readers = registry.readers(kind, name)
        if 0 < len(readers) <= min(3, len(registry.known(kind)) - 1):
            with_value = FACTS[name].read_with
            return f"{', '.join(readers) if with_value is None else with_value[1]}: "
    return ""


def _reader(facts: FieldFacts) -> Callable[[str], Any]:
    """Return a function that reads a field's value, and "none" as None if it may be None."""
    readers: dict[type, Callable[[str], Any]] = {int: whole_number, float: number, str: str}
    read = readers[facts.type]
    return lambda text: None if facts.optional and text in ("None", "none") else read(text)


def whole_number(text: str) -> int:
    """Read an integer that is written as ``1000`` or ``1e3``."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if float(text).is_integer():
            return int(float(text))
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")


def at_least(least: int) -> Callable[[str], int]:
    """Return a function that reads an integer from ``least`` to `MOST`."""

    def read(text: str) -> int:
        value = whole_number(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        if value > MOST:
            raise argparse.ArgumentTypeError(f"must be at most {MOST}, not {value}")
        return value

    return read


def positive(text: str) -> float:
    """Read a number above zero."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, not {value}")
    return value


def number(text: str) -> float:
    """Read a number. Later checks refuse ``nan`` and ``inf``, and name the flag."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
