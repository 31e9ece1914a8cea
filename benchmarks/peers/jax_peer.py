"""JAX as its users compose it: ``jit`` of ``grad`` of the sum over tasks by ``vmap``.

It needs ``pip install jax``, which the environment does not have. Convolutions are products of
patches, because JAX computes a batched convolution's derivatives many times more slowly on a CPU;
recurrent layers are a ``lax.scan``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn

from benchmarks.network import Repetition, peer_network
from benchmarks.own_networks import RowsLSTM, ViT
from datasets.tasks import Task
from maml.config import Config
from maml.params import Params

Weights = dict[str, jax.Array]


def build(config: Config, tasks: Task) -> Repetition:
    """Return a repetition; the first call compiles."""
    jax.config.update("jax_enable_x64", config.dtype == "float64")
    network, names = peer_network(config)
    weights = {n: jnp.asarray(p.detach().numpy()) for n, p in network.named_parameters()}
    given = [jnp.asarray(part.numpy()) for part in tasks]
    loss = _squares if config.data == "sinusoid" else _cross_entropy

    def set_loss(weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
        return loss(_apply(network, weights, "", x), y)

    def outer(weights: Weights, support_x: Any, support_y: Any, query_x: Any, query_y: Any) -> Any:
        for _ in range(config.inner_steps):
            found = jax.grad(set_loss)(weights, support_x, support_y)
            weights = {n: weights[n] - config.inner_lr * found[n] for n in weights}
        return set_loss(weights, query_x, query_y)

    def total(weights: Weights, *tasks: jax.Array) -> jax.Array:
        return jax.vmap(outer, in_axes=(None, 0, 0, 0, 0))(weights, *tasks).sum()

    gradient = jax.jit(jax.grad(total))

    def repetition() -> Params:
        found = jax.block_until_ready(gradient(weights, *given))
        return {names[n]: torch.from_numpy(np.array(g)) for n, g in found.items()}

    return repetition


def _squares(outputs: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.square(outputs - y).mean()


def _cross_entropy(outputs: jax.Array, y: jax.Array) -> jax.Array:
    of_labels = jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1)
    return -of_labels.mean()


# ---- torch's modules, as somebody who knows JAX writes them --------------------------------------


def _apply(module: nn.Module, w: Weights, at: str, x: jax.Array) -> jax.Array:
    """Return what ``module`` computes, with its weights in ``w`` under the prefix ``at``."""
    for kind, apply in _KINDS.items():
        if isinstance(module, kind):
            return apply(module, w, at, x)
    raise NotImplementedError(f"the jax peer has no {type(module).__name__}")


def _sequential(module: Any, w: Weights, at: str, x: jax.Array) -> jax.Array:
    for name, child in module.named_children():
        x = _apply(child, w, f"{at}{name}.", x)
    return x


def _linear(module: Any, w: Weights, at: str, x: jax.Array) -> jax.Array:
    return x @ w[f"{at}weight"].T + w[f"{at}bias"]


def _convolution(module: Any, w: Weights, at: str, x: jax.Array) -> jax.Array:
    (stride, _), (padding, _) = module.stride, module.padding
    kernel = w[f"{at}weight"]
    height, width = x.shape[2:]
    size = kernel.shape[2]
    x = jnp.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    rows, columns = (1 + (s + 2 * padding - size) // stride for s in (height, width))
    patches = jnp.stack(
        [
            x[:, :, i : i + stride * rows : stride, j : j + stride * columns : stride]
            for i in range(size)
            for j in range(size)
        ],
        axis=2,
    )[..., :rows, :columns]
    found = jnp.einsum("ncphw,ocp->nohw", patches, kernel.reshape(*kernel.shape[:2], -1))
    return found if module.bias is None else found + w[f"{at}bias"][:, None, None]


def _batch_norm(module: Any, w: Weights, at: str, x: jax.Array) -> jax.Array:
    mean = x.mean((0, 2, 3), keepdims=True)
    scale = lax.rsqrt(x.var((0, 2, 3), keepdims=True) + module.eps)
    return (x - mean) * scale * w[f"{at}weight"][:, None, None] + w[f"{at}bias"][:, None, None]


def _max_pool(module: Any, w: Weights, at: str, x: jax.Array) -> jax.Array:
    n, c, height, width = x.shape
    x = x[:, :, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(n, c, height // 2, 2, width // 2, 2).max((3, 5))


def _layer_norm(w: Weights, at: str, x: jax.Array, eps: float) -> jax.Array:
    scale = lax.rsqrt(x.var(-1, keepdims=True) + eps)
    return (x - x.mean(-1, keepdims=True)) * scale * w[f"{at}weight"] + w[f"{at}bias"]


def _encoder_layer(module: Any, w: Weights, at: str, x: jax.Array) -> jax.Array:
    heads, size = module.self_attn.num_heads, x.shape[-1]
    normed = _layer_norm(w, f"{at}norm1.", x, module.norm1.eps)
    of_heads = normed @ w[f"{at}self_attn.in_proj_weight"].T + w[f"{at}self_attn.in_proj_bias"]
    q, k, v = of_heads.reshape(*x.shape[:-1], 3, heads, -1).transpose(2, 0, 3, 1, 4)
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / (size // heads) ** 0.5)
    mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    x = x + _linear(None, w, f"{at}self_attn.out_proj.", mixed)
    hidden = _linear(None, w, f"{at}linear1.", _layer_norm(w, f"{at}norm2.", x, module.norm2.eps))
    return x + _linear(None, w, f"{at}linear2.", jax.nn.relu(hidden))


def _vit(module: Any, w: Weights, at: str, x: jax.Array) -> jax.Array:
    tokens = _convolution(module.patches, w, f"{at}patches.", x)
    tokens = tokens.reshape(*tokens.shape[:2], -1).swapaxes(1, 2) + w[f"{at}places"]
    for i, layer in enumerate(module.layers):
        tokens = _encoder_layer(layer, w, f"{at}layers.{i}.", tokens)
    return _linear(None, w, f"{at}head.", tokens.mean(1))


def _rows_lstm(module: Any, w: Weights, at: str, x: jax.Array) -> jax.Array:
    rows = x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1)
    of_inputs, of_states = (w[f"{at}cells.weight_{kind}_l0"] for kind in ("ih", "hh"))
    bias = w[f"{at}cells.bias_ih_l0"] + w[f"{at}cells.bias_hh_l0"]
    given = rows.swapaxes(0, 1) @ of_inputs.T + bias

    def step(state: Any, row: jax.Array) -> Any:
        h, c = state
        i, f, g, o = jnp.split(row + h @ of_states.T, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), None

    begun = jnp.zeros((len(x), of_states.shape[1]), x.dtype)
    (h, _), _ = lax.scan(step, (begun, begun), given)
    return _linear(None, w, f"{at}head.", h)


_KINDS: dict[type[nn.Module], Callable[..., jax.Array]] = {
    ViT: _vit,
    RowsLSTM: _rows_lstm,
    nn.Sequential: _sequential,
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.BatchNorm2d: _batch_norm,
    nn.MaxPool2d: _max_pool,
    nn.ReLU: lambda module, w, at, x: jax.nn.relu(x),
    nn.Flatten: lambda module, w, at, x: x.reshape(len(x), -1),
    nn.AdaptiveAvgPool2d: lambda module, w, at, x: x.mean((2, 3), keepdims=True),
}
