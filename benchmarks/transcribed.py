"""Records whose raw files are gone: numbers copied from a document, which the record names.

Such a record says in ``source`` where its numbers stand and with what precision they were given,
in ``columns`` how each field is shown, and in ``rows`` the numbers. Nothing here measures.
"""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import grid


def table(record: dict[str, Any], *fields: str) -> str:
    """Return ``record`` as Markdown; with ``fields``, only these columns, in this order.

    A column is ``{field: {"title": …, "format": …}}``; a list fills several places of its format.
    A row that lacks a field shows a dash.
    """
    columns = record["columns"]
    shown = fields or tuple(columns)

    def cell(row: dict[str, Any], field: str) -> str:
        value = row.get(field)
        if value is None:
            return "–"
        values = value if isinstance(value, list) else [value]
        return str(columns[field].get("format", "{}").format(*values))

    return grid(
        [columns[field]["title"] for field in shown],
        [[cell(row, field) for field in shown] for row in record["rows"]],
    )
