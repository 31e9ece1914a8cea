"""Read a run's ``config.yaml`` back into a `Config`."""

import re
from pathlib import Path
from typing import Any

from datasets.errors import needs
from datasets.theirs import FromFile
from datasets.whole import regular
from maml.config import registry
from maml.config.checks import check_values
from maml.config.fields import Config, flag, from_values, with_values
from maml.errors import UserError

GONE = {"precision": "float32", "estimator": "dice"}
"""Removed fields of earlier versions, each with its value that is now fixed."""


def read(path: Path, *, trust: bool = False) -> Config:
    """Return the configuration in a run's ``config.yaml``. A `UserError` names the file.

    With ``trust``, a user's own components in that file are imported. Without it, they stay names
    (`datasets.theirs.FromFile`). Importing such a name is an error, but reading numbers is not.
    """
    with needs("train", f"to read {path}"):
        import yaml  # noqa: F401
    try:
        content = content_of(path)
        if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
            raise UserError("damaged or empty: no mapping of values called config")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: not a run directory") from error
    except (ValueError, RecursionError, UserError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: not a configuration of this version: {reason}") from error
    return of_values(content["config"], path, trust=trust)


def of_values(values: dict[str, Any], path: Path, *, trust: bool = False) -> Config:
    """Return the configuration with these ``values``, which a file has; see `read`."""
    try:
        kept = {n: v for n, v in values.items() if n not in GONE or v != GONE[n]}
        config = from_values(kept)
        if not re.fullmatch(r"[\w.+-]*\w|", config.preset):
            raise UserError(f"preset {config.preset!r}: cannot name a folder")  # the run directory
        check_values(config, own=False)
    except (ValueError, UserError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: not a configuration of this version: {reason}") from error
    names = registry.theirs(config)
    if not names:
        return config
    if trust:
        # This error is not about a version: a component's file is missing or has changed.
        try:
            check_values(config)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        return config
    listed = (f"{flag(kind)} {name}" for kind, name in names.items())
    said = f"{path}: it names code to import: {' and '.join(listed)}"
    named: dict[str, Any] = {kind: FromFile(name, said) for kind, name in names.items()}
    return with_values(config, **named)


def content_of(path: Path) -> Any:
    """Return what a config.yaml holds, or raise OSError or ValueError. Refuse YAML's aliases, by
    which a few bytes become gigabytes: `maml.run.directory.write_config` writes none.
    """
    # Imported here, because most commands need no YAML and must check their flags quickly.
    import yaml

    class Plain(yaml.SafeLoader):
        def compose_node(self, *where: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has an alias of YAML (*name): write out what it stands for")
            return super().compose_node(*where)

    try:
        return Plain(regular(path).read_text(encoding="utf-8")).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def believed(config: Config) -> Config:
    """Return a configuration from `read` with its components trusted, as by ``--trust``."""
    named: dict[str, Any] = {kind: str(n) for kind, n in registry.theirs(config).items()}
    return with_values(config, **named)
