"""A fixed sequence of GPU operations, launched as one: a CUDA graph.

A meta-gradient is thousands of small kernels, and launching each takes longer than most of them
run. A graph reads and writes the same memory each time, so inputs are copied into it and outputs
out of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

WARM_UP = 3
"""Runs before the capture: libraries choose algorithms and reserve memory in them."""


class Recorder(Protocol):
    """What captures; another one stands in where there is no GPU."""

    def capture(
        self, run: Callable[[], Sequence[Tensor]]
    ) -> tuple[Callable[[], object], Sequence[Tensor]]:
        """Warm ``run`` up and capture it: what repeats it, and the outputs it then overwrites."""


class Capture:
    """A stage of `maml.execution.compiled`: captures a run on ``device``.

    Graphs of one object share their working memory, so only one is replayed at a time.
    """

    def __init__(self, device: torch.device, recorder: Recorder | None = None) -> None:
        self._recorder = recorder or CudaRecorder(device)
        self._lock = threading.Lock()

    def __call__(
        self, run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> Callable[..., list[Tensor]]:
        """Return ``run`` for inputs of the shapes of ``inputs``, with results of their own memory.

        Args:
            run: Operations on the device alone; that it waits for no value is its caller's affair,
                and an error here.
            inputs: Examples, contiguous.
        """
        buffers = [x.clone() for x in inputs]
        replay, outputs = self._recorder.capture(lambda: run(*buffers))

        def replayed(*inputs: Tensor) -> list[Tensor]:
            with self._lock:
                for buffer, x in zip(buffers, inputs, strict=True):
                    buffer.copy_(x)
                replay()
                return [output.clone() for output in outputs]

        return replayed


class CudaRecorder:
    """`Recorder` of CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def capture(
        self, run: Callable[[], Sequence[Tensor]]
    ) -> tuple[Callable[[], object], Sequence[Tensor]]:
        """See `Recorder.capture`."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            # One stream for all graphs of a pool, and not the default one, which cannot capture.
            stream = self._stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    run()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # The outer context returns to the current stream even if the capture fails. Errors of
            # this thread only: others may go on allocating meanwhile.
            try:
                with (
                    torch.cuda.stream(current),
                    torch.cuda.graph(
                        graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
                    ),
                ):
                    outputs = run()
            except BaseException:
                # The memory that it has taken is nobody else's as long as the graph is there.
                del graph
                torch.cuda.empty_cache()
                raise
            self._pool = graph.pool()
        return graph.replay, outputs
