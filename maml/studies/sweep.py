"""``python -m launch.sweep FILE``: run the trials of a sweep, without a server.

    python -m launch.sweep launch/sweeps/inner-rate.yaml --workers 2 --report
    python -m launch.sweep launch/sweeps/inner-rate.yaml --total 20     # 20 in all, not 20 more

The file has W&B's format, so ``wandb sweep FILE`` takes it unchanged. Its trials are in
``runs/sweeps/<name of the file>``. The same command continues a sweep that was stopped or killed.
Other hosts that share the folder can run the command at the same time: they share the trials.
"""

from pathlib import Path

from maml.config.parser import Parser, add_trust, at_least
from maml.errors import UserError
from maml.processes.signals import StopRequest, exit_code
from maml.processes.streams import log_in
from maml.studies.sweeping import command, file
from maml.studies.sweeping.sweep import FAILED, RUNNING, WAITING, Sweep
from maml.studies.sweeping.worker import Workers, say


def main(arguments: list[str]) -> int:
    """Run what is left of a sweep; return the exit code."""
    parser = Parser(prog="python -m launch.sweep", description=__doc__)
    parser.add_argument("file", metavar="FILE", type=Path)
    text = "trials at a time, which share the cores; 0: only tell how far it is (default: 1)"
    parser.add_argument("--workers", type=at_least(0), default=1, help=text)
    text = "trials in all, with those that were run (default: the file's run_cap, or all there are)"
    parser.add_argument("--total", type=at_least(1), help=text)
    text = "at the end write report.md, with figures"
    parser.add_argument("--report", action="store_true", help=text)
    parser.add_argument("--retry", action="store_true", help="let trials that have failed go on")
    text = "where the sweep is (default: runs/sweeps/<name of FILE>)"
    parser.add_argument("--folder", type=Path, help=text)
    add_trust(parser, "FILE")
    options = parser.parse_args(arguments)
    described = file.read(options.file, trust=options.trust)
    if "early_terminate" in described.said:
        say("early_terminate: left out; each trial runs to its end")
    folder = options.folder or Path("runs", "sweeps", options.file.stem)
    if options.workers:  # without workers, no trial runs
        command.check(described)
        if described.size is None and not (options.total or described.said.get("run_cap")):
            raise UserError(f"--total: {options.file} has infinitely many values")
    elif not folder.is_dir():
        raise UserError(f"--workers 0: nothing was run in {folder}")
    sweep = Sweep(folder, described)
    log_in(folder)
    _tell(sweep, options.total)
    if options.retry:
        say(f"{sweep.retry_failed()} failed trials wait again")
    stop = StopRequest()
    code = _work(sweep, options.workers, options.total, stop) if options.workers else 0
    if options.report and code in (0, 1) and not stop:
        # Imported late, because only a report draws.
        from maml.studies.sweeping.report import write

        say(f"report {write(sweep)}")
    if stop.signal is not None:
        say(f"stopped by {stop.signal}; the same command continues")
        return exit_code(stop.signal)
    return code


def _work(sweep: Sweep, workers: int, total: int | None, stop: StopRequest) -> int:
    stop.install()
    Workers(sweep, total, stop).run(workers)
    _tell(sweep, total)
    states = {trial.state for trial in sweep.trials()}
    if RUNNING in states:
        say("other processes run the rest")
    elif WAITING in states and not stop:
        say("a trial was told to stop; the same command continues")
        return 143
    return 1 if FAILED in states else 0


def _tell(sweep: Sweep, total: int | None) -> None:
    say(f"sweep {sweep.study.study_name} in {sweep.folder}: {sweep.progress(total)}")
