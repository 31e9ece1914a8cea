"""The record of injected faults, which docs/faults.md shows.

    python -m pytest -m fault --faults-record benchmarks/records/DATE-faults.json

With the option, the tests inject every fault under every strategy, and not only some. Each writes
what came of it. What is in the file already is kept, unless it is injected again. Without ``-n``:
several processes would share the cores and the file.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maml.run.provenance import describe
from tests.strategies import faults
from tests.strategies.faults import ALL, FAULTS, LAUNCHER, STRATEGIES, Fault, Outcome, Ranks

RECORD = os.environ.get("FAULTS_RECORD")
"""The file of ``--faults-record``, if it is given."""

NAMES = {
    "exits": "calls `sys.exit(0)`",
    "cannot watch": "fails in its watching thread",
    "has no heartbeat": "fails in the thread of its heartbeat",
}
"""What the record calls a fault of `FAULTS`, if not by its name there."""
MOMENTS = {
    "start": "at the start", "training": "", "tested": "after the test's line",
    "drawing": "while pictures are drawn",
}  # fmt: skip
ONE_ROW = {
    **dict.fromkeys(("killed", "crashed"), "killed or crashed"),
    **dict.fromkeys(("failed", NAMES["exits"]), "failed, or calls `sys.exit(0)`"),
    NAMES["has no heartbeat"]: NAMES["cannot watch"],
}
"""The row of the table, for faults of one rank that share a row with another fault."""
ROWS = (
    "killed or crashed", "killed", "failed, or calls `sys.exit(0)`", "fails in its watching thread",
    "stopped", "stopped, and no other may open a file", "holds the interpreter's lock",
    "disconnected", "killed, after the test's line", "killed, while pictures are drawn",
    "killed, under torchrun", "killed, torchrun", "killed, launch/local",
    "killed, under launch/local", "killed, torchrun, at the start",
)  # fmt: skip
"""The rows in order. All other faults are in the record alone."""
COLUMNS = {
    "fault": "{fault}", "of rank": "{of_rank}", "what the run says": "{lines}",
    **{f"`{strategy}`": f"{{{strategy}}}" for strategy in ALL},
}  # fmt: skip


def every() -> list[tuple[str, str, Ranks]]:
    """Return the faults in training that a record has: strategy, name and ranks."""
    found: list[tuple[str, str, Ranks]] = [
        (strategy, name, rank)
        for strategy in STRATEGIES
        for name, fault in FAULTS.items()
        if not (fault.launcher or fault.no_files or name == "hangs while its heart beats")
        for rank in (0, 2)
        if not isinstance(fault.by, str) or _computes(strategy, rank)
    ]
    found += [(s, "stopped", two) for s in ALL for two in ((0, 1), (1, 2))]
    return found + [(s, "stopped, and no other may open a file", 0) for s in ALL]


def _computes(strategy: str, rank: int) -> bool:
    """Return whether ``rank`` computes gradients of its tasks."""
    if strategy == "param-server remote":
        return False
    return rank > 0 or not strategy.startswith("param-server")


def inject(run_dir: Path, strategy: str, fault: Fault, ranks: Ranks, timeout: float) -> Outcome:
    """Inject a fault, as `faults.inject`; if the run says something, add it to the record."""
    done = faults.inject(run_dir, strategy, fault, ranks, timeout)
    if RECORD and done.said:
        of_rank = " and ".join(map(str, (ranks,) if isinstance(ranks, int) else ranks))
        of_rank = "launcher" if ranks == LAUNCHER else of_rank
        found = {"strategy": strategy, "fault": _name(fault, ranks), "of_rank": of_rank}
        found |= {"seconds": [round(done.seconds, 1)], "said": done.said, "state": done.state}
        add(Path(RECORD), found | {"codes": done.codes}, timeout)
    return done


def _name(fault: Fault, ranks: Ranks) -> str:
    is_it = (
        name for name, of in FAULTS.items() if (of.by, of.no_files) == (fault.by, fault.no_files)
    )
    name, launcher = next(is_it), fault.launcher
    under = f"under {launcher}" if launcher and ranks != LAUNCHER else launcher
    moment = MOMENTS.get(fault.phase, fault.phase)
    return ", ".join(filter(None, (NAMES.get(name, name), under, moment)))


def add(path: Path, found: Mapping[str, Any], timeout: float) -> None:
    """Write what came of an injection to the record in ``path``, in place of an earlier one."""
    now = describe(threads=1)
    where = f"`--timeout {timeout:g}`, three processes of one host"
    record: dict[str, Any] = {
        "hardware": now, "timeout": timeout, "columns": COLUMNS, "injections": [],
        "caption": f"{where}; the longer time of two faults in one row",
    }  # fmt: skip
    if path.exists():
        record = json.loads(path.read_text())
    if now["git_commit"] != record["hardware"]["git_commit"]:
        found = {**found, "git_commit": now["git_commit"]}
    same = ("strategy", "fault", "of_rank")
    others = [one for one in record["injections"] if any(one[n] != found[n] for n in same)]
    record["injections"] = [*others, found]
    record["rows"] = rows_of(record["injections"])
    if later := sum("git_commit" in one for one in record["injections"]):
        of = f"{later} of {len(record['injections'])} injections"
        record["source"] = f"{of} are of later commits, which the record names."
    path.write_text(json.dumps(record, indent=1) + "\n")


def rows_of(injections: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the table's rows: what all strategies say, and within how many seconds they end."""
    found: dict[tuple[int, int, str], list[Mapping[str, Any]]] = {}
    for one in injections:
        rank, name = one["of_rank"], one["fault"]
        row = name if " and " in rank else ONE_ROW.get(name, name)
        if row in ROWS:
            found.setdefault((ROWS.index(row), len(rank), rank), []).append(one)
    rows = []
    for (number, _, rank), of_row in sorted(found.items(), key=lambda row: row[0]):
        said = dict.fromkeys(f"`{_anonymous(line)}`" for one in of_row for line in one["said"])
        row = {"fault": ROWS[number], "of_rank": rank, "lines": "; ".join(said)}
        for name in ALL:
            seconds = [second for x in of_row if x["strategy"] == name for second in x["seconds"]]
            row[name] = f"{max(seconds):.0f} s" if seconds else "–"
        rows.append(row)
    return rows


def _anonymous(line: str) -> str:
    """Return the line without what is different each time."""
    line = line[max(line.find("error: "), 0) :].replace("|", "/")
    line = re.sub(r"silent for \d+ s", "silent for … s", line)
    return re.sub(r"pid \d+", "pid …", re.sub(r"host \S+,", "host …,", line))
