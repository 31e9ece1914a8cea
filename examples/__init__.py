"""Programs to read and to run, each one file."""
