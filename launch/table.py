"""``python -m launch.table``: the published results next to ours, from the records."""

from maml.__main__ import entry

if __name__ == "__main__":
    entry("table")
