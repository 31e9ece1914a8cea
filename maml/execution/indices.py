"""Keep the indices in a recording inside of what they index, and say if one was not.

Torch raises an error for such an index. Inductor's code ends the process instead.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
_ALONG = {
    overload: (1, 2)
    for packet in (_ATEN.gather, _ATEN.scatter, _ATEN.scatter_add, _ATEN.scatter_reduce)
    for overload in (getattr(packet, name) for name in packet.overloads() if "out" not in name)
} | {_ATEN.index_select.default: (1, 2)}
"""The arguments of dimension and indices of operations that index one dimension."""
_OF_ROWS = {_ATEN.embedding.default: 1}
_OF_ANY = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default)


def inside(graph: Graph) -> bool:
    """Clamp all indices; output as last tensor whether one was outside. Return if there are any."""
    outside: list[Node] = []
    for node in list(graph.nodes):
        size: Any = _size(node.args[0]) if node.op == "call_function" and node.args else ()
        if node.target in _ALONG:
            dim, place = _ALONG[node.target]
            _clamp(graph, node, place, (0, size[node.args[dim]] if size else 1), outside)
        elif node.target in _OF_ROWS:
            _clamp(graph, node, _OF_ROWS[node.target], (0, size[0]), outside)
        elif node.target in _OF_ANY:
            indices = list(node.args[1])
            # Masks and several dimensions at once stay as they are: only integers are clamped.
            at = 0
            for place, index in enumerate(indices):
                if isinstance(index, Node) and _is_integer(index):
                    limits = (-size[at], size[at])
                    indices[place] = _clamped(graph, node, index, limits, outside)
                at += index.meta["val"].dim() if isinstance(index, Node) and _is_mask(index) else 1
            node.update_arg(1, indices)
    if not outside:
        return False
    (output,) = [node for node in graph.nodes if node.op == "output"]
    with graph.inserting_before(output):
        any_outside = outside[0]
        for flag in outside[1:]:
            any_outside = graph.call_function(_ATEN.logical_or.default, (any_outside, flag))
        output.update_arg(0, [*output.args[0], any_outside])
    return True


def _clamp(
    graph: Graph, node: Node, place: int, limits: tuple[int, int], outside: list[Node]
) -> None:
    index: Any = node.args[place]
    node.update_arg(place, _clamped(graph, node, index, limits, outside))


def _clamped(
    graph: Graph, node: Node, index: Node, limits: tuple[int, int], outside: list[Node]
) -> Node:
    low, high = limits
    with graph.inserting_before(node):
        within = graph.call_function(_ATEN.clamp.default, (index, low, high - 1))
        differs = graph.call_function(_ATEN.ne.Tensor, (within, index))
        outside.append(graph.call_function(_ATEN.any.default, (differs,)))
    return within


def _size(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.shape if isinstance(value, torch.Tensor) else ()


def _is_integer(node: Node) -> bool:
    dtype = node.meta["val"].dtype
    return dtype not in (torch.bool, torch.uint8)


def _is_mask(node: Node) -> bool:
    return not _is_integer(node)
