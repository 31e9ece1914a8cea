"""The one error a user of the data sets has to read."""

from __future__ import annotations


class DataError(ValueError):
    """Data is missing, damaged, or asked for as it cannot serve: a line says what to change."""
