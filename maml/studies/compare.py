"""``python -m launch.compare A B …``: is one better than the other, and how sure is that.

    python -m launch.compare runs/maml runs/anil
    python -m launch.compare runs/sweeps/order:order=first runs/sweeps/order:order=second --report

Each is a run directory, a record, or a folder of runs of which the values after the colon choose
some; its runs may differ in their seed alone. All are compared with the first, on the test tasks
that both were tested on.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

from maml.config.parser import Parser
from maml.errors import UserError
from maml.run.files import make_folder, write_text
from maml.studies import arms, tables


def main(arguments: list[str]) -> int:
    """Compare; return the exit code."""
    parser = Parser(
        prog="python -m launch.compare",
        description="Compare runs on the test tasks that they share.",
    )
    parser.add_argument("arms", metavar="RUNS", nargs="+", help="PATH or PATH:name=value,…")
    parser.add_argument(
        "--metric",
        help="a column of test_tasks.csv, as non_transductive_accuracy (default: each run's "
        "headline accuracy; of policies the return, of regressions the loss)",
    )
    parser.add_argument("--report", action="store_true", help="write report.md, with figures")
    parser.add_argument(
        "--folder", type=Path, help="where the report goes (default: runs/compared-<time>)"
    )
    options = parser.parse_args(arguments)
    if len(options.arms) < 2:
        raise UserError("nothing to compare with: name two runs or more")
    if len(set(options.arms)) < len(options.arms):
        raise UserError("one is named twice")
    found = [arms.read(asked, options.metric) for asked in options.arms]
    print(f"Comparing {len(found)} by test {found[0].metric}", file=sys.stderr, flush=True)
    folder = options.folder
    if options.report and folder is None:
        folder = Path("runs", f"compared-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder is not None:
        make_folder(folder, "--folder")
    text, drawn = tables.compared(found, folder)
    print(text, end="")
    if folder is not None:
        write_text(folder / "report.md", f"# Comparison\n\n{text}{drawn}")
        print(f"\nreport {folder / 'report.md'}")
    return 0


def table(study: Path, *settings: str) -> str:
    """Return the comparison of settings that are kept in a folder, as ``part=none part=all``."""
    found = [replace(arms.read(f"{study}:{name}", None), name=name) for name in settings]
    return tables.compared(found)[0]
