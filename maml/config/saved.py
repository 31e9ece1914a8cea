"""A run's ``config.yaml``, read back into a `Config`."""

from __future__ import annotations

from pathlib import Path

from maml.config import registry
from maml.config.checks import check_values
from maml.config.fields import Config, from_values
from maml.errors import UserError


def read(path: Path, *, own: bool = True) -> Config:
    """Return the configuration that a run's ``config.yaml`` holds.

    Args:
        path: The file.
        own: Whether to import a user's own components, which may be elsewhere now. What only looks
            at numbers needs none of them.

    Raises:
        UserError: naming the file, if there is none, it is of another version of this project, or
            its values cannot work.
    """
    # Imported late: flags are checked before there is an environment (launch/flags_first.py).
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
            raise UserError("damaged or empty: no mapping of values called config")
        config = from_values(content["config"])
        check_values(config, own=False)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: not a run directory") from error
    except (yaml.YAMLError, ValueError, RecursionError, UserError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: not a configuration of this version: {reason}") from error
    if own and registry.has_theirs(config):
        # What is wrong has nothing to do with a version: its file is not found, or is another now.
        try:
            check_values(config)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
    return config
