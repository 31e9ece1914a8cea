"""The parts of a training run: `maml.trainer` has the loop, and the files here support it."""
