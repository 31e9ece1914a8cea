"""``python -m launch.sweep FILE``: run the trials of a sweep, without a server."""

from maml.__main__ import entry

if __name__ == "__main__":
    entry("sweep")
