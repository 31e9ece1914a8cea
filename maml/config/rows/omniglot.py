"""The rows of Omniglot."""

from __future__ import annotations

from typing import Any

from maml.config.fields import Config, with_values
from maml.config.rows.released import (
    ANTONIOU,
    FINN,
    MAMLPP,
    NICHOL,
    PROTONET,
    RAGHU,
    RAJESWARAN,
    REPTILE,
    SNELL,
)


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


def _mamlpp(ways: int, shots: int, published: float) -> Config:
    # Of the released configurations: omniglot_maml++-omniglot_*.json.
    return _omniglot(
        ways,
        shots,
        published,
        source=f"{ANTONIOU}, table 1 (an ensemble of five)",
        **MAMLPP,
        omniglot_split="mamlpp",
        queries=1,
        eval_queries=1,
        msl_epochs=10,
        meta_batch_size=8,
        meta_schedule="cosine",
        meta_lr_end=1e-5,
    )


def _protonet(ways: int, shots: int, published: float) -> Config:
    # Section 3.1: 60 classes an episode, 5 queries of each. It stops when validation stops to
    # improve; here after 20,000 episodes, when the rate is a thousandth.
    return _omniglot(
        ways,
        shots,
        published,
        source=f"{SNELL}, table 1",
        **PROTONET,
        omniglot_split="vinyals",
        train_ways=60,
        queries=5,
        eval_queries=5,
    )


def _reptile(ways: int, shots: int, published: float) -> Config:
    # Table 2, transductive; the released run_omniglot commands.
    twenty = ways == 20
    values: dict[str, Any] = {"inner_steps": 10 if twenty else 5, "train_shots": 10}
    values |= {"network": "conv4-flat"}
    values |= {"eval_inner_batch": 10 if twenty else 5}
    if twenty:
        values |= {"inner_lr": 5e-4, "inner_batch": 20, "iterations": 200_000}
    return _omniglot(ways, shots, published, source=f"{NICHOL}, table 2", **REPTILE | values)


def _imaml(ways: int, shots: int, published: float) -> Config:
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


ROWS = (
    _omniglot(5, 1, 0.987),
    _omniglot(5, 5, 0.999),
    _omniglot(20, 1, 0.958),
    _omniglot(20, 5, 0.989),
    # The paper has no row of 5 ways: this one is to stand beside MAML's.
    _omniglot(5, 1, None, learner="anil", source=f"no published row; {RAGHU}"),
    _omniglot(20, 1, 0.962, learner="anil", source=f"{RAGHU}, with MAML's protocol"),
    _omniglot(20, 5, 0.980, learner="anil", source=f"{RAGHU}, with MAML's protocol"),
    _mamlpp(5, 1, 0.9947),
    _mamlpp(5, 5, 0.9993),
    _mamlpp(20, 1, 0.9765),
    _mamlpp(20, 5, 0.9933),
    _protonet(5, 1, 0.988),
    _protonet(5, 5, 0.997),
    _protonet(20, 1, 0.960),
    _protonet(20, 5, 0.989),
    _reptile(5, 1, 0.9768),
    _reptile(5, 5, 0.9948),
    _reptile(20, 1, 0.8943),
    _reptile(20, 5, 0.9712),
    _imaml(5, 1, 0.9916),
    _imaml(5, 5, 0.9967),
    _imaml(20, 1, 0.9446),
    _imaml(20, 5, 0.9869),
)
