"""A strategy is a map-reduce over task ids. It handles only transport, timeouts and failures."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

from torch import Tensor

from maml.config import OF_A_HOST, Config, flag
from maml.errors import UserError, WorkerLostError, exit_code, first_difference
from maml.params import Params
from maml.processes.liveness import Liveness
from maml.processes.signals import StopRequest
from maml.processes.world import World
from maml.strategies.packing import Packing
from maml.worker import Share, Worker

T = TypeVar("T")


class Strategy(ABC):
    """Decides where tasks run and how gradients return. Use it as a context manager.

    Attributes:
        stop: This process's stop request. All driving processes stop at the same iteration.
        liveness: Watches which processes take part and are alive.
        drives: Whether this process runs the outer loop; if not, it calls `serve`.
        home: The device where a driving process keeps the meta-parameters.
        computing: The ranks that differentiate; each gets a part of a meta-batch.
        wire_bytes: Bytes of tensors sent between processes since the last `report`, as far as this
            process can count them, without headers and retransmissions.
        advice: A line to print at the start about a faster way to run; "" if there is no advice.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        self.config, self.world, self.worker = config, world, worker
        worker.send_first = 0.001 if world.size > 1 else 0.0
        self.stop = StopRequest()
        self.liveness = Liveness(world, config.timeout, self.stop)
        self.drives, self.home = True, worker.device
        self.computing = range(world.size)
        self.wire_bytes, self.advice = 0, ""
        self._transport = ExitStack()

    @functools.cached_property
    def packing(self) -> Packing:
        """The layout of parameters and shares in the tensors that travel."""
        return Packing(self.worker.learner.meta_parameters(), len(self.worker.metric_names))

    @property
    def stopping(self) -> str | None:
        """Return the name of the signal to stop at, the same in every driving process."""
        return self.stop.signal

    def __enter__(self) -> Strategy:
        # Each process has chosen the batching that suits its device.
        own = {"batching", *OF_A_HOST}
        flags = {flag(n): v for n, v in dataclasses.asdict(self.config).items() if n not in own}
        if self.config.strategy == "allreduce":
            # The kind of device decides which library runs the collectives.
            flags["the kind of --device"] = self.worker.device.type
        of_all = self.liveness.watch(flags)
        try:
            self._agree(of_all)
            with self.liveness.guard(limited=False):
                self._transport.enter_context(self.transport())
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def _agree(self, of_all: list[dict[str, Any]]) -> None:
        """Compare the flags of all ranks, before anything else.

        A job script that starts the processes one by one can give two of them different flags. They
        would wait for each other in different transports, or silently train a mixture. Rank 0
        names the first rank and flag that differ; the other ranks end without a message.
        """
        for rank, theirs in enumerate(of_all):
            if difference := first_difference(of_all[0], theirs, rank):
                line = f"{difference}: start all processes with the same flags"
                raise WorkerLostError("", code=2) if self.world.rank else UserError(line)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        error = error or self._part()
        if error is not None:
            if not (self.liveness.finished and isinstance(error, WorkerLostError)):
                self._fail(error)
                raise error
            # All was done before the loss, so the run stays finished.
            self._transport.__exit__(type(error), error, error.__traceback__)
        self.liveness.leave()
        return True

    def _part(self) -> BaseException | None:
        """Leave the transport while all still watch each other; return the error if this fails."""
        if self.world.rank == 0:
            self.liveness.finish()
        try:
            with self.liveness.guard(limited=False), self._transport:
                self.finish()
        except BaseException as error:
            return error
        return None

    def _fail(self, error: BaseException) -> None:
        """End all processes for ``error``; raise the line to print, or let the caller raise it."""
        line = self.liveness.fail(error)
        self._transport.__exit__(type(error), error, error.__traceback__)
        self.liveness.leave()
        if self.world.size == 1 or isinstance(error, KeyboardInterrupt):
            return
        if isinstance(error, UserError):
            if line and self.world.rank == 0:
                return
        elif not isinstance(error, WorkerLostError):
            traceback.print_exception(error)
        raise WorkerLostError(line, exit_code(error)) from error.__cause__

    def transport(self) -> AbstractContextManager[None]:
        """Join the other processes; leave when all are done, but after an error without waiting."""
        return nullcontext()

    def finish(self) -> None:
        """Do what is left before all leave in good order."""
        return None

    def part_size(self, rank: int) -> int:
        """Return how many tasks of a meta-batch `Tensor.tensor_split` gives a computing rank."""
        size, left_over = divmod(self.config.meta_batch_size, len(self.computing))
        return size + (self.computing.index(rank) < left_over)

    def share_sizes(self) -> set[int]:
        """Return the possible numbers of training tasks in one call of this process's worker."""
        rank = self.world.rank
        return {self.part_size(rank)} if rank in self.computing else set()

    def serve(self) -> None:
        """Serve the driving process until it is done; return at once if all processes drive."""
        return None

    def from_rank_zero(self, value: T) -> T:
        """Return rank zero's ``value`` in every driving process."""
        return value

    def report(self) -> dict[str, Any]:
        """Return the transport's columns of metrics.jsonl, which count since the last call."""
        sent, self.wire_bytes = self.wire_bytes, 0
        return {"wire_bytes": sent} if sent else {}

    @abstractmethod
    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Return Σ gradient, Σ metrics and count over the training tasks ``ids [B]`` (int64).

        If a strategy's server does not wait for all trainers, the sums may be of other tasks: those
        whose results have arrived.
        """

    def packed_share(self, ids: Tensor, flat: Tensor) -> Tensor:
        """Compute training tasks ``ids [B]`` here, at ``flat [P]``; return their packed share."""
        worker, params = self.worker, self.packing.to_params(flat)
        return self.packing.share(worker.share(params, ids, worker.learner)).cpu()

    def tasks_of_step(self, ids: Tensor) -> Tensor:
        """Return the ids of the tasks that the last `meta_step`, called with ``ids``, summed."""
        return ids

    def evaluate(self, meta_params: Params, split: str, ids: Tensor) -> Tensor:
        """Return the metrics of each task of ``ids [T]``: ``[T, len(evaluation_names)]``, CPU.

        By default this process computes the metrics while the others wait.
        """
        return self.worker.evaluate(meta_params, split, ids)
