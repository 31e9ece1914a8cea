"""Studies of runs: records and their table, sweeps, comparisons; ``launch/`` has the commands."""

from collections.abc import Iterable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, its columns padded so that a terminal shows them aligned."""
    cells = [list(header), *map(list, rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(n) for cell, n in zip(row, widths, strict=True))} |"
        for row in cells
    )
