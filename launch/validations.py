"""Validations of records beside one another, while they were trained, as a table of a document.

A document asks for it as for `launch.table`, with iterations among the words: see
`benchmarks.tables`.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.markdown import grid
from launch import recorded
from launch.recorded import Record
from launch.table import fits, spread
from launch.table import measured_on as on
from maml.config.presets import PRESETS, experiment
from maml.run.files import read_rows
from maml.scores import headline


def table(records: Path, *words: str) -> str:
    """Return, as Markdown, what records scored on validation tasks after some iterations.

    Args:
        records: Where they are.
        words: Iterations, as numbers, and patterns of presets' names, of which one must fit.
    """
    asked = [int(word) for word in words if word.isdecimal()]
    order = {name: i for i, name in enumerate(PRESETS)}
    found = [r for r in recorded.find(records) if fits(r, _patterns(words))]
    # Of a preset that is gone, last.
    found.sort(
        key=lambda r: (order.get(r.config.preset, len(order)), len(r.changed), r.config.seed)
    )
    return grid(
        ["preset", "seed", *(f"after {iteration:,}" for iteration in asked)],
        [
            [f"`{experiment(r.config)}`", str(r.config.seed), *(_cell(r, i) for i in asked)]
            for r in found
        ],
    )


def measured_on(records: Path, *words: str) -> str:
    """Return a sentence: on what the records of `table` were made, for the same arguments."""
    return on(records, *_patterns(words))


def _patterns(words: tuple[str, ...]) -> list[str]:
    return [word for word in words if not word.isdecimal()]


def _cell(record: Record, iteration: int) -> str:
    for row in read_rows(record.folder / "metrics.jsonl"):
        if row.get("split") == "validation" and row["iteration"] == iteration:
            judged = headline(row)
            name = judged if record.config.transductive else f"non_transductive_{judged}"
            return spread([row[name]], row.get(f"{name}_ci95"), judged)
    return "–"
