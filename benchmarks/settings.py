"""The measured settings: task distributions, networks and sizes, the same for every peer."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.network import Repetition
from benchmarks.peers import OF_MAML, OF_MEMORY, OF_OWN, build
from datasets import image_shape
from datasets.tasks import Task
from maml.config import Config
from maml.config.presets import PRESETS, with_values
from maml.learners import build_learner


class Setting(NamedTuple):
    """A meta-gradient to compute: configuration, tasks per repetition, title, and peers."""

    config: Config
    tasks: int
    title: str
    peers: tuple[str, ...] = OF_MAML


def _omniglot(ways: int, shots: int, steps: int) -> Config:
    preset = PRESETS[f"maml-omniglot-{ways}way-{shots}shot"]
    # A modest rate, so that five inner steps on random pixels do not diverge.
    return with_values(preset, inner_steps=steps, inner_lr=0.1)


_MINIIMAGENET = with_values(
    _omniglot(5, 1, 5),
    preset="synthetic-miniimagenet-5way-1shot",
    network="conv4-pool",
    filters=32,
    data="miniimagenet",
    queries=15,
)


OWN = ("ResidualCNN", "GroupNormCNN", "ViT", "RowsLSTM", "Perceptron", "Switch", "resnet18")
"""The networks of `benchmarks.own_networks`."""


def _small(name: str, steps: int) -> Setting:
    """Return a setting of few Omniglot tasks; the ResNet has MiniImageNet's shapes."""
    network = f"benchmarks.own_networks:{name}" if name in OWN else name
    # A small rate, so that 50 inner steps on random pixels do not diverge.
    config, tasks = with_values(_omniglot(5, 1, steps), network=network, inner_lr=0.01), 8
    if name == "resnet18":
        config, tasks = with_values(config, data="miniimagenet"), 2
    return Setting(config, tasks, f"{name}, {steps} step{'s' * (steps > 1)}", OF_OWN)


SETTINGS: dict[str, Setting] = {
    "omniglot-5w1s": Setting(_omniglot(5, 1, 1), 32, "Omniglot 5-way 1-shot, 1 step"),
    "omniglot-5w5s": Setting(_omniglot(5, 5, 1), 32, "Omniglot 5-way 5-shot, 1 step"),
    "omniglot-20w1s": Setting(_omniglot(20, 1, 5), 16, "Omniglot 20-way 1-shot, 5 steps"),
    "miniimagenet-5w1s": Setting(_MINIIMAGENET, 4, "MiniImageNet 5-way 1-shot, 5 steps"),
    **{f"own-{name}-{steps}": _small(name, steps) for name in OWN for steps in (1, 5)},
    "sinusoid": Setting(PRESETS["maml-sinusoid-10shot"], 25, "sinusoid 10-shot, 1 step"),
}

MEMORY: dict[str, Setting] = {
    f"memory-{network}-{n}": _small(network, n)._replace(peers=OF_MEMORY)
    for network in ("conv4", *OWN)
    for n in (1, 5, 10, 25, 50)
}
"""Settings that show how the peak memory grows with the number of inner steps."""


def make_tasks(config: Config, n_tasks: int) -> Task:
    """Return ``n_tasks`` tasks: random pixels of the data set's shape, or real sinusoids."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    shape = image_shape(config.data)
    if shape is None:
        return build_learner(config).open_tasks("train").tasks(torch.arange(n_tasks))
    generator = torch.Generator().manual_seed(config.seed)

    def examples(per_class: int) -> tuple[Tensor, Tensor]:
        size = (n_tasks, config.ways * per_class, *shape)
        # Drawn in float64, so that every dtype sees the same pixels.
        pixels = torch.rand(size, generator=generator, dtype=torch.float64).to(dtype)
        labels = torch.arange(config.ways).repeat_interleave(per_class)
        return pixels, labels.expand(n_tasks, -1).contiguous()

    return Task(*examples(config.shots), *examples(config.queries))


def repetition_of(peer: str, setting: str, threads: int, *, float64: bool) -> Repetition:
    """Return the function that ``peer`` repeats; ``float64``: on few tasks, for a check."""
    config, n_tasks, *_ = (SETTINGS | MEMORY)[setting]
    if float64:
        config, n_tasks = with_values(config, dtype="float64"), min(n_tasks, 3)
    # For ours, the preset's number of threads comes first: a tiny network computes on one.
    torch.set_num_threads(config.threads or threads if peer.startswith("ours") else threads)
    return build(peer, config, make_tasks(config, n_tasks))
