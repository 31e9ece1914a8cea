"""What ``import maml`` offers beside the meta-gradient: a model to adapt, and tasks by id."""
