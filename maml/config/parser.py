"""Flags from fields: an argument parser whose mistakes are one line each."""

import argparse
import contextlib
import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from datasets.components import is_theirs
from datasets.flags import MOST
from maml.config import registry
from maml.config.fields import FACTS, FLAGS, Config, flag
from maml.errors import UserError


class Parser(argparse.ArgumentParser):
    """Ours for every command: no flag may be shortened, and a mistake is a `UserError`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse all of ``args``; an unknown flag is told what it is near to."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = next((word for word in unknown if word.startswith("-")), unknown[0])
            if not word.startswith("-"):
                self.error(f"unexpected argument {word!r}")
            flags = list(self._option_string_actions)
            name = word.partition("=")[0]
            near = [flag for flag in flags if flag.endswith(name[1:])]  # --lr is --meta-lr, or …
            if not 0 < len(near) <= 3:
                near = difflib.get_close_matches(name, flags, n=1, cutoff=0.7)
            hint = f": did you mean {' or '.join(near)}?" if near else "; --help lists all flags"
            self.error(f"unknown flag {word}{hint}")
        return found

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        # As in "argument --ways: …", and "argument --transductive/--no-transductive: …".
        raise UserError(re.sub(r"^argument ", "", message).replace(": must be ", " must be ", 1))

    def print_help(self, file: Any = None) -> None:
        """Print the help at once: `run_program` sees a reader go, as ``head`` does."""
        print(self.format_help(), end="", flush=True)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of every text."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        split = super()._split_lines
        return [line for part in text.splitlines() for line in split(part, width)]


def add_trust(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--trust``, for what a file names; ``what``: the file, as the command has it."""
    text = f"import the code that {what} names (module:attribute): only if you trust its maker"
    parser.add_argument("--trust", action="store_true", help=text)


def add_here(parser: argparse.ArgumentParser) -> None:
    """Add what a run may have otherwise on this machine; see `maml.run.directory.config_here`."""
    parser.add_argument("--data-root", help="where the data sets are now (default: as in the run)")
    parser.add_argument("--device", help="cpu, cuda, cuda:N or auto (default: as in the run)")
    add_trust(parser, "the run's config.yaml")


def add_iteration(parser: argparse.ArgumentParser) -> None:
    """Add ``--iteration``: which checkpoint of a run; see `maml.evaluation.best.content_of`."""
    text = "the checkpoint after iteration N, or the kept one that validated best (default: what "
    text += "the run tests: the last, or as its --test-model says)"
    parser.add_argument("--iteration", metavar="N|best", help=text)


def add_fields(parser: argparse.ArgumentParser, default: Config) -> None:
    """Add a flag for every field, in groups; the last has those that ``default`` does not read."""
    types = get_type_hints(Config)
    groups: dict[str, Any] = {}
    title = {name: FACTS[name].group if _is_read(name, default) else OTHERS for name in FLAGS}
    for name in sorted(FLAGS, key=lambda name: title[name] == OTHERS):
        facts = FACTS[name]
        if title[name] not in groups:
            groups[title[name]] = parser.add_argument_group(title[name])
        text = f"{_readers(name)}{facts.help} (default: {getattr(default, name)})"
        if facts.names:
            known = registry.known(name)
            text += "".join(f"\n  {each.name}: {each.help}" for each in known.values())
            text += "\n  or module:attribute, for one of your own; with arguments of its own: "
            text += "module:attribute(name=value)"
        type_ = types[name]
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if get_origin(type_) is Literal:
            options = {"choices": get_args(type_)}
        elif type_ is not bool:
            plain = next((each for each in get_args(type_) if each is not type(None)), type_)
            metavar = "NAME" if facts.names else plain.__name__.upper()
            options = {"type": _reader(plain, optional=plain is not type_), "metavar": metavar}
        options |= {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        groups[title[name]].add_argument(flag(name), **options)


OTHERS = "other learners, networks, data sets and strategies"


def _is_read(name: str, config: Config) -> bool:
    """Say whether a field has an effect with the components of ``config``, as far as is known."""
    for kind in registry.KINDS:
        if is_theirs(getattr(config, kind)):
            continue  # it may read any
        chosen = registry.find(kind, getattr(config, kind)).reads
        if chosen is not None and name not in chosen and registry.readers(kind, name):
            return False
    return True


def _readers(name: str) -> str:
    """Return, to put before a field's help, the few components that read it."""
    for kind in registry.KINDS:
        readers = registry.readers(kind, name)
        if 0 < len(readers) <= min(3, len(registry.known(kind)) - 1):
            with_value = FACTS[name].read_with
            return f"{', '.join(readers) if with_value is None else with_value[1]}: "
    return ""


def _reader(plain: type, *, optional: bool) -> Callable[[str], Any]:
    """Return what reads a field's value, or None where that is ``optional``."""
    readers: dict[type, Callable[[str], Any]] = {int: whole_number, float: number, str: str}
    read = readers[plain]
    return lambda text: None if optional and text in ("None", "none") else read(text)


def whole_number(text: str) -> int:
    """Read an integer, be it written ``1000`` or ``1e3``."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if float(text).is_integer():
            return int(float(text))
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads an integer from ``least`` to `MOST`."""

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
    """Read a number; ``nan`` and ``inf`` are refused elsewhere, by name."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
