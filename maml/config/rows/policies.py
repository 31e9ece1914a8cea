"""Policies: presets whose tasks are environments to act in."""

from typing import Any

from maml.config.fields import Config
from maml.config.rows.released import FINN

WILLIAMS = "REINFORCE, Williams 1992, doi:10.1007/BF00992696"
FOERSTER = "DiCE, Foerster et al. 2018, arXiv:1802.05098"


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


ROWS = (
    _policy(
        "cartpole",
        f"{WILLIAMS}; CartPole-v1 is solved at 475 over 100 episodes",
        preset="reinforce-cartpole",
        learner="reinforce",
        horizon=500,
        queries=1,
        eval_queries=1,
        meta_batch_size=20,
        meta_lr=0.01,
        # At a constant rate it is solved, and unlearned again.
        meta_schedule="cosine",
        meta_lr_end=0.0,
        iterations=120,
        eval_every=0,
        test_tasks=100,
        checkpoint_every=20,
    ),
    _policy(
        "cartpole-turned",
        f"no published row; {FINN}, algorithm 3; {FOERSTER}",
        preset="maml-cartpole",
        learner="maml-policy",
        horizon=200,
        shots=20,
        queries=10,
        eval_queries=10,
        inner_lr=3.0,
        inner_steps=1,
        eval_inner_steps=1,
        meta_batch_size=20,
        meta_lr=5e-3,
        meta_schedule="cosine",  # at a constant rate the return goes up and down by a fifth
        iterations=150,
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
)
