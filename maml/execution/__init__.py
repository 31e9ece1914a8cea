"""Execution of a meta-gradient: compilation, threads, prefetch of tasks, timing."""
