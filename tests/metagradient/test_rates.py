"""Which parameters adapt, and at which rates: --adapt patterns, ANIL, BOIL and Meta-SGD."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from datasets.tasks import Task
from maml.errors import UserError
from maml.learners.maml import MAML
from maml.worker import Share
from tests.compiler import needs_compiler
from tests.metagradient.peer import assert_near
from tests.runs import moved, worker_of

IDS = torch.tensor([3, 11, 12, 40, 7])


make_worker = partial(
    worker_of, "maml-glyphs-5way-1shot", task_batch=3, inner_steps=3, inner_lr=0.1, filters=16,
    kernels="torch",
)  # fmt: skip


def assert_same(found: Share, expected: Share, within: float = 1e-10) -> None:
    torch.testing.assert_close(found.totals, expected.totals, rtol=1e-11, atol=1e-11)
    assert_near(found.gradients, expected.gradients, within)


LOOPS: dict[str, dict[str, Any]] = {
    "MAML at several rates": {"adapt": "*.norm.*,blocks.1.norm.weight=0,@head=2.5"},
    "BOIL": {"learner": "boil"},
    "Meta-SGD": {"learner": "metasgd"},
    "ANIL": {"learner": "anil"},
    "ANIL, pooled": {"learner": "anil", "network": "conv4-pool"},
    "ANIL, first order": {"learner": "anil", "order": "first"},
    "its matrix alone, and faster": {"adapt": "head.weight=3"},
    "learned rates of the head": {"learner": "metasgd", "adapt": "@head"},
    "transformed gradients": {"learner": "metacurv", "adapt": "@head"},
    "several query losses": {
        "learner": "mamlpp", "adapt": "@head", "per_step_norm": False, "msl_epochs": 3,
    },
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("optimizer", "within"), [("sgd", 1e-10), ("adam", 1e-8)])
@pytest.mark.parametrize("loop", LOOPS)
def test_kernels_equal_reverse(loop: str, optimizer: str, within: float) -> None:
    """The meta-gradients are equal; with SGD, the scores after adapting are, too.

    The kernels leave out the convolutions' biases, because batch norm cancels them: reverse mode
    has noise for their gradients, which Adam divides by its ε.
    """
    changes = {"inner_optimizer": optimizer, **LOOPS[loop]}
    changes["inner_lr"] = 0.1 if optimizer == "sgd" else 0.01
    native = make_worker(**changes, kernels="native")
    reverse = make_worker(**changes, meta_gradient="reverse")
    params = moved(reverse)
    shares = [w.share(params, IDS, w.learner) for w in (native, reverse)]
    assert_same(*shares, within)
    if optimizer == "sgd":
        scores = [w.evaluate(params, "test", IDS) for w in (native, reverse)]
        torch.testing.assert_close(*scores, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("preset", "network"),
    [
        *(("maml-glyphs-5way-1shot", name) for name in ("conv4", "conv4-pool", "lenet")),
        ("maml-sinusoid-10shot", "mlp"),
    ],
)
def test_anil_adapts_the_output_layer_alone(preset: str, network: str) -> None:
    """The whole layer: its matrix and its bias, which are the network's last tensors."""
    learner = worker_of(preset, learner="anil", kernels="torch", network=network).learner
    assert isinstance(learner, MAML)
    names = list(learner.network_weights(learner.meta_parameters()))
    assert list(learner.adapting) == names[-2:]


class LowRank(nn.Module):
    """A layer with a low-rank correction, as in LoRA (arXiv:2106.09685)."""

    head_prefix = "out."

    def __init__(self, image_shape: tuple[int, int, int], ways: int) -> None:
        super().__init__()
        self.out = nn.Linear(math.prod(image_shape), ways)
        self.lora_a = nn.Parameter(0.1 * torch.randn(2, math.prod(image_shape)))
        self.lora_b = nn.Parameter(0.1 * torch.randn(ways, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.out(x) + x @ self.lora_a.T @ self.lora_b.T


@pytest.mark.parametrize(
    ("pattern", "moving"),
    [
        ("*lora_*", {"lora_a": 1, "lora_b": 1}),
        ("@head,*.bias=0", {"out.weight": 1}),
        ("*=0.5, *lora_a=3, @head=0", {"lora_a": 3, "lora_b": 0.5}),
        ("lora_a,out.*=2", {"lora_a": 1, "out.weight": 2, "out.bias": 2}),
        ("module.lora_a,module.out.*=2", {"lora_a": 1, "out.weight": 2, "out.bias": 2}),
    ],
)
def test_what_adapts_is_a_pattern(pattern: str, moving: dict[str, float]) -> None:
    """For a user's own network; rates are multiples of --inner-lr, and the last match decides.

    The size of one step shows the rate; and both ways back agree.
    """
    changes = {"network": f"{__name__}:LowRank", "adapt": pattern, "inner_steps": 2}
    worker = make_worker(**changes)
    params = worker.learner.meta_parameters()
    tasks = worker.training.tasks(IDS[:1])
    task = Task(*(tensor[0] for tensor in tasks))
    weights = {n: w.detach() for n, w in worker.learner.network_weights(params).items()}
    adapted = worker.learner.adapted(params, task, 1)
    by = torch.func.grad(lambda at: worker.learner.set_loss(at, task.support_x, task.support_y)[0])(
        weights
    )
    assert len(weights) == 4
    for name, weight in weights.items():
        rate = moving.get(name.removeprefix("module."), 0.0)
        torch.testing.assert_close(adapted[name], weight - 0.1 * rate * by[name])
    mixed = make_worker(meta_gradient="mixed", **changes)
    assert_same(*(w.share(params, IDS, w.learner) for w in (mixed, worker)))


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (
            "@head,blocs.*",
            r"--adapt @head,blocs.\* with --network conv4: 'blocs.\*' names none of "
            "the network's parameters: blocks",
        ),
        ("*=fast", "the rate 'fast' must be a number of at least 0"),
        ("*=nan", "the rate 'nan' must be a number of at least 0"),
        ("*=1e39", "the rate '1e39' must be a number of at least 0"),  # finite only in float64
        ("@head=0", "no parameter adapts"),
        ("lora_c", "'lora_c' names none of the .*: lora_a, lora_b, out.weight, out.bias$"),
    ],
)
def test_a_pattern_that_means_nothing_is_one_line(pattern: str, line: str) -> None:
    own = {"network": f"{__name__}:LowRank"} if pattern == "lora_c" else {}
    with pytest.raises(UserError, match=line):
        make_worker(adapt=pattern, **own)
