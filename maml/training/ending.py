"""How a run ends: finished, stopped by a signal, failed by an error, or lost with another process.

Whatever it is, the last whole iteration is saved, and status.json says which it was.
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

    ``code`` is the exit code. Once all is trained, tested and written, it is ``done``: no loss or
    stop takes that back.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._strategy = run, run.strategy
        self.code, self.done = 0, False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Turn a stop signal inside into a run that is stopped in good order."""
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
                # Torchrun stops all when one was killed, and that is another end.
                strategy.liveness.check()
                self._run.save()
                self.code = self._stopped(strategy.stopping)
        except BaseException as error:
            if not self.done:
                if isinstance(error, Exception):
                    self._run.rescue()
                with contextlib.suppress(UserError):
                    self._run.status("failed")
            raise

    def heed_stop(self) -> None:
        """Leave what is `watched`, if a stop signal has come."""
        if self._strategy.stopping:
            self._strategy.stop.heed()
            raise _Stopped

    def finish(self) -> None:
        """All is done: what comes while pictures are drawn takes nothing back."""
        with self._run.changing:
            self._run.status("finished")
            self.done = True
        if self._run.speaks:
            self._strategy.liveness.finish()

    def _stopped(self, by: str | None) -> int:
        """Say that the run was stopped, and has its checkpoint; return the exit code."""
        assert by is not None
        self._run.status("stopped")
        self._run.say(
            f"stopped by {by} after iteration {self._run.iteration}; checkpoint "
            f"{self._run.last}; the same command with --run-dir {self._run.dir} continues"
        )
        return exit_code(by)

    def _last_words(self, line: str) -> None:
        """Save the last whole iteration, in a thread, as this process ends for another's loss."""
        if self._run.changing.acquire(timeout=5) and not self.done:
            self._run.rescue()
            with contextlib.suppress(UserError):
                self._run.status("failed")

    def _abandon(self, by: str) -> None:
        """Save the last whole iteration and end, while the main thread is in the middle of one."""
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
                # So that the others know that nobody was lost.
                self._strategy.liveness.fail(WorkerLostError(f"stopped by {by}"))
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(code)


class _Stopped(Exception):
    """A stop signal came: end in good order."""
