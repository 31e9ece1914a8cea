"""``--compile`` and ``compile=``: compile a whole meta-gradient for each shape of tasks.

`record` runs the function once and writes down every tensor operation. The Python work of
``torch.func`` transforms, autograd and the inner optimizer is then done. One list of tensor
operations remains, and torch's inductor generates code for it.

The compiled code is checked: on new inputs, its result must agree with the function's own result.
On any failure, one line goes to stderr, and the plain function computes from then on. Numbers that
the function reads from outside, as a global, are in the code. So each call looks whether they are
the same (`Reached`), and is computed plainly if they are not.
"""

import contextlib
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.utils import _pytree as pytree

from datasets.locks import Lock
from datasets.paths import cache_root
from maml.config import Config
from maml.execution.outside import Reached
from maml.execution.recorded import RECORDED, TOLERANCE, Form, Tensors, compare, record
from maml.execution.trial import Trial

Stage = Callable[[Any, Tensors], Any]
"""``(run(*inputs) → outputs, example inputs) → a faster run``."""
HOOKS = [vars(of_modules)[name] for name in vars(of_modules) if re.match("_global_.*hooks$", name)]
"""Torch's hooks of all modules."""
SHAPES = 4
"""Compile at most this many shapes of inputs, or states of what is read from outside."""
LIMIT_S = 900.0
"""A process that compiles for more seconds counts as hanging: other processes stop waiting."""
LONG_RUN = 500_000
"""``--compile auto`` compiles on a CPU if a training has at least this many tasks in total."""
FIRST_S = 5.0
"""In the background, record a function that has taken so many seconds in plain calls."""
SECONDS_A_NODE = 0.025
"""About the time that inductor takes for a recorded operation."""
DRAWS = "the network draws random numbers, as dropout does"
UNSEEN = "the network or the loss reads what may change unseen, as a large array or an open file"
KEEPS = "the network or the loss keeps what it computes, and compiled code would not"


class Compiled:
    """Calls a pure function of tensors through code that is compiled for the inputs' shapes.

    All calls of one object must pass the same function, or say by ``of`` which one. Threads may
    share the object.
    """

    def __init__(
        self,
        stage: Stage,
        speaks: bool = True,
        *,
        reads: Sequence[Any] = (),
        apart: Iterable[Tensor] = (),
        waits: bool = True,
        name: str = "--compile",
    ) -> None:
        """Compile nothing yet.

        Args:
            stage: Generates code.
            speaks: Whether to report progress on stderr.
            reads: What the function's code is reached from, as a network and a loss.
            apart: Tensors in reach that are inputs.
            waits: Whether the first call of a shape waits for its code. Otherwise a thread
                compiles as soon as plain calls have taken as long as this will take.
            name: What the lines on stderr begin with.
        """
        self._stage, self._speaks, self._name, self._waits = stage, speaks, name, waits
        self._roots, self._apart = (*reads,), (*apart,)
        self._lock = threading.Lock()
        self._entries: dict[Any, _Entry] = {}
        self._made = 0
        self._given_up = False

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        records: Callable[..., Any] | None = None,
        of: Any = None,
    ) -> Any:
        """Return ``function(*args)``; arguments and result are nests of tensors.

        ``records``: another function with the same results, whose operations are compiled.
        """
        if self._given_up:
            return function(*args)
        leaves, structure = pytree.tree_flatten(args)
        inputs = [leaf.detach().contiguous() for leaf in leaves]
        with self._lock:
            entry = self._entries.setdefault(_key(of, structure, inputs), _Entry())
            if entry.program is not None and not entry.program.reached.is_still_same():
                entry.program, entry.spent, entry.form = None, 0.0, None
            if entry.program is None and not entry.closed and self._is_due(entry):
                self._advance(entry, function, records or function, inputs, structure)
            program = entry.program
        found = None if program is None else program(inputs)
        if found is None:
            began = time.perf_counter()
            found = function(*args)
            entry.spent += time.perf_counter() - began
            if entry.why:
                self._say(f"{entry.why}; computing without", warns=self._waits)
                entry.why = ""
        return found

    def program(self, of: Any, *args: Any) -> "Program | None":
        """Return the compiled code for such arguments, if there is any by now."""
        leaves, structure = pytree.tree_flatten(args)
        entry = self._entries.get(_key(of, structure, leaves))
        return None if entry is None else entry.program

    def _is_due(self, entry: "_Entry") -> bool:
        return self._waits or entry.spent >= entry.due

    def _advance(
        self,
        entry: "_Entry",
        function: Callable[..., Any],
        records: Callable[..., Any],
        inputs: Tensors,
        structure: Any,
    ) -> None:
        """Record the function; then generate code, at once or when it is due."""
        if entry.form is None:
            if not self._may_record(entry):
                return
            entry.inputs, entry.others = inputs, [_other(x) for x in inputs]
            args = pytree.tree_unflatten(entry.others, structure)
            try:
                entry.expected, keeps = self._called(function, inputs, args)
            except Exception as error:
                # The plain call raises it again, unless it is of these inputs alone.
                entry.closed, entry.why = True, _first_line(error)
                return
            if self._speaks and self._waits:
                shape = list(inputs[-1].shape)
                self._say(f"compiling for tasks of {shape} targets; it may take minutes once")
            try:
                if keeps:
                    raise RuntimeError(KEEPS)
                if not self._reached(()).sees_all:
                    raise RuntimeError(UNSEEN)
                with _quietly(), torch.no_grad(), Trial(*self._roots):
                    entry.form = record(records, inputs, structure)
                    compare(entry.form.flat(entry.others) or (), entry.expected, RECORDED)
            except Exception as error:
                self._give_up(error)
                return
            entry.reached = self._reached((*inputs, *entry.form.constants))
            entry.due += SECONDS_A_NODE * entry.form.n_nodes
        if self._waits:
            with _quietly():
                self._generate(entry, entry.form)
        elif self._is_due(entry):
            entry.closed = True
            threading.Thread(target=self._generate, args=[entry, entry.form], daemon=True).start()

    def _may_record(self, entry: "_Entry") -> bool:
        self._made += 1
        entry.closed = self._made > SHAPES
        if self._made == SHAPES + 1:
            self._say(
                f"only {SHAPES} shapes of tasks are compiled, and values of what losses read "
                "outside; others are not",
                warns=True,
            )
        return not entry.closed

    def _called(self, function: Callable[..., Any], inputs: Tensors, args: Any) -> tuple[Any, bool]:
        """Return the function's result, and whether each call writes what it reaches."""
        with Trial(*self._roots):
            for _ in range(2):  # the first call may fill a cache
                reached = self._reached(inputs)
                found = function(*args)
                keeps = not reached.is_same()
                if not keeps:
                    break
            return found, keeps

    def _reached(self, inputs: Tensors) -> Reached:
        return Reached(
            *self._roots, *(HOOKS if self._roots else ()), without=(*self._apart, *inputs)
        )

    def _generate(self, entry: "_Entry", form: Form) -> None:
        began = time.perf_counter()
        assert entry.reached is not None
        try:
            with _in_the_cache(), _unlogged(), torch.no_grad():
                given = [*entry.inputs, *form.constants]
                try:
                    run = self._stage(form.run, given)
                except ImportError as error:  # a process was killed while it wrote this library
                    Path(error.path or "").unlink(missing_ok=True)
                    run = self._stage(form.run, given)
                form = form._replace(run=run)
                compare(form.flat(entry.others) or (), entry.expected, TOLERANCE)
        except Exception as error:
            self._give_up(error)
            return
        if self._speaks:
            self._say(f"compiled in {time.perf_counter() - began:.1f} s")
        entry.program = Program(form, entry.reached)
        entry.inputs, entry.others, entry.expected, entry.closed = (), (), None, False

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        self._say(f"{_first_line(error)}; computing without", warns=self._waits)

    def _say(self, line: str, *, warns: bool = False) -> None:
        print(f"{'warning: ' * warns}{self._name}: {line}", file=sys.stderr, flush=True)


class Program:
    """Compiled code for inputs of one form.

    Attributes:
        flat: Returns the flat outputs for flat inputs.
        places: The nest of outputs, with the place of each in ``flat``'s.
        reached: What its function had read from outside, which is in the code.
    """

    def __init__(self, form: Form, reached: Reached) -> None:
        self.flat, self.reached, self._structure = form.flat, reached, form.structure
        self.places = pytree.tree_unflatten(range(form.structure.num_leaves), form.structure)

    def __call__(self, inputs: Tensors) -> Any:
        """Return the nest of outputs; None if an index was outside of what it indexes."""
        with torch.no_grad():
            found = self.flat(inputs)
        return None if found is None else pytree.tree_unflatten(found, self._structure)


@dataclass
class _Entry:
    """What there is for inputs of one form.

    Attributes:
        spent, due: Seconds that plain calls took, and that they must take before the next stage.
        form: The recorded function.
        inputs, others, expected: Its inputs, other ones, and the plain result of these.
        reached: What it read from outside.
        closed: Whether no further program is to be made, or one is being made.
        why: Why not, if nothing has said so yet.
    """

    spent: float = 0.0
    due: float = FIRST_S
    form: Form | None = None
    inputs: Tensors = ()
    others: Tensors = ()
    expected: Any = None
    reached: Reached | None = None
    program: Program | None = None
    closed: bool = False
    why: str = ""


def settings() -> tuple[Any, ...]:
    """Return the settings of torch on which a function's operations depend."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.get_default_dtype(), *autocast


def _key(of: Any, structure: Any, inputs: Tensors) -> Any:
    return (of, structure, *((x.shape, x.dtype, x.device) for x in inputs))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _other(x: Tensor) -> Tensor:
    """Return another input of the same kind: it exposes code that captured the values of ``x``."""
    if not x.dim():
        return x
    return x.flip(tuple(range(x.dim()))) * 0.97 if x.is_floating_point() else x.flip(-1)


def inductor(recorded: Any, inputs: Tensors) -> Callable[..., Tensors]:
    """Generate code with torch's compiler."""
    import torch._inductor  # late: it imports a compiler
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # A loop over time has an index, which is a symbol. All sizes are numbers.
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with tracing(TracingContext(fake)):
        given: list[Any] = [fake.from_tensor(x, static_shapes=True) for x in inputs]
        return torch._inductor.compile(recorded, given)


def choose(
    config: Config,
    device: torch.device,
    *,
    in_torch: bool,
    batched: bool = True,
    draws: bool = False,
    reads: Sequence[Any] = (),
) -> Compiled | None:
    """Return what compiles the meta-gradients under ``--compile``, or None to compile nothing.

    ``in_torch``: they consist only of torch's operations. ``batched``: all tasks are computed at
    once; one by one, convolutions gain nothing from compilation. ``draws``: the learner draws
    random numbers; compiled code would ignore their address. ``reads``: see `Compiled`.
    """
    speaks = os.environ.get("RANK", "0") == "0"
    if draws:
        if config.compile == "on" and speaks:
            print(f"warning: --compile: {DRAWS}; nothing is compiled", file=sys.stderr, flush=True)
        return None
    many = config.iterations * config.meta_batch_size >= LONG_RUN
    long = many and batched and device.type == "cpu"
    if not in_torch or not (config.compile == "on" or (config.compile == "auto" and long)):
        return None
    modules = [part for part in reads if isinstance(part, nn.Module)]
    apart = [parameter for module in modules for parameter in module.parameters()]
    return Compiled(inductor, speaks=speaks, reads=reads, apart=apart)


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
    with _unlogged(), warnings.catch_warnings(action="ignore"):
        yield


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keep what torch logs off stderr. A thread may do so: filters of warnings are everybody's."""
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
