"""A run directory: how its files are written and read."""
