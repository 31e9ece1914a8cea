"""``python -m launch.study SWEEP_FOLDER``: keep what a sweep has found."""

from maml.__main__ import entry

if __name__ == "__main__":
    entry("study")
