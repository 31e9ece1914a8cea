"""Meta-learning with one definition of a meta-gradient, whatever the topology.

Imports run downwards only: ``trainer`` → ``strategies`` → ``worker`` → ``learners`` → ``inner``,
``models``, ``objectives`` → ``config``, ``errors``; ``datasets`` never imports ``maml``.
"""
