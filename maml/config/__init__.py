"""The configuration: its fields, their allowed values, the presets, and the command line."""

from maml.config.fields import FLAGS as FLAGS
from maml.config.fields import OF_A_HOST as OF_A_HOST
from maml.config.fields import Config as Config
from maml.config.fields import flag as flag
from maml.config.fields import user_path as user_path
