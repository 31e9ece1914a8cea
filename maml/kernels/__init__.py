"""Compiled passes over a stack of convolutional blocks, and the interface of derivatives."""
