"""Tables in Markdown: what every benchmark prints, and what the documents show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maml.studies.markdown import grid


def table(record: Mapping[str, Any], setting: str | None = None) -> str:
    """Return a benchmark's record as Markdown, as the record itself says: the one record format.

    A record has ``rows``, each with its figures by name, and ``columns``: what stands above each,
    and how it is made of a row's figures, as ``str.format`` takes it. A row that lacks a figure has
    a dash; a column that no row has is left out. ``caption``, if there is one, comes first.

    Args:
        record: What ``--json`` has written.
        setting: Which of its ``records`` to show, where it has several.

    Raises:
        KeyError: naming what the record lacks.
    """
    if setting is not None:
        found = {each["setting"]: each for each in record["records"]}
        record = found[setting]
    columns = {
        title: [_cell(shown, row) for row in record["rows"]]
        for title, shown in record["columns"].items()
    }
    columns = {title: cells for title, cells in columns.items() if set(cells) != {"–"}}
    caption = f"{record['caption']}\n\n" if "caption" in record else ""
    return caption + grid(list(columns), zip(*columns.values(), strict=True))


def _cell(shown: str, row: Mapping[str, Any]) -> str:
    try:
        return shown.format_map(row)
    except (KeyError, TypeError):  # it has no such figure, or None
        return "–"
