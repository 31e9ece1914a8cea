"""Papers, and what their released code does whatever the data: what rows share."""

from typing import Any


def claimed(claim: str | None) -> dict[str, Any]:
    """Return the fields of a published number as its source has it, as ``"47.1 ± 0.3 %"``.

    In brackets follows what else than a single model's transductive answers it is of.
    """
    if claim is None:
        return {}
    return {"published": round(float(claim.split()[0]) / 100, 6), "claim": claim}


FINN = "MAML, Finn et al. 2017, arXiv:1703.03400"
OH = "BOIL, Oh et al. 2021, arXiv:2008.08882"
ANTONIOU = "MAML++, Antoniou et al. 2019, arXiv:1810.09502"
RAGHU = "ANIL, Raghu et al. 2020, arXiv:1909.09157"
ANIL = f"{RAGHU}, table 2, with MAML's protocol"
SNELL = "ProtoNet, Snell et al. 2017, arXiv:1703.05175"
BERTINETTO = "R2D2, Bertinetto et al. 2019, arXiv:1805.08136"
NICHOL = "Reptile, Nichol et al. 2018, arXiv:1803.02999"
CHEN = "Chen et al. 2019, arXiv:1904.04232"
ZINTGRAF = "CAVIA, Zintgraf et al. 2019, arXiv:1810.03642"
PARK = "Meta-Curvature, Park and Oliva 2019, arXiv:1902.03356"
LIBFEWSHOT = "as measured by LibFewShot, Li et al. 2021, arXiv:2109.04898, reproduce/README.md"
LI = "Meta-SGD, Li et al. 2017, arXiv:1707.09835"
YE = "MAML by Ye and Chao 2022 (UNICORN-MAML), arXiv:2106.16245"
RAJESWARAN = "iMAML, Rajeswaran et al. 2019, arXiv:1909.04630"

# What MAML++'s released configurations share, of whatever data. Those of MiniImageNet say
# init_inner_loop_learning_rate 0.01, too, which the released code never reads: it takes 0.1.
MAMLPP: dict[str, Any] = {
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

# What the released code of Prototypical Networks does whatever the data: an episode a step.
PROTONET: dict[str, Any] = {
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

# What the released commands of Reptile share: Adam with β1 = 0 inside, whose second moment lives
# on, a falling step outside. The output layer begins as TensorFlow's layers do.
REPTILE: dict[str, Any] = {
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
