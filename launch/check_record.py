"""``python -m launch.check_record DIR``: check that a record's model has its accuracies."""

from maml.__main__ import entry

if __name__ == "__main__":
    entry("check")
