"""Strategies that act in environments: an agent and its observers."""
