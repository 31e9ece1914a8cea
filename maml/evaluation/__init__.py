"""Score models over tasks, and find the model of a run that validated best."""
