"""``python -m launch.table``: the published tables beside ours, from the records alone."""

from maml.__main__ import entry

if __name__ == "__main__":
    entry("table")
