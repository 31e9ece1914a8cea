"""Environments to act in: their tasks materialise by acting."""
