"""``python -m launch.compare A B …``: is one better than the other, and how sure is that."""

from maml.__main__ import entry

if __name__ == "__main__":
    entry("compare")
