"""Compiled passes over a stack of convolutional blocks, and what derivatives are."""
