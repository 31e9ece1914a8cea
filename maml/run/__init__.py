"""A run directory: what is written there, when, and by whom."""
