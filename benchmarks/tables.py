"""The tables of README.md and docs/, made from the records of benchmarks/ and launch/records.

    python -m benchmarks.tables            # write every table again
    python -m benchmarks.tables --check    # name those that differ from their records; exit code 1

A table that shows a measurement stands between two comments:

    <!-- table: benchmarks/records/2026-11-21-throughput-others.json sinusoid -->
    <!-- /table -->

The first comment names a record and, if the record has several settings, one setting. Below the
table, a line links to the record and names the hardware. For records in folders, such as
``launch/records``, the comment names a module first, such as ``maml.studies.table``. The module's
``table`` and ``measured_on`` take the folder and the other words.
"""

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import table
from maml.config.parser import Parser
from maml.errors import UserError
from maml.processes.program import run_program

REPO = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"<!-- table: (?P<call>[^\n]+?) -->\n(?P<shown>.*?)<!-- /table -->", re.DOTALL)


def documents() -> list[Path]:
    """Return the files that may hold tables."""
    return [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]


def render(call: str, document: Path) -> str:
    """Return the text between the two comments; ``call``: the words of the first one."""
    path, *words = call.split()
    try:
        if path.endswith(".json"):
            record = json.loads((REPO / path).read_text())
            shown, source = table(record, *words), measured_on(record)
        else:
            module, (path, *words) = importlib.import_module(path), words
            shown, source = (of(REPO / path, *words) for of in (module.table, module.measured_on))
    except (OSError, ImportError, KeyError, ValueError, UserError) as error:
        raise ValueError(f"table: {call}: {error}") from error
    link = os.path.relpath(REPO / path, document.parent)
    return f"{shown}\n\n[Record]({link}): {source}\n"


def measured_on(record: dict[str, Any]) -> str:
    """Return a sentence: hardware, date and commit, and the source of a transcribed record."""
    hardware = record["hardware"]
    words = [
        f"{hardware['cores']} cores of {hardware['processor']}" if "cores" in hardware else "",
        hardware.get("gpu") or "",
        f"torch {hardware['versions']['torch']}" if "versions" in hardware else "",
        hardware["date"],
    ]
    commit = hardware.get("git_commit")
    if commit:
        clean = commit.removesuffix("-dirty")
        words.append(f"commit {clean[:7]}" + " with uncommitted changes" * (clean != commit))
    said = ", ".join(word for word in words if word) + "."
    return f"{said} {record['source']}" if "source" in record else said


def problems(document: Path, *, write: bool = False) -> list[str]:
    """Return a line for each table that differs from its record; ``write``: write it again."""
    text, name, lines = document.read_text(), document.name, list[str]()
    for match in MARKED.finditer(text):
        call, shown = match["call"], match["shown"]
        try:
            new = render(call, document)
        except ValueError as error:
            lines.append(f"{name}: {error}")
            continue
        if write:
            begin = f"<!-- table: {call} -->\n"
            document.write_text(document.read_text().replace(begin + shown, begin + new))
        elif new != shown:
            lines.append(f"{name}: differs from its record: table: {call}")
    return lines


def main(arguments: list[str]) -> int:
    """Write the tables, or check them."""
    parser = Parser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")
    options = parser.parse_args(arguments)
    wrong = [line for each in documents() for line in problems(each, write=not options.check)]
    print("\n".join(wrong), file=sys.stderr, end="\n" * bool(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
