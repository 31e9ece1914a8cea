"""The tests; they mirror the rooms of the project.

A package, because an installed distribution may bring a ``tests`` of its own.
"""
