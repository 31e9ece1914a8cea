"""Few-shot learners: a preset for each row of a published table, and short ones.

``glyphs`` are this project's embedded data: their presets have no published number.
"""

from __future__ import annotations

from typing import Any

from maml.config.fields import Config, with_values

FINN = "MAML, Finn et al. 2017, arXiv:1703.03400"
OH = "BOIL, Oh et al. 2021, arXiv:2008.08882"
ANTONIOU = "MAML++, Antoniou et al. 2019, arXiv:1810.09502"
RAGHU = "ANIL, Raghu et al. 2020, arXiv:1909.09157"
SNELL = "ProtoNet, Snell et al. 2017, arXiv:1703.05175"
BERTINETTO = "R2D2, Bertinetto et al. 2019, arXiv:1805.08136"
NICHOL = "Reptile, Nichol et al. 2018, arXiv:1803.02999"
CHEN = "Chen et al. 2019, arXiv:1904.04232"
ZINTGRAF = "CAVIA, Zintgraf et al. 2019, arXiv:1810.03642"
PARK = "Meta-Curvature, Park and Oliva 2019, arXiv:1902.03356"
LI = "Meta-SGD, Li et al. 2017, arXiv:1707.09835"
RAJESWARAN = "iMAML, Rajeswaran et al. 2019, arXiv:1909.04630"


def _omniglot(
    ways: int,
    shots: int,
    published: float | None,
    *,
    learner: str = "maml",
    name: str | None = None,
    source: str = f"{FINN}, table 1",
    **values: Any,
) -> Config:
    # Section 5.2 and appendix A.1. The paper's raw rates (0.4; 0.1) multiply the gradient of a
    # sum that is N times the mean cross-entropy's: 2.0 in both cases on the mean.
    twenty = ways == 20
    config = Config(
        preset=f"{name or learner}-omniglot-{ways}way-{shots}shot",
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


def _miniimagenet(
    shots: int,
    published: float,
    *,
    learner: str = "maml",
    name: str | None = None,
    source: str = f"{FINN}, table 1",
    **values: Any,
) -> Config:
    # Section 5.2 and the released command. The raw rate 0.01 and the clip at 10 are of sums over
    # the examples, divided by K: on a mean, N times the rate, and K / (N Q) of the clip.
    config = Config(
        preset=f"{name or learner}-miniimagenet-5way-{shots}shot",
        source=f"{source}, MiniImageNet 5-way {shots}-shot",
        published=published,
        learner=learner,
        data="miniimagenet",
        network="conv4-pool",
        filters=32,
        ways=5,
        shots=shots,
        queries=15,
        eval_queries=shots,
        inner_lr=0.05,
        inner_steps=5,
        eval_inner_steps=10,
        grad_clip=10 * shots / 75,
        meta_batch_size=4,
        iterations=60_000,
        checkpoint_every=500,
        eval_every=1000,
        task_batch=4,
    )
    return with_values(config, **values)


def _finn_miniimagenet(shots: int, published: float, **values: Any) -> Config:
    # As in the released code, whose author says there (issue 8) that the paper's numbers are of the
    # models that validated best. By 600 tasks: a hundred, of five or 25 answers each, would choose
    # by chance.
    values |= {"head_init": "xavier", "test_model": "best", "eval_tasks": 600}
    return _miniimagenet(shots, published, **values)


def _cifar(data: str, source: str, shots: int, published: float | None = None) -> Config:
    # MiniImageNet's command, as the paper of CIFAR-FS gives no other.
    return with_values(
        _finn_miniimagenet(shots, 0.0),
        preset=f"maml-{data}-5way-{shots}shot",
        data=data,
        source=f"{source}, 5-way {shots}-shot",
        published=published,
    )


# What MAML++'s released configurations share, of whatever data. Those of MiniImageNet say
# init_inner_loop_learning_rate 0.01, too, which the released code never reads: it takes 0.1.
_MAMLPP: dict[str, Any] = {
    "learner": "mamlpp",
    "network": "conv4-pool",
    "leak": 0.01,
    "norm_eps": 1e-5,
    "head_init": "xavier",
    "inner_lr": 0.1,
    "inner_steps": 5,
    "eval_inner_steps": 5,
    "iterations": 50_000,  # 100 epochs of 500
    # After each epoch, by 600 tasks: its published numbers are of an ensemble of the five best.
    "keep_best": 5,
    "eval_every": 500,
    "checkpoint_every": 500,
    "eval_tasks": 600,
}


def _mamlpp_omniglot(ways: int, shots: int, published: float) -> Config:
    # Of the released configurations: omniglot_maml++-omniglot_*.json.
    return _omniglot(
        ways,
        shots,
        published,
        source=f"{ANTONIOU}, table 1 (an ensemble of five)",
        **_MAMLPP,
        omniglot_split="mamlpp",
        queries=1,
        eval_queries=1,
        msl_epochs=10,
        meta_batch_size=8,
        meta_schedule="cosine",
        meta_lr_end=1e-5,
    )


def _mamlpp_miniimagenet(shots: int, published: float) -> Config:
    # Of the released configurations: mini-imagenet_maml++-mini-imagenet_*.json.
    return _miniimagenet(
        shots,
        published,
        source=f"{ANTONIOU}, table 1 (an ensemble of five)",
        **_MAMLPP,
        filters=48,
        eval_queries=15,
        grad_clip=10.0,
        msl_epochs=15,
        meta_batch_size=2,
    )


# What the released code of Prototypical Networks does whatever the data: an episode a step.
_PROTONET: dict[str, Any] = {
    "learner": "protonet",
    "network": "conv4-pool",
    "filters": 64,
    "norm_eps": 1e-5,
    "inner_lr": 0.4,  # as nobody reads it, the default
    "inner_steps": 1,
    "eval_inner_steps": 3,
    "grad_clip": None,
    "meta_batch_size": 1,
    "meta_schedule": "halving",
    "meta_halve_every": 2000,
    "iterations": 20_000,
    "transductive": False,
}


def _protonet_omniglot(ways: int, shots: int, published: float) -> Config:
    # Section 3.1: 60 classes an episode, 5 queries of each. It stops when validation stops to
    # improve; here after 20,000 episodes, when the rate is a thousandth.
    return _omniglot(
        ways,
        shots,
        published,
        source=f"{SNELL}, table 1",
        **_PROTONET,
        omniglot_split="vinyals",
        train_ways=60,
        queries=5,
        eval_queries=5,
    )


def _protonet_miniimagenet(shots: int, published: float, train_ways: int) -> Config:
    # Section 3.2.
    return _miniimagenet(
        shots,
        published,
        source=f"{SNELL}, table 2",
        **_PROTONET,
        train_ways=train_ways,
        eval_queries=15,
    )


# What the released commands of Reptile share: Adam with β1 = 0 inside, whose second moment lives
# on, a falling step outside. The output layer begins as TensorFlow's layers do.
_REPTILE: dict[str, Any] = {
    "learner": "reptile",
    "inner_optimizer": "adam0",
    "keep_moment": True,
    "head_init": "xavier",
    "inner_lr": 1e-3,
    "inner_batch": 10,
    "eval_inner_steps": 50,
    "meta_optimizer": "sgd",
    "meta_lr": 1.0,
    "meta_schedule": "linear",
    "meta_batch_size": 5,
    "iterations": 100_000,
    "queries": 1,
    "eval_queries": 1,
    "grad_clip": None,
}


def _reptile_omniglot(ways: int, shots: int, published: float) -> Config:
    # Table 2, transductive; the released run_omniglot commands.
    twenty = ways == 20
    values: dict[str, Any] = {"inner_steps": 10 if twenty else 5, "train_shots": 10}
    values |= {"network": "conv4-flat"}
    values |= {"eval_inner_batch": 10 if twenty else 5}
    if twenty:
        values |= {"inner_lr": 5e-4, "inner_batch": 20, "iterations": 200_000}
    return _omniglot(ways, shots, published, source=f"{NICHOL}, table 2", **_REPTILE | values)


def _reptile_miniimagenet(shots: int, published: float) -> Config:
    # Table 1, transductive; the released run_miniimagenet commands.
    return _miniimagenet(
        shots,
        published,
        source=f"{NICHOL}, table 1",
        **_REPTILE,
        inner_steps=8,
        train_shots=15,
        eval_inner_batch=5 if shots == 1 else 15,
    )


def _imaml_omniglot(ways: int, shots: int, published: float) -> Config:
    # Table 2, with gradient descent, whose caption has the steps and λ; the other values are those
    # of the command in the released code (examples/README.md), which trains 20,000 meta-steps.
    # There, plain steps are followed by one of the pull, the solver divides the Hessian by λ + 10,
    # Adam's ε is 1e-3, tests have no pull, and the head sees all pixels. Its ink is dark there.
    steps = 25 if ways == 20 else 16
    return _omniglot(
        ways,
        shots,
        published,
        learner="imaml",
        source=f"{RAJESWARAN}, table 2 (GD)",
        network="conv4-flat",
        inner_lr=0.1,
        inner_steps=steps,
        eval_inner_steps=steps,
        proximal=2.0,
        cg_steps=5,
        cg_damping=1.0,
        cg_lambda=12.0,
        pull="end",
        eval_proximal=0.0,
        meta_eps=1e-3,
        meta_batch_size=32,
        iterations=20_000,
    )


def _glyphs(
    ways: int,
    shots: int,
    *,
    learner: str = "maml",
    name: str | None = None,
    source: str = FINN,
    **values: Any,
) -> Config:
    config = Config(
        preset=f"{name or learner}-glyphs-{ways}way-{shots}shot",
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


ROWS = (
    _glyphs(5, 1),
    _glyphs(5, 5),
    _glyphs(20, 1),
    _glyphs(20, 5),
    _omniglot(5, 1, 0.987),
    _omniglot(5, 5, 0.999),
    _omniglot(20, 1, 0.958),
    _omniglot(20, 5, 0.989),
    _finn_miniimagenet(1, 0.4870),
    _finn_miniimagenet(5, 0.6311),
    _cifar("cifarfs", f"{FINN}, as measured by {BERTINETTO}", 1, 0.589),
    _cifar("cifarfs", f"{FINN}, as measured by {BERTINETTO}", 5, 0.715),
    _cifar("fc100", f"no published row; {FINN}", 1),
    _cifar("fc100", f"no published row; {FINN}", 5),
    _maml_sinusoid(),
    _glyphs(5, 1, name="fomaml", order="first"),
    _finn_miniimagenet(1, 0.4807, name="fomaml", order="first"),
    _finn_miniimagenet(5, 0.6315, name="fomaml", order="first"),
    _glyphs(5, 1, learner="anil", source=RAGHU),
    # The paper has no row of 5 ways: this one is to stand beside MAML's.
    _omniglot(5, 1, None, learner="anil", source=f"no published row; {RAGHU}"),
    _omniglot(20, 1, 0.962, learner="anil", source=f"{RAGHU}, with MAML's protocol"),
    _omniglot(20, 5, 0.980, learner="anil", source=f"{RAGHU}, with MAML's protocol"),
    _glyphs(5, 1, learner="boil", source=OH),
    # The published schedules, with epochs of ten iterations.
    _glyphs(
        5,
        1,
        source=ANTONIOU,
        **_MAMLPP
        | {"iterations": 1000, "eval_every": 100, "checkpoint_every": 100, "eval_tasks": 100},
        iterations_per_epoch=10,
        meta_schedule="cosine",
        meta_lr_end=1e-5,
    ),
    _mamlpp_omniglot(5, 1, 0.9947),
    _mamlpp_omniglot(5, 5, 0.9993),
    _mamlpp_omniglot(20, 1, 0.9765),
    _mamlpp_omniglot(20, 5, 0.9933),
    _mamlpp_miniimagenet(1, 0.5215),
    _mamlpp_miniimagenet(5, 0.6832),
    _glyphs(5, 1, learner="protonet", source=SNELL, train_ways=20, meta_batch_size=4),
    _protonet_omniglot(5, 1, 0.988),
    _protonet_omniglot(5, 5, 0.997),
    _protonet_omniglot(20, 1, 0.960),
    _protonet_omniglot(20, 5, 0.989),
    _protonet_miniimagenet(1, 0.4942, 30),
    _protonet_miniimagenet(5, 0.6820, 20),
    _glyphs(5, 1, learner="r2d2", source=BERTINETTO),
    _glyphs(
        5,
        1,
        source=NICHOL,
        # The released Adam at 1e-3 learns 48 % in so short a training, plain steps 90 %.
        **_REPTILE
        | {"iterations": 1000, "queries": 5, "eval_queries": 5}
        | {"inner_optimizer": "sgd", "inner_lr": 0.3, "keep_moment": False, "head_init": "small"},
        inner_steps=10,
        train_shots=10,
        eval_inner_batch=5,
    ),
    _reptile_omniglot(5, 1, 0.9768),
    _reptile_omniglot(5, 5, 0.9948),
    _reptile_omniglot(20, 1, 0.8943),
    _reptile_omniglot(20, 5, 0.9712),
    _reptile_miniimagenet(1, 0.4997),
    _reptile_miniimagenet(5, 0.6599),
    _glyphs(
        5,
        1,
        learner="cavia",
        source=ZINTGRAF,
        inner_lr=3.0,
        inner_steps=2,
        eval_inner_steps=2,
        meta_lr=3e-3,
    ),
    _glyphs(5, 1, learner="metacurv", source=PARK),
    _glyphs(5, 1, learner="noadapt", source=f"the floor; {FINN}, section 5.1"),
    _glyphs(
        5,
        1,
        learner="finetune",
        source=f"a baseline; {CHEN}",
        train_ways=800,
        batch_size=64,
        meta_batch_size=2,
        inner_lr=0.1,
        eval_inner_steps=100,
    ),
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
)
