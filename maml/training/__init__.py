"""What a training run is made of: `maml.trainer` has the loop, each file here a companion of it."""
