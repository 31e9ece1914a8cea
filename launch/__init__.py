"""Commands to start trainings, sweep settings and compare learners, and shell scripts."""
