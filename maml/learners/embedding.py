"""Learners without an inner loop: a closed-form classifier on a network's features.

Shape legend: S support and E query examples of a task, F features, N ways.
"""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets.tasks import Task
from maml.config import Config
from maml.errors import UserError
from maml.learners.noadapt import NoAdaptation
from maml.learners.objectives import REGRESSION, Given
from maml.networks.headless import without_head
from maml.networks.ordinary import own_name
from maml.networks.statistics import Statistics
from maml.params import Params

COMPONENTS = {
    "protonet": {
        "attribute": "ProtoNet",
        "adapts_at_test": False,
        "help": "the nearest mean of a class's features",
        "reads": ("train_ways", "train_shots", "shots", "queries", "eval_queries"),
        "refuses": {"meta_gradient": {"mixed": "has no inner loop"}},
        "ignores": {"head_init": "takes the output layer off"},
    },
    "r2d2": {
        "like": "protonet",
        "attribute": "R2D2",
        "help": "ridge regression on features, in closed form",
    },
}


class Embedding(NoAdaptation):
    """Classify queries by their features. The support set's features make the classifier.

    The problem has no inner step. The outer loss is the cross-entropy of the queries. In training,
    support and query set go through the network as one batch, and batch norms use this batch's
    statistics, as in the released code of both learners here. Transductive outputs use the same
    batch. Non-transductive outputs normalise both sets by the support set's statistics.
    """

    any_ways = any_outputs = True

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        if self.objective is REGRESSION:
            raise UserError(
                f"--data {config.data}: its targets are no classes, which --learner "
                f"{config.learner} tells apart"
            )
        # No output layer: a ``given`` module without head_prefix, or a class that sets it to "".
        head = getattr(self.network, "head_prefix", None)
        headless = given is not None if head is None else not own_name(self.network, head)
        if not headless:
            or_else = ', or "" if its outputs are features'
            still = {self.network.get_parameter(name) for name in self.frozen}
            self.network, self.n_features = without_head(self.network, config.network, or_else)
            # A shared parameter may have another name without the output layer.
            self.frozen = [n for n, p in self.network.named_parameters() if p in still]

    @abstractmethod
    def logits(self, params: Params, support: Tensor, one_hot: Tensor, query: Tensor) -> Tensor:
        """Return logits ``[E, N]`` of queries.

        Args:
            params: All meta-parameters; the network's without the prefix ``network.``.
            support: Features ``[S, F]``.
            one_hot: The classes of the support examples, ``[S, N]`` of zeros and ones.
            query: Features ``[E, F]``.
        """

    def query_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of the queries, and their logits."""
        features = self._of_both(params, task)
        ways = self.config.train_ways or self.config.ways
        outputs = self._of_features(params, features, task, ways)
        return self.loss(outputs, task.query_y), outputs

    def _of_both(self, params: Params, task: Task) -> Tensor:
        """Return the features ``[S + E, F]`` of support and query set as one batch."""
        sets = task.support_x, task.query_x
        flat = [pytree.tree_flatten(x) for x in sets]
        forms = [(tree, [(part.dtype, part.shape[1:]) for part in parts]) for parts, tree in flat]
        if forms[0] == forms[1]:
            joined = pytree.tree_map(lambda *parts: torch.cat(parts), *sets)
            return self.call_network(params, joined)[0]
        # Without batch norms, examples of two forms have the same features in two batches.
        (support, used), (query, _) = (self.call_network(params, x) for x in sets)
        if used:
            sizes = " and ".join(", ".join(str([*p.shape[1:]]) for p in parts) for parts, _ in flat)
            raise UserError(
                f"support_x and query_x have examples {sizes}, which batch norms would normalise "
                "together: give both in one form, padded to one size, or use layer or group norms"
            )
        return torch.cat([support, query])

    def _of_features(self, params: Params, features: Tensor, task: Task, ways: int) -> Tensor:
        """Return the classifier's logits ``[E, N]`` from features ``[S + E, F]`` of both sets."""
        n_queries = len(pytree.tree_leaves(task.query_x)[0])
        support, query = features.split([len(task.support_y), n_queries])
        outputs = self.logits(params, support, one_hot(task.support_y, ways, support), query)
        if outputs.shape != (len(query), ways):
            raise ValueError(
                f"logits returns {list(outputs.shape)}; it must be [{len(query)}, {ways}], a "
                "row a query and a column a class"
            )
        return outputs

    def features_of(
        self, params: Params, x: Tensor, statistics: Statistics | None = None
    ) -> tuple[Tensor, Statistics]:
        """See `Learner.features_of`: here the network's outputs are the features."""
        return self.call_network(params, x, statistics)

    def answers(self, params: Params, task: Task) -> tuple[Tensor, Tensor]:
        """See `Learner.answers`: normalise with the support set, or by the support statistics."""
        ways = self.config.ways
        together = self._of_both(params, task)
        support, of_support = self.call_network(params, task.support_x)
        jointly = self._of_features(params, together, task, ways)
        if not of_support:
            return jointly, jointly
        query, _ = self.call_network(params, task.query_x, of_support)
        return jointly, self._of_features(params, torch.cat([support, query]), task, ways)


class ProtoNet(Embedding):
    """Prototypical Networks (Snell et al. 2017, arXiv:1703.05175).

    A query's logit for a class is minus its squared distance to the class's mean feature.
    """

    def logits(self, params: Params, support: Tensor, one_hot: Tensor, query: Tensor) -> Tensor:
        """Return −‖f − c_k‖² (equations 1 and 2)."""
        return -squared_distances(query, prototypes(support, one_hot))


class R2D2(Embedding):
    """R2D2, ridge regression as the classifier (Bertinetto et al. 2019, arXiv:1805.08136).

    A query's logits are those of a ridge regression of the classes on the support features.

    W = Xᵀ (X Xᵀ + λ I)⁻¹ Y (equation 4: a system of as many unknowns as support examples) and
    logits α X' W (equation 6), with a column of ones in X for the bias, and with X and Y divided by
    √S, as in the released code. The outer loop learns log λ and log α, so that λ and α stay
    positive. The released code learns α itself and sets λ by a flag. Equation 6 also has a shift β
    of all logits, but a softmax does not depend on it.
    """

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        dtype = getattr(torch, config.dtype)
        self.log_lambda = nn.Parameter(torch.zeros((), dtype=dtype))
        self.log_alpha = nn.Parameter(torch.full((), math.log(10.0), dtype=dtype))

    def logits(self, params: Params, support: Tensor, one_hot: Tensor, query: Tensor) -> Tensor:
        """Return each query's logits: α X' Xᵀ (X Xᵀ + λ I)⁻¹ Y."""
        scale = len(support) ** -0.5
        x = torch.cat([support, torch.ones_like(support[:, :1])], dim=1) * scale
        queries = torch.cat([query, torch.ones_like(query[:, :1])], dim=1)
        eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
        ridge = x @ x.T + params["log_lambda"].exp() * eye  # never singular, so not checked
        solution, _ = torch.linalg.solve_ex(ridge, one_hot * scale)
        return params["log_alpha"].exp() * (queries @ (x.T @ solution))


def one_hot(labels: Tensor, ways: int, like: Tensor) -> Tensor:
    """Return labels ``[S]`` as ``[S, N]`` zeros and ones, of the dtype of ``like``."""
    return (labels[:, None] == torch.arange(ways, device=like.device)).to(like.dtype)


def prototypes(support: Tensor, one_hot: Tensor) -> Tensor:
    """Return each class's mean feature ``[N, F]`` from features ``[S, F]`` and ``[S, N]``."""
    return (one_hot / one_hot.sum(0)).T @ support


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return distances ``[E, N]`` of ``a [E, F]`` to ``b [N, F]``, by differences, not products."""
    return (a[:, None] - b).square().sum(-1)
