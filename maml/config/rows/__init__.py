"""The rows of published tables, as values of `Config`: a file for each data set or kind of it."""

from maml.config.fields import Config
from maml.config.rows import classifiers, glyphs, miniimagenet, omniglot, policies, regression

ROWS: tuple[Config, ...] = (
    *glyphs.ROWS,
    *omniglot.ROWS,
    *miniimagenet.ROWS,
    *regression.ROWS,
    *classifiers.ROWS,
    *policies.ROWS,
)
