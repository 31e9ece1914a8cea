"""Presets: values of `Config`, one per row of a published table, each naming its source."""

from __future__ import annotations

import dataclasses

from maml.config import Config

FINN = "MAML, Finn et al. 2017, arXiv:1703.03400"


def _maml_omniglot(ways: int, shots: int, published: float) -> Config:
    # Section 5.2 and appendix A.1. The paper's raw rates (0.4; 0.1) multiply the gradient of a
    # sum that is N times the mean cross-entropy's: 2.0 in both cases on the mean.
    twenty = ways == 20
    return Config(
        preset=f"maml-omniglot-{ways}way-{shots}shot",
        source=f"{FINN}, table 1, {ways}-way {shots}-shot",
        published=published,
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


def _maml_glyphs(ways: int, shots: int) -> Config:
    return Config(
        preset=f"maml-glyphs-{ways}way-{shots}shot",
        source="this project's embedded data set; protocol of " + FINN,
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


PRESETS: dict[str, Config] = {
    config.preset: config
    for config in (
        _maml_glyphs(5, 1),
        _maml_glyphs(5, 5),
        _maml_glyphs(20, 1),
        _maml_glyphs(20, 5),
        _maml_omniglot(5, 1, 0.987),
        _maml_omniglot(5, 5, 0.999),
        _maml_omniglot(20, 1, 0.958),
        _maml_omniglot(20, 5, 0.989),
        _maml_sinusoid(),
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


def with_values(config: Config, **values: object) -> Config:
    """Return ``config`` with some fields replaced (`dataclasses.replace`, kept in one place)."""
    return dataclasses.replace(config, **values)  # type: ignore[arg-type]
