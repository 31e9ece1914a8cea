"""ResNet-12 is learn2learn's, tensors' names and all."""

from pathlib import Path
from typing import Any

import pytest
import torch

from maml.errors import UserError
from maml.learners import build_learner
from maml.networks import build_network
from maml.trainer import Trainer
from maml.training.initial import initial_weights
from tests.metagradient.peer import oracle
from tests.runs import glyphs


def build(shape: tuple[int, int, int]) -> Any:
    torch.manual_seed(0)
    return build_network("resnet12", image_shape=shape, ways=5)


def learn2learn_s(channels: int) -> Any:
    return oracle("ResNet12Backbone", "vision.models")(channels=channels, dropblock_dropout=0.0)


def test_equals_learn2learn_s_on_miniimagenet_s_images() -> None:
    """Whose last maps are 5×5, as learn2learn's mean over them expects."""
    ours, peer = build((3, 84, 84)), learn2learn_s(3)
    weights = {n: t for n, t in ours.module.state_dict().items() if not n.startswith("head.")}
    assert weights.keys() == dict(peer.named_parameters()).keys()
    peer.load_state_dict(weights, strict=False)
    x = torch.rand(2, 3, 84, 84)
    with torch.no_grad():
        expected = ours.module.head(peer.train()(x))
        torch.testing.assert_close(ours(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_trains_from_learn2learn_s_weights(tmp_path: Path) -> None:
    """A learner without a head takes all of them; one step by each way through the network."""
    weights, run_dir = tmp_path / "backbone.pt", str(tmp_path / "run")
    torch.save(learn2learn_s(1).state_dict(), weights)
    config = glyphs(
        learner="protonet", network="resnet12", init=str(weights), run_dir=run_dir, iterations=1
    )
    begun, line = initial_weights(str(weights), build_learner(config))
    assert f"{len(begun)} of {len(begun)} tensors" in line
    assert Trainer(config).run() == 0


def test_small_images_are_refused() -> None:
    with pytest.raises(UserError, match="resnet12: its four poolings leave nothing of 28x15"):
        build((1, 28, 15))
