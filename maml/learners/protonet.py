"""Prototypical Networks (Snell et al. 2017, arXiv:1703.05175)."""

from torch import Tensor

from maml.learners.embedding import Embedding
from maml.params import Params

COMPONENTS = {
    "protonet": {
        "attribute": "ProtoNet",
        "adapts_at_test": False,
        "help": "the nearest mean of a class's features",
        "reads": ("train_ways", "train_shots", "shots", "queries", "eval_queries"),
        "refuses": {
            "meta_gradient": {"mixed": "has no inner loop"},
        },
        "ignores": {"head_init": "takes the output layer off"},
    }
}


class ProtoNet(Embedding):
    """A query's logit for a class is minus its squared distance to the class's mean feature."""

    def logits(self, params: Params, support: Tensor, one_hot: Tensor, query: Tensor) -> Tensor:
        """Return −‖f − c_k‖² (equations 1 and 2)."""
        return -squared_distances(query, prototypes(support, one_hot))


def prototypes(support: Tensor, one_hot: Tensor) -> Tensor:
    """Return the mean feature of each class, ``[N, F]``: of ``[S, F]``, by ``[S, N]``."""
    return (one_hot / one_hot.sum(0)).T @ support


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return ``[E, N]``: of ``[E, F]`` to ``[N, F]``; from differences, not from products."""
    return (a[:, None] - b).square().sum(-1)
