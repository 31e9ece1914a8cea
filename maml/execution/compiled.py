"""``--compile``: compile a whole meta-gradient for each shape of tasks.

`record` runs the function once and writes down every tensor operation. The Python work of
``torch.func`` transforms, autograd and the inner optimizer is then done. One list of tensor
operations remains, and torch's inductor generates code for it.

The compiled code is checked: on new inputs, its result must agree with the function's own result.
On any failure, one line goes to stderr, and the plain function computes from then on.
"""

import contextlib
import logging
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from datasets.locks import Lock
from datasets.paths import cache_root
from maml.config import Config

Tensors: TypeAlias = Sequence[Tensor]
Run: TypeAlias = Callable[[Tensors], Tensors]
Stage: TypeAlias = Callable[[Any, Tensors], Any]
"""``(run(*inputs) → outputs, example inputs) → a faster run``."""

SHAPES = 4
"""Compile at most this many shapes of inputs; compute further shapes without compilation."""
LIMIT_S = 900.0
"""A process that compiles for more seconds counts as hanging: other processes stop waiting."""
LONG_RUN = 500_000
"""``--compile auto`` compiles on a CPU if a training has at least this many tasks in total."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 0.1}
"""Largest accepted norm of a difference, relative to the tensor's; in float32 a ReLU may flip."""
RECORDED = {torch.float64: 1e-8, torch.float32: 1e-3}
"""The same tolerances for the recorded operations, before code is generated for them."""
FLOOR = 0.1
"""Add this share of an output's norm to the norm of each tensor in it: some are only rounding."""
READS = (Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__dlpack__)
VALUES = (
    "the network or the loss uses a tensor's value in Python or for a shape (an if, numpy, "
    "tolist, unique), which cannot be compiled"
)
DRAWS = "the network draws random numbers, as dropout does; nothing is compiled"


class _Form(NamedTuple):
    """A recorded function of flat inputs, and how its outputs are nested."""

    run: Callable[..., Tensors]
    structure: Any


class Compiled:
    """Calls a pure function of tensors through code that is compiled for the inputs' shapes.

    All calls of one object must pass the same function. Threads may share the object.
    """

    def __init__(self, stage: Stage, speaks: bool = True) -> None:
        """``speaks``: report progress on stderr."""
        self._stage, self._speaks = stage, speaks
        self._lock = threading.Lock()
        self._forms: dict[Any, _Form | None] = {}
        self._given_up = False

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)``; arguments and result are nests of tensors."""
        if self._given_up:
            return function(*args)
        leaves, structure = pytree.tree_flatten(args)
        inputs = [leaf.detach().contiguous() for leaf in leaves]
        key = (structure, *((x.shape, x.dtype, x.device) for x in inputs))
        with self._lock:
            if key not in self._forms:
                self._forms[key] = self._make(function, inputs, structure)
            form = self._forms[key]
        if form is None:
            return function(*args)
        with torch.no_grad():
            return pytree.tree_unflatten(form.run(*inputs), form.structure)

    def _make(self, function: Callable[..., Any], inputs: Tensors, structure: Any) -> _Form | None:
        if self._given_up:
            return None
        if len(self._forms) == SHAPES:
            self._say(f"only {SHAPES} shapes of tasks are compiled, others are not", warns=True)
        if len(self._forms) >= SHAPES:
            return None
        began, shape = time.perf_counter(), list(inputs[-1].shape)
        # Outside the try: the caller sees the function's own errors, as without compilation.
        others = [_other(x) for x in inputs]
        expected = function(*pytree.tree_unflatten(others, structure))
        if self._speaks:
            self._say(f"compiling for tasks of {shape} targets; the first time it takes minutes")
        try:
            with _quietly(), _in_the_cache(), torch.no_grad():
                # oneDNN computes an LSTM as one operation, and inductor cannot call this operation.
                with torch.backends.mkldnn.flags(enabled=False):
                    form = record(function, inputs, structure)
                _compare(form.run(*others), expected, RECORDED)
                form = form._replace(run=self._stage(form.run, inputs))
                _compare(form.run(*others), expected, TOLERANCE)
        except Exception as error:
            self._given_up = True
            first, *_ = (str(error).strip() or type(error).__name__).splitlines()
            self._say(f"{first[:200]}; computing without", warns=True)
            return None
        if self._speaks:
            self._say(f"compiled in {time.perf_counter() - began:.1f} s")
        return form

    def _say(self, line: str, *, warns: bool = False) -> None:
        print(f"{'warning: ' * warns}--compile: {line}", file=sys.stderr, flush=True)


def _compare(found: Tensors, expected: Any, tolerances: dict[torch.dtype, float]) -> None:
    """Raise unless the outputs agree; if an expected output is not finite, accept any numbers."""
    pairs = list(zip(found, pytree.tree_leaves(expected), strict=True))
    for a, b in pairs:
        if b is not None and (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            expected_form = f"{b.dtype} {list(b.shape)}"
            raise RuntimeError(f"it returned {a.dtype} {list(a.shape)}, not {expected_form}")
    for part in pytree.tree_leaves(expected, is_leaf=lambda node: node is not expected):
        n_leaves = len(pytree.tree_leaves(part))
        own, pairs = pairs[:n_leaves], pairs[n_leaves:]
        floating = [(a, b) for a, b in own if b is not None and b.is_floating_point()]
        sizes = [b.norm().item() for _, b in floating]
        floor = FLOOR * math.hypot(*sizes)
        for (a, b), size in zip(floating, sizes, strict=True):
            tolerance = tolerances[b.dtype]
            difference = (a - b).norm().item()
            # `not … <=`, not `>`: a NaN difference must raise, too.
            if math.isfinite(floor) and not difference <= tolerance * (size + floor):
                raise RuntimeError(f"the result is off by {difference:.1e} of {size:.1e}")


def _other(x: Tensor) -> Tensor:
    """Return another input of the same kind: it exposes code that captured the values of ``x``."""
    if not x.dim():
        return x
    return x.flip(tuple(range(x.dim()))) * 0.97 if x.is_floating_point() else x.flip(-1)


def record(function: Callable[..., Any], inputs: Tensors, structure: Any) -> _Form:
    """Return ``function`` as a list of operations on flat inputs, and its outputs' structure.

    The function must be pure, from nests of tensors to a nest of tensors. If its control flow
    depends on values, raise a RuntimeError. Its arguments nest the ``inputs`` as in ``structure``.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # late: it imports a compiler

    structures = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        outputs, nested = pytree.tree_flatten(function(*pytree.tree_unflatten(leaves, structure)))
        structures.append(nested)
        return outputs

    try:
        with _NoValues():
            recorded: Any = make_fx(flat)(*inputs)
    except RuntimeError as error:
        if "value out of a tracing tensor" in str(error):
            raise RuntimeError(VALUES) from error
        raise
    for node in recorded.graph.nodes:
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
            raise RuntimeError(f"{VALUES} ({node.target})")
    return _Form(recorded, structures[0])


class _NoValues(TorchFunctionMode):
    """A context that forbids reading tensor values (`READS`): the recording cannot see a read."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in READS:
            raise RuntimeError(VALUES)
        return func(*args, **kwargs or {})


def inductor(recorded: Any, inputs: Tensors) -> Callable[..., Tensors]:
    """Generate code with torch's compiler."""
    import torch._inductor  # late: it imports a compiler

    return torch._inductor.compile(recorded, list(inputs))


def choose(
    config: Config,
    device: torch.device,
    *,
    in_torch: bool,
    batched: bool = True,
    draws: bool = False,
) -> Compiled | None:
    """Return what compiles the meta-gradients under ``--compile``, or None to compile nothing.

    ``in_torch``: they consist only of torch's operations. ``batched``: all tasks are computed at
    once; one by one, convolutions gain nothing from compilation. ``draws``: the learner draws
    random numbers; compiled code would ignore their address.
    """
    speaks = os.environ.get("RANK", "0") == "0"
    if draws:
        if config.compile == "on" and speaks:
            print(f"warning: --compile: {DRAWS}", file=sys.stderr, flush=True)
        return None
    many = config.iterations * config.meta_batch_size >= LONG_RUN
    long = many and batched and device.type == "cpu"
    if not in_torch or not (config.compile == "on" or (config.compile == "auto" and long)):
        return None
    return Compiled(inductor, speaks=speaks)


@contextlib.contextmanager
def _in_the_cache() -> Iterator[None]:
    """Keep generated code in ``$MAML_CACHE/compiled``; one process of a host compiles at a time."""
    folder = cache_root() / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    # Always override: torch sets this variable to its own folder when its compiler is imported.
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        with Lock(folder / "lock").held(limit=LIMIT_S):
            yield
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the compiler's notices off stderr; its errors contain everything that matters."""
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(level)
