"""What was found: records and their table, sweeps, comparisons; ``launch/`` has the commands."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
