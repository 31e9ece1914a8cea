"""How studies are run: sweeps over settings, comparisons of learners. Beside them, the scripts."""
