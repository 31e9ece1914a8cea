"""The configuration: its fields, what they may be, presets, and the command line."""

from maml.config.fields import FLAGS as FLAGS
from maml.config.fields import MUST_MATCH as MUST_MATCH
from maml.config.fields import OF_A_CHECKPOINT as OF_A_CHECKPOINT
from maml.config.fields import OF_A_HOST as OF_A_HOST
from maml.config.fields import OF_THE_RESULT as OF_THE_RESULT
from maml.config.fields import Config as Config
from maml.config.fields import default_data_root as default_data_root
from maml.config.fields import flag as flag
from maml.config.fields import from_values as from_values
from maml.config.fields import must_match as must_match
from maml.config.fields import settings as settings
from maml.config.fields import user_path as user_path
