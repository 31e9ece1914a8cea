"""Write down the tensor operations of a pure function, and compare what they compute."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from maml.execution.indices import inside
from maml.execution.products import in_order_of_reading

Tensors: TypeAlias = Sequence[Tensor]

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


class _Recording(threading.local):
    """Whether this thread records, so that a loop over time may be one operation."""

    now = False


RECORDING = _Recording()


class Form(NamedTuple):
    """A recorded function for inputs of one form.

    Attributes:
        run: Takes flat inputs, and then the constants.
        structure: How its outputs are nested.
        constants: The tensors that the function has reached from outside. Each call reads the
            numbers that they have then.
        n_nodes: How many operations it has.
        flags: Whether the last output tells that an index was outside of what it indexes.
    """

    run: Callable[..., Tensors]
    structure: Any
    constants: tuple[Tensor, ...] = ()
    n_nodes: int = 0
    flags: bool = False

    def flat(self, inputs: Tensors) -> Tensors | None:
        """Return the flat outputs for flat inputs; None if an index was outside."""
        found = self.run(*inputs, *self.constants)
        if self.flags:
            *found, is_outside = found
            return None if is_outside else found
        return found


def record(function: Callable[..., Any], inputs: Tensors, structure: Any) -> Form:
    """Return ``function`` as a list of operations on flat inputs, and its outputs' structure.

    The function must be pure, from nests of tensors to a nest of tensors. If its control flow
    depends on values, raise a RuntimeError. Its arguments nest the ``inputs`` as in ``structure``.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # late: it imports a compiler

    structures = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        with _NoScalars():
            found = function(*pytree.tree_unflatten(leaves, structure))
        outputs, nested = pytree.tree_flatten(found)
        structures.append(nested)
        return outputs

    RECORDING.now = True
    try:
        with _NoValues():
            recorded: Any = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    finally:
        RECORDING.now = False
    for node in recorded.graph.nodes:
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
            raise RuntimeError(f"{VALUES} ({node.target})")
    constants = _constants_to_inputs(recorded)
    flags = inside(recorded.graph)
    in_order_of_reading(recorded.graph)
    graphs = [part.graph for part in recorded.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        node.meta = {}  # a compiler finds shapes anew, and refuses those of another recording
    recorded.recompile()
    return Form(recorded, structures[0], constants, sum(len(g.nodes) for g in graphs), flags)


def _constants_to_inputs(recorded: Any) -> tuple[Tensor, ...]:
    """Turn constants of a recording into further inputs; return them.

    A compiler would otherwise write the numbers of small constants into its code.
    """
    constants: dict[int, tuple[Tensor, Any]] = {}
    graph = recorded.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        tensor = getattr(recorded, node.target)
        if not isinstance(tensor, Tensor):  # the body of a loop
            continue
        if id(tensor) not in constants:
            with graph.inserting_after(last[0]):
                given = graph.placeholder(f"constant_{len(constants)}")
            last = [given]
            given.meta = dict(node.meta)
            constants[id(tensor)] = tensor, given
        node.replace_all_uses_with(constants[id(tensor)][1])
        graph.erase_node(node)
    return tuple(tensor for tensor, _ in constants.values())


class _NoValues(TorchFunctionMode):
    """A context that forbids to read tensors as arrays (`READS`), which no operation shows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in READS:
            raise RuntimeError(VALUES)
        return func(*args, **kwargs or {})


class _NoScalars(TorchDispatchMode):
    """A context that forbids to read a tensor as a number, as in an ``if``, or as torch itself does
    with the ``delta`` of a loss: the recording would have the number.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError(VALUES)
        return func(*args, **kwargs or {})


def compare(found: Tensors, expected: Any, tolerances: dict[torch.dtype, float]) -> None:
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
