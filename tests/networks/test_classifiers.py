"""The classifiers are the published networks, and equal torchvision's or learn2learn's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models import vgg

from maml.config import registry
from maml.errors import UserError
from maml.learners import build_learner
from maml.networks import build_network
from maml.trainer import Trainer
from maml.training.initial import initial_weights
from tests.metagradient.peer import oracle
from tests.runs import glyphs


def build(name: str, shape: tuple[int, int, int] = (3, 32, 32), ways: int = 10) -> Any:
    torch.manual_seed(0)
    return build_network(name, image_shape=shape, ways=ways, filters=64)


DEEP = [name for name in registry.known("network") if name.startswith(("resnet", "vgg"))]


@pytest.mark.parametrize("name", DEEP)
def test_the_name_counts_the_layers_with_weights(name: str) -> None:
    """Count convolutions and linear layers, but not those that only change a shortcut's shape."""
    with torch.device("meta"):
        network = build(name)
    layers = [
        layer
        for path, layer in network.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
        and "downsample" not in path
        # Few-shot tables count only the convolutions: the last layer is the learner's.
        and not (name == "resnet12" and path == "module.head")
    ]
    assert len(layers) == int(name.removeprefix("resnet").removeprefix("vgg"))


def test_lenet_has_the_published_sizes() -> None:
    lenet = build("lenet", (1, 28, 28))
    weights = [tuple(p.shape) for name, p in lenet.named_parameters() if name.endswith("weight")]
    assert weights == [(6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
    # The original's input is 32×32, with 28×28 characters in its middle.
    x = torch.rand(2, 1, 28, 28)
    framed = torch.zeros(2, 1, 32, 32)
    framed[:, :, 2:30, 2:30] = x
    wide = build("lenet", (1, 32, 32), ways=10)
    wide.load_state_dict(lenet.state_dict())
    assert torch.equal(lenet(x)[0], wide(framed)[0])


@pytest.mark.parametrize(
    ("name", "shape", "norms"),
    [("lenet", (3, 84, 84), 0), ("resnet18", (1, 28, 28), 20), ("vgg11", (1, 28, 28), 0)],
)
def test_maps_images_of_any_size(name: str, shape: tuple[int, int, int], norms: int) -> None:
    outputs, used = build(name, shape, ways=7)(torch.rand(2, *shape))
    assert outputs.shape == (2, 7) and outputs.isfinite().all()
    assert len(used) == norms


def test_larger_images_meet_torchvision_s_own_stem() -> None:
    """Above 64 pixels a ResNet is torchvision's, weights and all."""
    ours = build("resnet18", (3, 96, 96), ways=1000)
    peer = torchvision.models.resnet18()
    peer.load_state_dict(ours.module.state_dict(), strict=False)
    x = torch.rand(2, 3, 96, 96)
    torch.testing.assert_close(ours(x)[0], peer.train()(x), rtol=1e-4, atol=1e-5)


def test_given_statistics_are_used_as_torchvision_uses_running_ones() -> None:
    """A call changes no state: the network has no running statistics."""
    ours = build("resnet18").double()
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    assert before.keys() == dict(ours.named_parameters()).keys()
    generator = torch.Generator().manual_seed(1)
    support, query = torch.rand(2, 3, 3, 32, 32, generator=generator, dtype=torch.float64)
    of_support, used = ours(support)
    peer: Any = torchvision.models.resnet18(num_classes=10).double()
    peer.conv1, peer.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False).double(), nn.Identity()
    peer.load_state_dict(ours.module.state_dict(), strict=False)
    norms = [layer for layer in peer.modules() if isinstance(layer, nn.BatchNorm2d)]
    for norm, (mean, variance) in zip(norms, used, strict=True):
        norm.running_mean, norm.running_var = mean.detach(), variance.detach()
    torch.testing.assert_close(of_support, peer.eval()(support), rtol=1e-10, atol=1e-10)
    expected = peer(query)
    torch.testing.assert_close(ours(query, used)[0], expected, rtol=1e-10, atol=1e-10)
    assert (ours(query)[0] - expected).abs().max() > 1e-3
    assert torch.equal(ours(support)[0], of_support)
    assert all(torch.equal(before[name], t) for name, t in ours.state_dict().items())


def test_vgg_equals_torchvision_s_layers() -> None:
    with torch.device("meta"):
        assert build("vgg16", (3, 224, 224)).module.avgpool.output_size == (7, 7)
    ours = build("vgg13", (3, 64, 64)).double()
    assert ours.module.avgpool.output_size == (2, 2)
    peer = nn.Sequential(
        vgg.make_layers(vgg.cfgs["B"]),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        *ours.module.classifier,
    ).double()
    peer[0].load_state_dict(ours.module.features.state_dict())
    x = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(ours(x)[0], peer(x), rtol=1e-10, atol=1e-12)


def learn2learn_s_resnet12(channels: int) -> Any:
    return oracle("ResNet12Backbone", "vision.models")(channels=channels, dropblock_dropout=0.0)


def test_resnet12_equals_learn2learn_s_on_miniimagenet_s_images() -> None:
    """The last feature maps are 5×5, as learn2learn's mean over them expects."""
    ours, peer = build("resnet12", (3, 84, 84)), learn2learn_s_resnet12(3)
    weights = {n: t for n, t in ours.module.state_dict().items() if not n.startswith("head.")}
    assert weights.keys() == dict(peer.named_parameters()).keys()
    peer.load_state_dict(weights, strict=False)
    x = torch.rand(2, 3, 84, 84)
    with torch.no_grad():
        expected = ours.module.head(peer.train()(x))
        torch.testing.assert_close(ours(x)[0], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="resnet12: its four poolings leave nothing of 28x15"):
        build("resnet12", (1, 28, 15))


def test_resnet12_trains_from_learn2learn_s_weights(tmp_path: Path) -> None:
    """A learner without a head takes all weights, and trains for one iteration."""
    weights, run_dir = tmp_path / "backbone.pt", str(tmp_path / "run")
    torch.save(learn2learn_s_resnet12(1).state_dict(), weights)
    config = glyphs(
        learner="protonet", network="resnet12", init=str(weights), run_dir=run_dir, iterations=1
    )
    begun, line = initial_weights(str(weights), build_learner(config))
    assert f"{len(begun)} of {len(begun)} tensors" in line
    assert Trainer(config).run() == 0
