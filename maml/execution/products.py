"""Rewrite matrix products in a recording, so that their results lie in memory as they are read.

``torch.func.vmap`` computes a layer as x Wᵀ with weights of each task. So torch finds the gradient
by Wᵀ, xᵀ d, and transposes it: the sum over tasks and the next step then read it across its rows.
By (A B)ᵀ = Bᵀ Aᵀ, the product dᵀ x is the gradient by W itself. And a gradient by all weights of a
layer is scaled by the learning rate before it meets the examples; the product is smaller.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
_PRODUCTS = _ATEN.mm.default, _ATEN.bmm.default
_OF_SHAPE = (
    *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.expand.default, _ATEN.alias.default),
)


def in_order_of_reading(graph: Graph) -> None:
    """Turn ``(A B)ᵀ`` into ``Bᵀ Aᵀ``, and drop what changes nothing.

    A view of such a product may need a copy then, so a recording that writes in place stays.
    """
    schemas = [getattr(node.target, "_schema", None) for node in graph.nodes]
    if any(schema is not None and schema.is_mutable for schema in schemas):
        return
    for node in list(graph.nodes):
        if node.target in _OF_SHAPE and _shape(node) == _shape(node.args[0]):
            _replace(node, node.args[0])
    for node in list(graph.nodes):
        if _is_transpose(node) and _is_transpose(node.args[0]):
            _replace(node, node.args[0].args[0])
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        users = list(node.users)
        if node.target in _PRODUCTS and len(users) == 1 and _is_transpose(users[0]):
            with graph.inserting_before(node):
                a, b = (_transposed(graph, factor) for factor in node.args)
                product = graph.call_function(node.target, (b, a))
            product.meta = dict(users[0].meta)
            _replace(users[0], product)
            graph.erase_node(node)
    for node in graph.nodes:
        if node.target in (_ATEN.view.default, _ATEN._unsafe_view.default):
            node.target = _ATEN.reshape.default
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target == _ATEN.mul.Scalar:
            _scale_products(graph, node)
    graph.eliminate_dead_code()


def _scale_products(graph: Graph, scaled: Node) -> None:
    """Turn ``(s A) B`` into ``s (A B)`` where that takes fewer multiplications."""
    tensor, scale = scaled.args[:2]
    users, products = list(scaled.users), dict[Node, None]()
    while users:
        user = users.pop()
        if _is_transpose(user):
            users += user.users
        elif user.target in _PRODUCTS:
            products[user] = None
        else:
            return
    if sum(_shape(product).numel() for product in products) >= _shape(scaled).numel():
        return
    for product in products:
        with graph.inserting_after(product):
            after = graph.call_function(_ATEN.mul.Scalar, (product, scale))
        after.meta = dict(product.meta)
        for user in [user for user in product.users if user is not after]:
            user.replace_input_with(product, after)
    _replace(scaled, tensor)  # type: ignore[arg-type]


def _shape(node: Any) -> Any:
    return node.meta["val"].shape if isinstance(node, Node) and "val" in node.meta else None


def _is_transpose(node: Any) -> bool:
    """Return whether a node swaps the last two dimensions."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if node.target == _ATEN.t.default:
        return len(_shape(node)) == 2
    n = len(_shape(node)) if node.target == _ATEN.transpose.int else 0
    dims: Any = node.args[1:]
    return n >= 2 and {dim % n for dim in dims} == {n - 1, n - 2}


def _transposed(graph: Graph, node: Node) -> Node:
    if _is_transpose(node):
        return node.args[0]  # type: ignore[return-value]
    new = graph.call_function(_ATEN.transpose.int, (node, -2, -1))
    new.meta = dict(node.meta)
    new.meta["val"] = node.meta["val"].mT
    return new


def _replace(node: Node, by: Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
