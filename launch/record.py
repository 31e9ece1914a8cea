"""``python -m launch.record RUN_DIR``: keep what a table shows of a finished run."""

from maml.__main__ import entry

if __name__ == "__main__":
    entry("record")
