"""Commands around a training: start it, sweep it, compare it, and print its tables."""
