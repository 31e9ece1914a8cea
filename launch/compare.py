"""``python -m launch.compare A B …``: compare runs, and test whether one is better."""

from maml.__main__ import entry

if __name__ == "__main__":
    entry("compare")
