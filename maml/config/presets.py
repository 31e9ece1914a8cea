"""Presets: values of `Config`, one per row of a published table, each naming its source."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any

from maml.config import MUST_MATCH, OF_THE_RESULT, Config, flag, registry

FINN = "MAML, Finn et al. 2017, arXiv:1703.03400"
RAGHU = "ANIL, Raghu et al. 2020, arXiv:1909.09157"
LI = "Meta-SGD, Li et al. 2017, arXiv:1707.09835"
RAJESWARAN = "iMAML, Rajeswaran et al. 2019, arXiv:1909.04630"

WILLIAMS = "REINFORCE, Williams 1992, doi:10.1007/BF00992696"
FOERSTER = "DiCE, Foerster et al. 2018, arXiv:1802.05098"


def with_values(config: Config, **values: object) -> Config:
    """Return ``config`` with some fields replaced (`dataclasses.replace`, kept in one place)."""
    return dataclasses.replace(config, **values)  # type: ignore[arg-type]


def _omniglot(
    ways: int,
    shots: int,
    published: float,
    *,
    learner: str = "maml",
    source: str = f"{FINN}, table 1",
    **values: Any,
) -> Config:
    # Section 5.2 and appendix A.1. The paper's raw rates (0.4; 0.1) multiply the gradient of a
    # sum that is N times the mean cross-entropy's: 2.0 in both cases on the mean.
    twenty = ways == 20
    config = Config(
        preset=f"{learner}-omniglot-{ways}way-{shots}shot",
        source=f"{source}, {ways}-way {shots}-shot",
        published=published,
        learner=learner,
        data="omniglot",
        ways=ways,
        shots=shots,
        queries=shots,
        eval_queries=shots,
        inner_lr=2.0,
        inner_steps=5 if twenty else 1,
        eval_inner_steps=5 if twenty else 3,
        meta_batch_size=16 if twenty else 32,
        iterations=60_000,
        checkpoint_every=1000,
        eval_every=1000,
    )
    return with_values(config, **values)


def _imaml_omniglot(ways: int, shots: int, published: float) -> Config:
    # Table 2, with gradient descent, whose caption has the steps and λ; the other values are those
    # of the command in the released code (examples/README.md), which trains 20,000 meta-steps.
    # Its network is MAML's here: strided convolutions, but flattened there.
    steps = 25 if ways == 20 else 16
    return _omniglot(
        ways,
        shots,
        published,
        learner="imaml",
        source=f"{RAJESWARAN}, table 2 (GD)",
        inner_lr=0.1,
        inner_steps=steps,
        eval_inner_steps=steps,
        proximal=2.0,
        cg_steps=5,
        cg_damping=1.0,
        meta_batch_size=32,
        iterations=20_000,
    )


def _glyphs(
    ways: int, shots: int, *, learner: str = "maml", source: str = FINN, **values: Any
) -> Config:
    config = Config(
        preset=f"{learner}-glyphs-{ways}way-{shots}shot",
        source="this project's embedded data set; " + source,
        learner=learner,
        data="glyphs",
        ways=ways,
        shots=shots,
        queries=5,
        eval_queries=5,
        inner_lr=0.4,
        inner_steps=1,
        eval_inner_steps=3,
        meta_batch_size=16,
        iterations=1000,
        eval_every=250,
        checkpoint_every=250,
    )
    return with_values(config, **values)


def _maml_sinusoid() -> Config:
    return Config(
        preset="maml-sinusoid-10shot",
        source=f"{FINN}, section 5.1, figure 3",
        data="sinusoid",
        network="mlp",
        ways=1,
        shots=10,
        queries=10,
        eval_queries=100,
        inner_lr=0.01,
        inner_steps=1,
        eval_inner_steps=5,
        meta_batch_size=25,
        iterations=70_000,
        checkpoint_every=5000,
        eval_every=5000,
        log_every=100,
        task_batch=64,
        threads=1,  # the network is too small to share out
    )


def _policy(data: str, source: str, **values: Any) -> Config:
    """Policies: networks of which every step is small, in environments that are cheap."""
    return Config(
        source=source,
        data=data,
        network="mlp",
        ways=1,
        transductive=False,
        compile="off",
        **values,
    )


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


PRESETS: dict[str, Config] = {
    config.preset: config
    for config in (
        _glyphs(5, 1),
        _glyphs(5, 5),
        _glyphs(20, 1),
        _glyphs(20, 5),
        _omniglot(5, 1, 0.987),
        _omniglot(5, 5, 0.999),
        _omniglot(20, 1, 0.958),
        _omniglot(20, 5, 0.989),
        _maml_sinusoid(),
        _glyphs(5, 1, learner="anil", source=RAGHU),
        _omniglot(20, 1, 0.962, learner="anil", source=f"{RAGHU}, with MAML's protocol"),
        _omniglot(20, 5, 0.980, learner="anil", source=f"{RAGHU}, with MAML's protocol"),
        # Its rates are learned for as many steps as it trains with.
        _glyphs(5, 1, learner="metasgd", source=LI, eval_inner_steps=1),
        _glyphs(
            5,
            1,
            learner="imaml",
            source=RAJESWARAN,
            inner_lr=0.1,
            inner_steps=16,
            eval_inner_steps=16,
            proximal=0.5,
        ),
        _imaml_omniglot(5, 1, 0.9916),
        _imaml_omniglot(5, 5, 0.9967),
        _imaml_omniglot(20, 1, 0.9446),
        _imaml_omniglot(20, 5, 0.9869),
        _policy(
            "cartpole",
            f"{WILLIAMS}; CartPole-v1 is solved at 475 over 100 episodes",
            preset="reinforce-cartpole",
            learner="reinforce",
            horizon=500,
            queries=1,
            eval_queries=1,
            meta_batch_size=10,
            meta_lr=0.01,
            iterations=200,
            eval_every=0,
            test_tasks=100,
            checkpoint_every=50,
        ),
        _policy(
            "cartpole-physics",
            f"no published row; {FINN}, algorithm 3; {FOERSTER}",
            preset="maml-cartpole",
            learner="maml-policy",
            horizon=200,
            shots=10,
            queries=10,
            eval_queries=10,
            inner_lr=3.0,
            inner_steps=1,
            eval_inner_steps=1,
            meta_batch_size=20,
            meta_lr=5e-3,
            iterations=100,
            eval_every=50,
            eval_tasks=40,
            test_tasks=40,
            checkpoint_every=50,
            task_batch=64,
        ),
        _policy(
            "navigation",
            f"{FINN}, section 5.3, figure 4 (a plot); {FOERSTER}",
            preset="maml-navigation",
            learner="maml-policy",
            horizon=100,
            shots=20,
            queries=20,
            eval_queries=20,
            inner_lr=0.1,
            inner_steps=1,
            eval_inner_steps=1,
            meta_batch_size=20,
            meta_lr=1e-3,
            iterations=500,
            eval_every=50,
            eval_tasks=40,
            test_tasks=40,
            checkpoint_every=50,
            task_batch=64,
        ),
        _supervised("glyphs", "lenet", 100, f"this project's data set; {LENET}", **_CHARACTERS),
        _supervised("omniglot", "lenet", 100, f"no published row; {LENET}", **_CHARACTERS),
        _supervised(
            "mnist",
            "lenet",
            10,
            f"{LENET}, section III.C, undistorted images",
            published=0.9905,
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
}


def describe() -> str:
    """Return one line per preset: its name, its published accuracy and its source."""
    width = max(map(len, PRESETS))
    lines = []
    for name, config in PRESETS.items():
        published = f"{100 * config.published:.1f} %" if config.published is not None else ""
        lines.append(f"  {name:<{width}}  {published:>7}  {config.source}")
    return "\n".join(lines)


def changed(config: Config) -> dict[str, Any]:
    """Return the fields, and their values, that make another experiment of a preset."""
    preset = PRESETS.get(config.preset, Config())
    return {
        name: getattr(config, name)
        for name in (*MUST_MATCH, *OF_THE_RESULT)
        if getattr(config, name) != getattr(preset, name)
    }


def hint(name: str) -> str:
    """Return what to do about a preset's name that there is not."""
    asked = re.fullmatch(r"(\w+)-(.+?)-(\d+)way-(\d+)shot", name)
    if asked and asked[1] in registry.known("learner") and asked[2] in registry.known("data"):
        return _by_flags(asked[1], asked[2], int(asked[3]), int(asked[4]))
    near = difflib.get_close_matches(name, PRESETS, n=1)
    if near:
        return f"did you mean {near[0]}?"
    parts = set(name.split("-"))
    for kind in ("data", "learner"):
        for there in parts & registry.known(kind).keys():
            of_it = [each for each, config in PRESETS.items() if getattr(config, kind) == there]
            if of_it:
                return f"those of --{kind} {there} are {_some(of_it)}"
    return "--help lists them all"


def _by_flags(learner: str, data: str, ways: int, shots: int) -> str:
    """Say how a few-shot experiment that is no preset is had from the one that is most like it."""
    values = {"learner": learner, "data": data, "ways": ways, "shots": shots}

    def other(config: Config) -> dict[str, Any]:
        return {n: value for n, value in values.items() if getattr(config, n) != value}

    few_shot = [config for config in PRESETS.values() if config.preset.endswith("shot")]
    # Of those with as little to change: of the same data, and with a published number.
    base = min(few_shot, key=lambda c: (len(other(c)), "data" in other(c), c.published is None))
    flags = " ".join(f"{flag(n)} {value}" for n, value in other(base).items())
    of_data = [config.preset for config in few_shot if config.data == data]
    there = f"; those of --data {data} are {_some(of_data)}" if of_data else ""
    return f"no published row; {base.preset} {flags} is most like it{there}"


def _some(names: list[str]) -> str:
    """List names, but not a screen of them."""
    more = len(names) - 6
    return ", ".join(names[:6]) + (f" and {more} more (--help)" if more > 0 else "")
