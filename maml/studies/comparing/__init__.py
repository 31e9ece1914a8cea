"""Comparisons of learners: the parts of ``python -m launch.compare``."""
