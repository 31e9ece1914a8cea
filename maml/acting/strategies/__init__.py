"""Strategies for those who act: an agent and its observers."""
