"""The configuration: its fields, what they may be, presets, and the command line."""

from maml.config.fields import (
    FLAGS,
    MUST_MATCH,
    OF_A_CHECKPOINT,
    OF_A_HOST,
    OF_THE_RESULT,
    Config,
    default_data_root,
    flag,
    from_values,
    must_match,
    settings,
    user_path,
)

__all__ = [
    "FLAGS",
    "MUST_MATCH",
    "OF_A_CHECKPOINT",
    "OF_A_HOST",
    "OF_THE_RESULT",
    "Config",
    "default_data_root",
    "flag",
    "from_values",
    "must_match",
    "settings",
    "user_path",
]
