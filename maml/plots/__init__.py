"""Pictures of runs: ``python -m maml.plots RUN_DIR…``."""
