"""Ordinary classifiers: presets of ``--learner supervised``."""

from typing import Any

from maml.config.fields import Config
from maml.config.rows.released import claimed


def _supervised(
    data: str, network: str, ways: int, source: str, *, meta_lr: float, **values: Any
) -> Config:
    """Ordinary classification by SGD with momentum."""
    return Config(
        preset=f"supervised-{data}-{network}",
        source=source,
        learner="supervised",
        data=data,
        network=network,
        ways=ways,
        meta_optimizer="sgd",
        meta_momentum=0.9,
        meta_lr=meta_lr,
        meta_batch_size=2,
        transductive=False,
        **values,
    )


LENET = "LeNet-5, LeCun et al. 1998, doi:10.1109/5.726791"
RESNET = "ResNet, He et al. 2016, arXiv:1512.03385"
VGG = "VGG, Simonyan and Zisserman 2015, arXiv:1409.1556"

# An iteration is two mini-batches, one for each of two workers. Tasks to evaluate are one pass.
_CHARACTERS: dict[str, Any] = {
    "meta_lr": 0.02,
    "batch_size": 20,
    "iterations": 1400,  # 40 epochs of 1,400 drawings
    "eval_every": 350,
    "eval_tasks": 10,
    "test_tasks": 20,
    "checkpoint_every": 350,
}
_MNIST: dict[str, Any] = {
    "meta_lr": 0.01,
    "batch_size": 50,
    "iterations": 10_800,  # 20 epochs of 54,000 images
    "eval_every": 540,
    "eval_tasks": 120,
    "test_tasks": 200,
    "checkpoint_every": 540,
}
_CIFAR: dict[str, Any] = {
    "meta_lr": 0.05,
    "batch_size": 50,
    "iterations": 13_500,  # 30 epochs of 45,000 images
    "eval_every": 450,
    "eval_tasks": 100,
    "test_tasks": 200,
    "checkpoint_every": 450,
    "task_batch": 2,
}
_SVHN: dict[str, Any] = _CIFAR | {
    "meta_lr": 0.01,
    "iterations": 13_180,  # 20 epochs of 65,932 images
    "eval_every": 659,
    "eval_tasks": 147,
    "test_tasks": 521,
    "checkpoint_every": 659,
}


ROWS = (
    _supervised("glyphs", "lenet", 100, f"this project's data set; {LENET}", **_CHARACTERS),
    _supervised("omniglot", "lenet", 100, f"no published row; {LENET}", **_CHARACTERS),
    _supervised(
        "mnist",
        "lenet",
        10,
        f"{LENET}, section III.C, undistorted images",
        **claimed("99.05 %"),
        **_MNIST,
    ),
    _supervised(
        "fashion-mnist",
        "lenet",
        10,
        f"no published row; Xiao et al. 2017, arXiv:1708.07747; {LENET}",
        **_MNIST,
    ),
    _supervised("cifar10", "resnet18", 10, f"no published row; {RESNET}", **_CIFAR),
    _supervised("cifar100", "resnet34", 100, f"no published row; {RESNET}", **_CIFAR),
    _supervised("svhn", "vgg11", 10, f"no published row; {VGG}", **_SVHN),
)
