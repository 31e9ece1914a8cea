"""Compiled passes over a stack of convolutional blocks."""
