"""What a model scores, over tasks and by class; and which of a run's models validated best."""
