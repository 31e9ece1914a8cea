"""End a run: finished, stopped by a signal, failed by an error, or lost with another process.

In every case the run saves its last whole iteration, and status.json holds the outcome.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

from maml.errors import UserError, WorkerLostError
from maml.processes.signals import exit_code
from maml.training.run import Run


class Ending:
    """Watches over a driving process from the first iteration to the last picture.

    ``code`` is the exit code. ``done`` becomes true once all is trained, tested and written. A
    later stop signal or lost process does not change that.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._strategy = run, run.strategy
        self.code, self.done = 0, False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Stop the run in good order if a stop signal comes inside this context."""
        strategy, speaks = self._strategy, self._run.speaks
        strategy.stop.install()
        if speaks:
            strategy.liveness.last_words = self._last_words
        try:
            self._run.status("training")
            try:
                with strategy.stop.hurried(self._abandon) if speaks else contextlib.nullcontext():
                    yield
            except _Stopped:
                # If one process was killed, torchrun stops all. That is a loss and not a stop.
                strategy.liveness.check()
                self._run.save()
                self.code = self._stopped(strategy.stopping)
        except BaseException as error:
            if not self.done:
                if not isinstance(error, KeyboardInterrupt):
                    self._run.rescue()
                with contextlib.suppress(UserError):
                    self._run.status("failed")
            raise

    def heed_stop(self) -> None:
        """Leave the `watched` context if a stop signal has come."""
        if self._strategy.stopping:
            self._strategy.stop.heed()
            raise _Stopped

    def finish(self) -> None:
        """Mark the run as finished: a stop while pictures are drawn does not change that."""
        with self._run.changing:
            self._run.status("finished")
            self.done = True
        if self._run.speaks:
            self._strategy.liveness.finish()

    def _stopped(self, by: str | None) -> int:
        """Print that the run was stopped, and where its checkpoint is; return the exit code."""
        assert by is not None
        self._run.status("stopped")
        # The same --resume would refuse this run directory, or go back to an earlier iteration.
        auto = "" if self._run.config.resume == "auto" else " --resume auto"
        self._run.say(
            f"stopped by {by} after iteration {self._run.iteration}; checkpoint "
            f"{self._run.last}; the same command with --run-dir {self._run.dir}{auto} continues"
        )
        return exit_code(by)

    def _last_words(self) -> None:
        """In a thread: save the last whole iteration before a lost peer ends this process."""
        if self._run.changing.acquire(timeout=5) and not self.done:
            self._run.rescue()
            with contextlib.suppress(UserError):
                self._run.status("failed")

    def _abandon(self, by: str) -> None:
        """Save the last whole iteration and exit, although the main thread is still in one."""
        with self._run.changing:
            code = 1
            try:
                if self.done:
                    code = exit_code(by)
                    self._run.say(
                        f"stopped by {by} while pictures were drawn; the run is finished, and its "
                        f"result in {self._run.dir}; python -m maml.plots {self._run.dir} draws"
                    )
                else:
                    self._run.save()
                    code = self._stopped(by)
                # Tell the other processes that this one was stopped and not lost.
                self._strategy.liveness.fail(WorkerLostError(f"stopped by {by}"))
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(code)


class _Stopped(Exception):
    """A stop signal came: end in good order."""
