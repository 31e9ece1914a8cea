"""The rows of published tables, as values of `Config`: one file a family."""

from __future__ import annotations

from maml.config.fields import Config
from maml.config.rows import classifiers, few_shot, policies

ROWS: tuple[Config, ...] = (*few_shot.ROWS, *classifiers.ROWS, *policies.ROWS)
