"""Short rows on ``glyphs``, this project's embedded data: they have no published number."""

from typing import Any

from maml.config.fields import Config, with_values
from maml.config.rows import released


def _glyphs(
    ways: int,
    shots: int,
    *,
    learner: str = "maml",
    name: str | None = None,
    source: str = released.FINN,
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


ROWS = (
    _glyphs(5, 1),
    _glyphs(5, 5),
    _glyphs(20, 1),
    _glyphs(20, 5),
    _glyphs(5, 1, name="fomaml", order="first"),
    _glyphs(5, 1, learner="anil", source=released.RAGHU),
    _glyphs(5, 1, learner="boil", source=released.OH),
    # The published schedules, with epochs of ten iterations.
    _glyphs(
        5,
        1,
        source=released.ANTONIOU,
        **released.MAMLPP
        | {"iterations": 1000, "eval_every": 100, "checkpoint_every": 100, "eval_tasks": 100},
        iterations_per_epoch=10,
        meta_schedule="cosine",
        meta_lr_end=1e-5,
    ),
    _glyphs(5, 1, learner="protonet", source=released.SNELL, train_ways=20, meta_batch_size=4),
    _glyphs(5, 1, learner="r2d2", source=released.BERTINETTO),
    _glyphs(
        5,
        1,
        source=released.NICHOL,
        # The released Adam at 1e-3 learns 48 % in so short a training, plain steps 90 %.
        **released.REPTILE
        | {"iterations": 1000, "queries": 5, "eval_queries": 5}
        | {"inner_optimizer": "sgd", "inner_lr": 0.3, "keep_moment": False, "head_init": "small"},
        inner_steps=10,
        train_shots=10,
        eval_inner_batch=5,
    ),
    _glyphs(
        5,
        1,
        learner="cavia",
        source=released.ZINTGRAF,
        inner_lr=3.0,
        inner_steps=2,
        eval_inner_steps=2,
        meta_lr=3e-3,
    ),
    _glyphs(5, 1, learner="metacurv", source=released.PARK),
    _glyphs(5, 1, learner="noadapt", source=f"the floor; {released.FINN}, section 5.1"),
    _glyphs(
        5,
        1,
        learner="finetune",
        source=f"a baseline; {released.CHEN}",
        train_ways=800,
        batch_size=64,
        meta_batch_size=2,
        inner_lr=0.1,
        eval_inner_steps=100,
    ),
    # Its rates are learned for as many steps as it trains with.
    _glyphs(5, 1, learner="metasgd", source=released.LI, eval_inner_steps=1),
    _glyphs(
        5,
        1,
        learner="imaml",
        source=released.RAJESWARAN,
        inner_lr=0.1,
        inner_steps=16,
        eval_inner_steps=16,
        proximal=0.5,
    ),
)
