"""``python -m launch.table``: the published tables beside ours, from the records alone.

A row is a preset that names a published number. What was not run says "not run".
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.markdown import grid
from launch import recorded
from launch.recorded import Record
from maml.config.parser import Parser
from maml.config.presets import PRESETS

HEADER = (
    "preset", "published", "ours", "seeds", "test tasks a seed", "non-transductive", "minutes",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = Parser(prog="python -m launch.table", description="Print the table of all records.")
    parser.add_argument("--records", type=Path, default=recorded.RECORDS, help="where they are")
    parser.add_argument("--run", action="store_true", help="leave out what was not run")
    options = parser.parse_args(arguments)
    print(table(options.records, *(["run"] if options.run else [])))
    return 0


def table(records: Path, *words: str) -> str:
    """Return the table in Markdown; with the word ``run``, without rows that were not run."""
    of_preset: defaultdict[str, list[Record]] = defaultdict(list)
    if any(records.glob("**/record.json")):
        for record in recorded.find(records):
            of_preset[record.config.preset].append(record)
    rows = []
    for name, preset in PRESETS.items():
        if name in of_preset:
            rows.append(_row(name, preset.published, of_preset[name]))
        elif preset.published is not None and "run" not in words:
            published = f"{100 * preset.published:g} %"
            rows.append((f"`{name}`", published, "not run", "–", "–", "–", "–"))
    return grid(HEADER, rows)


def _row(name: str, published: float | None, records: list[Record]) -> tuple[str, ...]:
    """Return the row of a preset's seeds.

    One seed has the interval over its tasks. Of several, the mean, and the spread of their means.
    """
    changed = sorted({key for record in records for key in record.result["changed"]})
    # Another experiment has no published number beside it.
    claimed = f"{100 * published:g} %" if published is not None and not changed else "–"
    name = f"`{name}`" + (f", other {', '.join(changed)}" if changed else "")
    headline = _spread([r.result["accuracy"] for r in records], records[0].result.get("ci95"))
    other = _spread(
        [r.result["non_transductive_accuracy"] for r in records],
        records[0].result.get("non_transductive_accuracy_ci95"),
    )
    seeds = ", ".join(str(record.config.seed) for record in records)
    tasks = "–".join(sorted({f"{record.result['tasks']:,}" for record in records}))
    minutes = statistics.median(record.made["minutes"] for record in records)
    return name, claimed, headline, seeds, tasks, other, f"{minutes:.0f}"


def _spread(values: list[float], ci95: float | None) -> str:
    mean = f"{100 * statistics.mean(values):.2f}"
    if len(values) == 1:
        return f"{mean} ± {100 * ci95:.2f} %" if ci95 is not None else f"{mean} %"
    return f"{mean} % (seeds: {', '.join(f'{100 * value:.2f}' for value in values)})"


if __name__ == "__main__":
    from maml.processes.program import run_program

    run_program(main, sys.argv[1:])
