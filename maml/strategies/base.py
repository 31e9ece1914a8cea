"""A strategy is a map-reduce over task ids: it owns transport, timeouts and failure only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

from torch import Tensor

from maml.config import Config
from maml.distributed import World
from maml.inner import Params
from maml.worker import Share, Worker


class Strategy(ABC):
    """Where tasks run and how gradients come home. Use it as a context manager.

    Attributes:
        drives: Whether this process runs the outer loop; one that does not calls `serve`.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        self.config = config
        self.world = world
        self.worker = worker

    @property
    def drives(self) -> bool:
        """Return whether this process runs the outer loop."""
        return True

    def __enter__(self) -> Strategy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the world: gracefully without an error, without waiting for anyone with one."""
        return None

    def share_sizes(self) -> set[int]:
        """Return how many training tasks a call of this process's worker may hold."""
        return {self.config.meta_batch_size}

    def serve(self) -> None:
        """Serve the driving process until it is done; returns at once where all drive."""
        return None

    @abstractmethod
    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Return Σ gradient, Σ metrics and count over the training tasks ``ids [B]`` (int64)."""

    @abstractmethod
    def evaluate(self, meta_params: Params, split: str, ids: Tensor) -> Tensor:
        """Return the metrics of each task of ``ids [T]``: ``[T, len(evaluation_names)]``."""
