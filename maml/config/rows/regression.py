"""Rows of regression."""

from maml.config.fields import Config
from maml.config.rows.released import FINN


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


ROWS = (_maml_sinusoid(),)
