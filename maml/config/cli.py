"""The command line: turn ``PRESET --flag value …`` into a `Config`, with one-line errors."""

from collections.abc import Sequence
from typing import Any

from maml.config import FLAGS, Config, flag, saved, user_path
from maml.config.checks import check
from maml.config.fields import FACTS
from maml.config.parser import Parser, add_fields, add_trust
from maml.config.presets import PRESETS, describe, hint, with_values
from maml.errors import Done, UserError

AGAIN = "--config"
"""Stands in place of PRESET. The config.yaml of the run to repeat follows."""
CHOSEN = {"strategy": ("local", "rpc", "observers"), "batching": ("vmap",)}
"""What "auto" may have chosen for a run; another number of processes or network needs it anew."""
LIST = "--presets"
"""Stands in place of PRESET, and lists all presets."""


def parse(arguments: Sequence[str]) -> Config:
    """Turn ``PRESET --flag value …`` into a checked `Config`.

    Tests follow the training: ``--inner-steps`` without ``--eval-inner-steps`` sets both, as in the
    library, because a test of another length would compare settings that differ twice.

    ``--config RUN_DIR/config.yaml --flag value …`` starts from all values of that run, except
    ``run_dir``, ``resume`` and what is `CHOSEN`. If that file names a user's own component, the
    command line must name the component again, or give ``--trust``.
    """
    if not arguments:
        raise UserError("no PRESET given; `train_maml.py --presets` lists them all")
    name, *flags = arguments
    if name.startswith(f"{AGAIN}="):
        name, flags = AGAIN, [name.partition("=")[2], *flags]
    if name == LIST:
        print(describe())
        raise Done(0)
    if name in ("-h", "--help"):
        name, flags = "maml-glyphs-5way-1shot", ["--help"]
    if name == AGAIN:
        base, flags = _again(*flags[:1]), flags[1:]
    elif name in PRESETS:
        base = PRESETS[name]
    elif name.startswith("-"):
        raise UserError(f"{name}: the PRESET comes before the flags; `--presets` lists them all")
    else:
        raise UserError(f"unknown preset {name!r}: {hint(name)}")
    given = vars(_parser(base).parse_args(list(map(_as_spelled, flags))))
    if given.pop("trust"):
        if name != AGAIN:
            raise UserError(f"--trust: is for {AGAIN} FILE; what you name yourself needs no trust")
        base = saved.believed(base)
    if "inner_steps" in given:
        given.setdefault("eval_inner_steps", given["inner_steps"])
    config = with_values(base, **given)
    check(config, base)
    # config.yaml keeps absolute paths, because a run may go on from another folder.
    paths = {name: getattr(config, name) for name in ("data_root", "init")}
    absolute: dict[str, Any] = {
        n: str(user_path(n, path).absolute()) for n, path in paths.items() if path
    }
    return with_values(config, **absolute)


def _again(file: str = "") -> Config:
    """Return the configuration that ``--config FILE`` names."""
    if not file:
        raise UserError(f"{AGAIN}: needs the config.yaml of a run")
    path = user_path("config", file)
    config = saved.read(path / "config.yaml" if path.is_dir() else path)
    anew = [name for name, values in CHOSEN.items() if getattr(config, name) in values]
    auto: dict[str, Any] = dict.fromkeys(anew, "auto")
    return with_values(config, run_dir=None, resume="auto", **auto)


def _parser(default: Config) -> Parser:
    parser = Parser(
        prog="train_maml.py PRESET",
        usage="%(prog)s [--flag value …]\n"
        f"       train_maml.py {AGAIN} RUN_DIR/config.yaml [--flag value …]\n"
        f"       train_maml.py {LIST}",
        description="Train a few-shot learner or a classifier. PRESET fills every flag."
        f"\n\n{LIST}: all presets, with sources and published numbers."
        "\nPRESET --help: first the flags that this preset reads, with its values.",
    )
    add_trust(parser, f"the file of {AGAIN}")
    add_fields(parser, default)
    return parser


def _as_spelled(word: str) -> str:
    """Return ``--inner_lr`` as ``--inner-lr``, and a sweep's ``--x=False`` as ``--no-x``."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    name = name.replace("_", "-")
    if value in ("True", "False", "true", "false") and name.removeprefix("--") in _SWITCHES:
        return name if value in ("True", "true") else f"--no-{name.removeprefix('--')}"
    return name + equals + value


_SWITCHES = {flag(n).removeprefix("--") for n in FLAGS if FACTS[n].type is bool}
