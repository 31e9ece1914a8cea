"""The rows of Omniglot."""

from typing import Any

from maml.config.fields import Config, with_values
from maml.config.rows import released


def _omniglot(
    ways: int,
    shots: int,
    claim: str | None,
    *,
    learner: str = "maml",
    name: str | None = None,
    source: str = f"{released.FINN}, table 1",
    **values: Any,
) -> Config:
    # Section 5.2 and appendix A.1. The paper's raw rates (0.4; 0.1) multiply the gradient of a
    # sum that is N times the mean cross-entropy's: 2.0 in both cases on the mean.
    twenty = ways == 20
    config = Config(
        preset=f"{name or learner}-omniglot-{ways}way-{shots}shot",
        source=f"{source}, {ways}-way {shots}-shot",
        **released.claimed(claim),
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


def _mamlpp(ways: int, shots: int, claim: str) -> Config:
    # Of the released configurations: omniglot_maml++-omniglot_*.json.
    return _omniglot(
        ways,
        shots,
        claim,
        source=released.ANTONIOU + (", table 1" if ways == 20 else "") + " (an ensemble of five)",
        **released.MAMLPP,
        omniglot_split="mamlpp",
        queries=1,
        eval_queries=1,
        msl_epochs=10,
        meta_batch_size=8,
        meta_schedule="cosine",
        meta_lr_end=1e-5,
    )


def _protonet(ways: int, shots: int, claim: str) -> Config:
    # Section 3.1: 60 classes an episode, 5 queries of each. It stops when validation stops to
    # improve; here after 20,000 episodes, when the rate is a thousandth.
    return _omniglot(
        ways,
        shots,
        f"{claim} (non-transductive)",
        source=f"{released.SNELL}, table 1",
        **released.PROTONET,
        omniglot_split="vinyals",
        train_ways=60,
        queries=5,
        eval_queries=5,
    )


def _reptile(ways: int, shots: int, claim: str, alone: str) -> Config:
    # Table 2, transductive and not; the released run_omniglot commands.
    twenty = ways == 20
    values: dict[str, Any] = {"inner_steps": 10 if twenty else 5, "train_shots": 10}
    values |= {"network": "conv4-flat"}
    values |= {"eval_inner_batch": 10 if twenty else 5}
    if twenty:
        values |= {"inner_lr": 5e-4, "inner_batch": 20, "iterations": 200_000}
    claim = f"{claim} (non-transductive {alone})"
    return _omniglot(
        ways, shots, claim, source=f"{released.NICHOL}, table 2", **released.REPTILE | values
    )


def _imaml(ways: int, shots: int, claim: str) -> Config:
    # Table 2, with gradient descent, whose caption has the steps and λ; the other values are those
    # of the command in the released code (examples/README.md), which trains 20,000 meta-steps.
    # There, plain steps are followed by one of the pull, the solver divides the Hessian by λ + 10,
    # Adam's ε is 1e-3, tests have no pull, and the head sees all pixels. Its ink is dark there.
    steps = 25 if ways == 20 else 16
    return _omniglot(
        ways,
        shots,
        claim,
        learner="imaml",
        source=f"{released.RAJESWARAN}, table 2 (GD)",
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


def _first_order(ways: int, shots: int, claim: str) -> Config:
    # MAML's code and flags, as run by Reptile's authors.
    source = f"{released.FINN}, first order; measured by {released.NICHOL}, table 2"
    return _omniglot(ways, shots, claim, name="fomaml", order="first", source=source)


def _metasgd(ways: int, shots: int, claim: str) -> Config:
    # Section 4.2: max-pooling, one step, 15 queries a class in training. There is no released code:
    # what the paper does not say is MAML's, as the rates to begin with.
    return _omniglot(
        ways,
        shots,
        f"{claim} (kind not stated)",
        learner="metasgd",
        source=f"{released.LI}, table 2",
        network="conv4-pool",
        inner_steps=1,
        eval_inner_steps=1,
        queries=15,
    )


ROWS = (
    _omniglot(5, 1, "98.7 ± 0.4 %"),
    _omniglot(5, 5, "99.9 ± 0.1 %"),
    _omniglot(20, 1, "95.8 ± 0.3 %"),
    _omniglot(20, 5, "98.9 ± 0.2 %"),
    _first_order(5, 1, "98.3 ± 0.5 %"),
    _first_order(5, 5, "99.2 ± 0.2 %"),
    _first_order(20, 1, "89.4 ± 0.5 %"),
    _first_order(20, 5, "97.9 ± 0.1 %"),
    # The paper has no row of 5 ways: this one is to stand beside MAML's.
    _omniglot(5, 1, None, learner="anil", source=f"no published row; {released.RAGHU}"),
    _omniglot(20, 1, "96.2 ± 0.5 %", learner="anil", source=released.ANIL),
    _omniglot(20, 5, "98.0 ± 0.3 %", learner="anil", source=released.ANIL),
    _metasgd(5, 1, "99.53 ± 0.26 %"),
    _metasgd(5, 5, "99.93 ± 0.09 %"),
    _metasgd(20, 1, "95.93 ± 0.38 %"),
    _metasgd(20, 5, "98.97 ± 0.19 %"),
    _mamlpp(5, 1, "99.47 % (ensemble)"),
    _mamlpp(5, 5, "99.93 % (ensemble)"),
    _mamlpp(20, 1, "97.65 % (ensemble)"),
    _mamlpp(20, 5, "99.33 % (ensemble)"),
    _protonet(5, 1, "98.8 %"),
    _protonet(5, 5, "99.7 %"),
    _protonet(20, 1, "96.0 %"),
    _protonet(20, 5, "98.9 %"),
    _reptile(5, 1, "97.68 ± 0.04 %", "95.39 ± 0.09 %"),
    _reptile(5, 5, "99.48 ± 0.06 %", "98.90 ± 0.10 %"),
    _reptile(20, 1, "89.43 ± 0.14 %", "88.14 ± 0.15 %"),
    _reptile(20, 5, "97.12 ± 0.32 %", "96.65 ± 0.33 %"),
    _imaml(5, 1, "99.16 ± 0.35 %"),
    _imaml(5, 5, "99.67 ± 0.12 %"),
    _imaml(20, 1, "94.46 ± 0.42 %"),
    _imaml(20, 5, "98.69 ± 0.1 %"),
)
