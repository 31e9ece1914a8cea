"""Commands around trainings: start one, sweep settings, compare learners, and the scripts."""
