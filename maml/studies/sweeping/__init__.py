"""Sweeps without a server: the parts of ``python -m launch.sweep``."""
