"""Programs to read, and to begin from."""
