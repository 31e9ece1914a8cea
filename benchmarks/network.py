"""The networks as a user of another library would write them: torch's own modules."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from datasets import image_shape
from maml.config import Config, registry
from maml.learners import build_learner
from maml.networks.conv4 import Conv4, ConvBlock
from maml.networks.ordinary import Ordinary
from maml.params import Params

Repetition = Callable[[], Params]
Loss = Callable[[Tensor, Tensor], Tensor]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor], object]
"""Called with a task's support_x, support_y, query_x and query_y."""


def conv_net(ours: Conv4) -> nn.Module:
    """Return `maml.networks.conv4.Conv4` rebuilt from torch's modules (``nn.BatchNorm2d``, …)."""
    layers: list[nn.Module] = []
    for block in ours.blocks:
        assert isinstance(block, ConvBlock)
        conv = block.conv
        layers += [
            nn.Conv2d(conv.in_channels, conv.out_channels, 3, stride=conv.stride[0], padding=1),
            nn.BatchNorm2d(conv.out_channels, eps=block.norm.eps, track_running_stats=False),
            nn.ReLU(),
            *([nn.MaxPool2d(2)] if ours.pool else []),
        ]
    layers += [nn.AdaptiveAvgPool2d(1)] if ours.mean else []
    head = nn.Linear(ours.head.in_features, ours.head.out_features)
    return nn.Sequential(*layers, nn.Flatten(), head)


def peer_network(config: Config) -> tuple[nn.Module, dict[str, str]]:
    """Return a peer's network with our learner's weights, and {its parameter name: ours}."""
    learner = build_learner(config)
    ours = learner.network
    if isinstance(ours, Ordinary):
        make = registry.network(config.network).maker()
        network: nn.Module = make(image_shape(config.data), config.ways)
    elif isinstance(ours, Conv4):
        network = conv_net(ours)
    else:  # `maml.networks.conv4.MLP`
        hidden = nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU()
        network = nn.Sequential(*hidden, nn.Linear(40, 1))
    network = network.to(next(ours.parameters()).dtype)
    # Both list their parameters in the order of use.
    theirs, params = dict(network.named_parameters()), dict(learner.named_parameters())
    names = dict(zip(theirs, params, strict=True))
    network.load_state_dict({peer: params[our].detach() for peer, our in names.items()})
    return network, names


def loss_function(config: Config) -> Loss:
    """Return torch's own loss for the setting."""
    return F.mse_loss if config.data == "sinusoid" else F.cross_entropy
