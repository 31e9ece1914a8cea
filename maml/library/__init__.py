"""The library behind ``import maml``: meta-learners, trained models, tasks, meta-gradients."""
