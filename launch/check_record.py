"""``python -m launch.check_record DIR``: whether a record's model scores what the record says."""

from maml.__main__ import entry

if __name__ == "__main__":
    entry("check")
