"""Environments to act in: acting produces the data of their tasks."""
