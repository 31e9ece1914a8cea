"""``python -m launch.sweep FILE``: run the trials of a sweep, without a server.

    python -m launch.sweep launch/sweeps/inner-rate.yaml --workers 2 --report
    python -m launch.sweep launch/sweeps/inner-rate.yaml --total 20     # 20 in all, not 20 more

The file is one of W&B's: ``wandb sweep FILE`` takes it as it is. Its trials are in
``runs/sweeps/<name of the file>``. The same command continues a sweep that was stopped or killed;
given at the same time on other hosts that share the folder, it takes part.
"""

from __future__ import annotations

from pathlib import Path

from maml.config.parser import Parser, add_trust, whole_number
from maml.errors import UserError
from maml.processes.signals import exit_code
from maml.studies.sweeping import command, file
from maml.studies.sweeping.sweep import FAILED, LOST, RUNNING, WAITING, Sweep, counts
from maml.studies.sweeping.worker import Workers


def main(arguments: list[str]) -> int:
    """Run what is left of a sweep; return the exit code."""
    parser = Parser(prog="python -m launch.sweep", description="Run the trials of a sweep.")
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument(
        "--workers",
        type=whole_number,
        default=1,
        help="trials at a time in this process, which share its cores; 0: only tell how far it is "
        "(default: 1)",
    )
    parser.add_argument(
        "--total",
        type=whole_number,
        help="trials in all, those that were run already included (default: the file's run_cap, or "
        "all there are)",
    )
    parser.add_argument(
        "--report", action="store_true", help="at the end write report.md, with figures"
    )
    parser.add_argument(
        "--against",
        metavar="SETTING",
        help="with --report: the setting that the others are compared with, as part=none (default: "
        "the best)",
    )
    parser.add_argument("--retry", action="store_true", help="let trials that have failed go on")
    parser.add_argument(
        "--folder", type=Path, help="where the sweep is (default: runs/sweeps/<name of FILE>)"
    )
    add_trust(parser, "FILE")
    options = parser.parse_args(arguments)
    for name, least in (("workers", 0), ("total", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name} must be at least {least}, not {value}")
    described = file.read(options.file, trust=options.trust)
    if options.workers:  # a report runs nothing
        command.check(described)
    if options.workers and described.size is None and not (options.total or described.run_cap):
        raise UserError(f"--total: the parameters of {options.file} have no end of values")
    folder = options.folder or Path("runs", "sweeps", options.file.stem)
    if not options.workers and not folder.is_dir():
        raise UserError(f"--workers 0: nothing was run in {folder}")
    sweep = Sweep(folder, described)
    _say(f"sweep {sweep.name} in {folder}: {sweep.progress(options.total)}")
    if options.retry:
        _say(f"{sweep.retry_failed()} failed trials wait again")
    code = _work(sweep, options.workers, options.total) if options.workers else 0
    if options.report and code in (0, 1):
        # Imported late: it draws.
        from maml.studies.sweeping.report import write

        _say(f"report {write(sweep, options.against)}")
    return code


def _work(sweep: Sweep, workers: int, total: int | None) -> int:
    by = Workers(sweep, total, _say).run(workers)
    _say(f"sweep {sweep.name} in {sweep.folder}: {sweep.progress(total)}")
    if by is not None:
        _say(f"stopped by {by}; the same command continues")
        return exit_code(by)
    found = counts(sweep.trials())
    if found.keys() & {RUNNING, LOST}:
        _say("other processes run the rest")
    elif WAITING in found:
        _say("a trial was told to stop; the same command continues")
        return 143
    return 1 if FAILED in found else 0


def _say(text: str) -> None:
    print(text, flush=True)
