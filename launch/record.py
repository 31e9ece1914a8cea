"""``python -m launch.record RUN_DIR``: keep a record of a finished run for the tables."""

from maml.__main__ import entry

if __name__ == "__main__":
    entry("record")
