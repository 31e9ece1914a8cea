"""The peers, one file each: a peer that goes task by task has ``backward_of``, others ``build``.

A repetition computes Σ over tasks of the meta-gradient, and returns it by the learner's names.
"""

import importlib
from typing import Any

import maml
from benchmarks.network import Repetition, loss_function, peer_network
from benchmarks.peers import ours_peer, vmap_peer
from datasets.tasks import Task
from maml.config import Config
from maml.config.presets import with_values
from maml.params import Params

OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-torch": {"meta_gradient": "reverse", "kernels": "torch"},
    "ours-compiled": {"meta_gradient": "reverse", "kernels": "torch", "compile": "on"},
    "ours-mixed": {"meta_gradient": "mixed", "kernels": "torch"},
    "ours-reverse": {"meta_gradient": "reverse"},
    "ours-vmap": {"batching": "vmap"},
    "ours-tasks": {"batching": "tasks"},
}
"""This project with the flags of a run (``ours``), and with other flags."""
LIBRARY: dict[str, Any] = {"library": False, "library-compiled": True}
"""`maml.MAML` around torch's own modules, by its argument ``compile``."""
_OTHERS = ("ours-compiled", *LIBRARY, "learn2learn", "higher", "torchopt")
OF_MAML = ("ours", "ours-torch", *_OTHERS, "vmap", "compiled", "jax")
OF_OWN = ("ours", "ours-vmap", "ours-tasks", *_OTHERS, "plain", "jax")
OF_MEMORY = ("ours", "ours-mixed", "ours-reverse", "learn2learn", "plain", "vmap")
"""The peers that can compute MAML on our networks, those for a user's own networks, and those whose
peak memory grows in different ways."""
PEERS = tuple(dict.fromkeys((*OF_MAML, *OF_OWN, *OF_MEMORY)))


def build(name: str, config: Config, tasks: Task) -> Repetition:
    """Return a repetition of peer ``name``."""
    if name in OURS:
        return ours_peer.build(with_values(config, **OURS[name]), tasks)
    if name in ("vmap", "compiled"):
        return vmap_peer.build(config, tasks, compiled=name == "compiled")
    if name == "jax":
        return importlib.import_module("benchmarks.peers.jax_peer").build(config, tasks)
    network, names = peer_network(config)
    if name in LIBRARY:
        learner = maml.MAML(
            network, inner_lr=config.inner_lr, inner_steps=config.inner_steps,
            loss=loss_function(config), compile=LIBRARY[name],
        )  # fmt: skip

        def step() -> Params:
            network.zero_grad()
            (learner(tasks) * len(tasks.query_y)).backward()
            return {names[name]: p.grad for name, p in network.named_parameters()}  # type: ignore

        return step
    module = importlib.import_module(f"benchmarks.peers.{name}_peer")
    backward = module.backward_of(network, config, loss_function(config))

    def repetition() -> Params:
        network.zero_grad()
        for task in zip(*tasks, strict=True):
            backward(*task)
        params = network.named_parameters()
        return {names[name]: p.grad for name, p in params if p.grad is not None}

    return repetition
