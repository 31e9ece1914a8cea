"""A table as files for other programs: numbers as CSV, and as LaTeX what the report shows."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maml.run.files import write_text

LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
    "±": r"$\pm$", "Δ": r"$\Delta$", "−": "$-$", "<": "$<$", ">": "$>$", "–": "--",
}  # fmt: skip
"""What LaTeX writes for characters that it would read as commands, or does not know."""


def write(
    path: Path, header: Sequence[str], rows: Sequence[Sequence[str]], numbers: dict[str, list[Any]]
) -> None:
    """Write ``path``.tex, in the form of the package booktabs, and ``path``.csv.

    Args:
        path: Without an ending.
        header: The titles of the columns as they are shown.
        rows: The cells of each row as they are shown.
        numbers: The columns of the CSV file: ``{title: [a value for each row]}``; None: empty.
    """
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerows([[*numbers], *zip(*numbers.values(), strict=True)])
    write_text(path.with_name(f"{path.name}.csv"), table.getvalue())
    lines = [" & ".join("".join(LATEX.get(c, c) for c in cell) for cell in row) for row in rows]
    titles = " & ".join("".join(LATEX.get(c, c) for c in title) for title in header)
    body = " \\\\\n".join(lines)
    text = (
        f"% \\usepackage{{booktabs}}\n\\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}\n\\toprule\n"
        f"{titles} \\\\\n\\midrule\n{body} \\\\\n\\bottomrule\n\\end{{tabular}}\n"
    )
    write_text(path.with_name(f"{path.name}.tex"), text)
