"""Mistakes of a library's user are one line, which names the argument."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import maml
from datasets.tasks import Task
from tests.library.own_networks import Tempered, TwoOutputs, dense, made, of_both, stacked


class Remembering(nn.Linear):
    """A layer whose query answers depend on its answers to the support set."""

    kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        answers = super().forward(x.flatten(1))
        if len(x) == 6:  # a support set
            self.kept = answers.mean(0)
        return answers + self.kept


class ByName(nn.Linear):
    head_prefix = "b"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, 0])


class Again(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


def of_pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())


def pixels() -> Any:
    images = [torch.arange(96, dtype=torch.uint8).view(6, 1, 4, 4), torch.arange(6) % 3]
    return [(*images, *images)] * 2


def hooked(norm: nn.Module) -> nn.Module:
    norm.register_full_backward_hook(lambda *given: None)
    return norm


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: maml.MAML(dense(), inner_lrr=1), "MAML takes no inner_lrr; .*inner_lr, "),
        (lambda: maml.MAML(dense(), inner_lr=np.float64(-1)), "inner_lr must be positive"),
        (lambda: maml.MAML(dense(), order=3), "order 3: 1 or 2"),
        (
            lambda: maml.MAML(dense(), inner_lr={"1.*": 0.2, "*": 0.1}),
            r"inner_lr: later patterns take all that 1\.\* matches: put it after them",
        ),
        (
            lambda: maml.MAML(dense(), inner_momentum=0.5),
            "inner_momentum 0.5 is for inner_optimizer momentum, not sgd",
        ),
        (lambda: maml.MetaSGD(dense(), inner_steps=0), "inner_steps 0: MetaSGD would have no use"),
        (lambda: maml.MAML(dense(), loss=3), "loss is 3; give a function"),
        (lambda: maml.MAML(dense(), loss=nn.CrossEntropyLoss), "loss is <class .*; give a"),
        (lambda: maml.MAML(dense())(made()[0][0]), "tasks is a Tensor; give"),
        (lambda: maml.MAML(dense())({"train": 1}), "tasks is a dict; give"),  # type: ignore
        (lambda: maml.MAML(dense(), loss=F.nll_loss, label_smoothing=0.1), "0.1: needs the cross-"),
        (lambda: maml.MAML(dense(), head="4"), "head '4': no part of the module; .* are 1, 3$"),
        (lambda: maml.ANIL(nn.Linear(4, 3), head="weight"), "no part .* the module itself$"),
        (lambda: maml.ANIL(dense()), 'say which .* is: give head="name of the layer"'),
        (lambda: maml.MAML(dense())(3), r"tasks is a int; give \(support_x, "),
        (lambda: maml.MAML(dense())(made()[0]), "tasks: its tensors are .*; give"),
        (lambda: maml.MAML(dense())([t[:2] for t in made()]), r"task 0 is \(Tensor, Tensor\)"),
        (lambda: maml.MAML(dense().float())(made()), "support_x is torch.float64, .*float32"),
        (lambda: maml.MAML(dense())([(t[0], t[1][:2], *t[2:]) for t in made()]),
         "task 0: support_x has 6 examples, and support_y 2 targets"),
        (lambda: maml.MAML(dense()).adapt([], ["owl"]), "^adapt takes .* for maml.load"),
        (lambda: maml.MAML(dense()).evaluate(made(), steps=1.5), "steps 1.5: give a whole number"),
        (lambda: maml.MAML(nn.Linear), "module is <class .*Linear'>; give a torch.nn.Module"),
        (lambda: maml.MAML(dense())([(*t[:2], t[2][:0], t[3][:0]) for t in made()]),
         "task 0: query_x is empty"),
        (lambda: maml.R2D2(dense())([(t[0], t[1].double(), t[2], t[3].double()) for t in made()]),
         r"task 0: support_y is torch.float64 \[6\]; give the number of each example's class"),
        (lambda: maml.ProtoNet(dense())([(t[0], t[1] + 1, *t[2:]) for t in made()]),
         "task 0: support_y has no example of class 0"),
        (lambda: maml.R2D2(dense())([(*t[:3], t[3] + 1) for t in made()]),
         "task 0: query_y has the label 3, and support_y no example of that class"),
        (lambda: maml.R2D2(dense()).adapt(made()[0][0], made()[0][1] - 1), "^support_y has .* -1;"),
        (lambda: maml.MAML(dense())([part[:0] for part in stacked(made())]), "^tasks is empty"),
        (lambda: maml.MAML(dense()).adapt(made()[0][0], made()[0][1].double()),
         "^support_y is torch.float64, .* give loss="),
        (lambda: maml.MAML(dense()).adapt(made()[0][0][0], made()[0][1][0]),
         r"support_y \[\]; give \[E, …\] each"),
        (lambda: maml.ProtoNet(dense())([(t[0][:0], t[1][:0], *t[2:]) for t in made()]),
         "task 0: support_x is empty"),
        (lambda: maml.MAML(dense())([3]), r"task 0 is \(int\); give"),
        (lambda: maml.MAML(dense())([(*t[:3], t[3] + 1) for t in made()]),
         "task 0: query_y has the label 3; the module tells 3 classes apart, .* from 0 to 2"),
        (lambda: maml.MAML(nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 3))),
         "0 makes sparse gradients.* sparse=False"),
        (torch.inference_mode()(lambda: maml.MAML(dense()).adapt(*made()[0][:2])),
         r"torch.inference_mode .* use torch.no_grad\(\)"),
        (lambda: maml.MAML(dense())([(t[0], t[1].double(), t[2], t[3].double()) for t in made()]),
         "query_y is torch.float64, .* give loss=.*cross_entropy for their shares .*, mse_loss"),
        (lambda: maml.MAML(Remembering(16, 3).double())(made()),
         "the loss reads a parameter that is not the module's.* function .*: as a method"),
        (lambda: maml.MAML(
            TwoOutputs().double(), loss=lambda o, y: F.cross_entropy(o["classes"], y))(made()),
         "^no loss reads size.bias, size.weight: make the learner again with freeze="),
        (lambda: maml.MAML(dense(torch.jit.script(nn.Tanh()))), "module: 2 .* before torch.jit"),
        (lambda: maml.MAML(torch.compile(dense())), "module: it is .* before torch.compile"),
        (lambda: maml.MAML(dense().half()), "parameters are torch.float16; give float32, bfloat16"),
        (lambda: maml.MAML(register_parametrization(nn.BatchNorm1d(3), "weight", nn.Softplus())),
         "hooks or a parametrization of its own"),
        (lambda: maml.MAML(hooked(nn.BatchNorm1d(3))), "hooks or a parametrization of its own"),
        (lambda: maml.MAML(dense(), batching="all"), "batching 'all': auto, vmap or tasks"),
        (lambda: maml.MAML(dense())([(t[0].clone().requires_grad_(), *t[1:]) for t in made()]),
         "task 0: support_x requires a gradient"),
        (lambda: maml.MAML(dense()).adapt(*made()[0][:2])(made()[0][2], "suport"),
         "batch_statistics 'suport': query or support"),
        (lambda: maml.MAML(dense())(made()).backward(create_graph=True), "create_graph: the loss"),
        (lambda: maml.MAML(ByName(4, 3).double()).adapt(*made()[0][:2], 0).features(made()[0][0]),
         "ByName: its output layer b is no layer"),
        (lambda: maml.ProtoNet(dense(), loss=Tempered().double())(made()), "the loss reads .* by"),
        (lambda: maml.MAML(dense(), loss=Tempered()), "^loss: its .* torch.float32, .*float64$"),
        (lambda: maml.MAML(dense(), 0.1), "^0.1: give all but the module by name, as inner_lr=0.1"),
        (lambda: maml.MAML(dense(), lr=0.1), "^MAML takes no lr: give inner_lr; besides"),
        (lambda: maml.Reptile(dense(), inner_lr=[0.1, 0.2]), "^inner_lr is a list: Reptile takes"),
        (lambda: maml.MAML(dense(), inner_lr=[0.1, 0.2], inner_steps=3), "2 rates for .*_steps=3$"),
        (lambda: maml.MAML(dense(), inner_lr={"1.*": 0.1}), "no rate for 3.weight; give one"),
        (lambda: maml.MAML(dense(), inner_lr=[nn.Parameter(torch.tensor(0.1))], inner_steps=1),
         "^inner_lr is torch.float32, and .* torch.float64"),
        (lambda: maml.MAML(dense(), inner_lr=torch.tensor(-0.1)), "^inner_lr tensor.*: must be ab"),
        (lambda: maml.R2D2(dense(), inner_loss=F.mse_loss), "^R2D2 takes no inner_loss"),
        (lambda: maml.MAML(nn.Tanh()), "^module: Tanh has no parameter that could learn"),
        (lambda: maml.MAML(torch.inference_mode()(dense)()), "^module: 1.weight .*inference_mode"),
        (lambda: maml.MAML(of_pixels())(pixels()), "^task 0: support_x is torch.uint8, .* 255"),
        (lambda: maml.MAML(of_pixels()).evaluate(pixels()), "^task 0: support_x is torch.uint8"),
        (lambda: maml.MAML(of_pixels()).adapt(*pixels()[0][:2]), "^support_x is torch.uint8, "),
        (lambda: maml.MAML(dense()).adapt(*made()[0][:2])(made()[0][2].to("meta")),
         r"^query_x is on meta, and .* on cpu: move it, as tasks.to\('cpu'\)"),
        (lambda: maml.MAML(dense())([(*t[:2], t[2].to("meta"), t[3]) for t in made()]),
         "^task 0: query_x is on meta, and"),
        (lambda: maml.MAML(dense(Again()))(made()), "^torch.utils.checkpoint .*=False$"),
        (lambda: maml.MAML(dense(nn.BatchNorm1d(8)))(made((1,))), "^Expected more than 1 value"),
        (lambda: maml.MAML(dense(nn.BatchNorm1d(8))).adapt(*made((1,))[0][:2]), "^Expected more "),
        (lambda: maml.MAML(dense(nn.BatchNorm1d(8))).adapt(*made()[0][:2])(made()[0][2][:1]),
         r"^Expected more than 1 value .* \[1, 8\]: .*batch_statistics=\"support\""),
        (lambda: maml.MAML(TwoOutputs().double())(made()), "the module returns a dict; give loss="),
        (lambda: maml.MAML(dense())([(t[0], (t[1], t[1]), *t[2:]) for t in made()]),
         "^task 0: its targets are a tuple, .* give loss="),
        (lambda: maml.ProtoNet(dense())([(t[0], (t[1], t[1]), *t[2:]) for t in made()]),
         "^task 0: support_y is a tuple; give the number of each example's class"),
        (lambda: maml.MAML(dense())([(t[0], (t[1], t[1][:2]), *t[2:]) for t in made()]),
         r"^task 0: support_y\[1\] has 2 examples, and support_y 6 targets"),
        (lambda: maml.MAML(dense())(Task(*stacked(made()))._replace(query_x={})),
         r"^tasks is \(Tensor, Tensor, dict, Tensor\); give"),
        (lambda: maml.MAML(dense())([({"a": t[0], "b": None}, *t[1:]) for t in made()]),
         r"^task 0: support_x\['b'\] is NoneType; give a tensor, or leave an input out"),
        (lambda: maml.MAML(dense())([((t[0], {"b": t[0][:2]}), *t[1:]) for t in made()]),
         r"^task 0: support_x\[1\]\['b'\] has 2 examples, and support_y 6 targets"),
        (lambda: maml.MAML(maml.MAML(dense())), "module is a MAML; give the module that it is"),
        (lambda: maml.MAML(maml.MAML(dense()).adapt(*made()[0][:2])), "is a FastModule; give"),
        (lambda: type("Own", (maml.ANIL,), {"loss": of_both})(dense()), "^Own.loss is never ca"),
        (lambda: setattr(maml.MAML(dense(), inner_lr=0.1), "inner_lr", 0.2),
         "inner_lr = 0.2: it is 0.1 since .* make the learner again"),
        (lambda: maml.MAML(dense()).load_state_dict({}, assign=True), "^assign=True: the module"),
        (lambda: maml.MAML(nn.LazyLinear(3)), "module: weight has no size yet; call the"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(mistake: Callable[[], Any], says: str) -> None:
    with pytest.raises(maml.UserError, match=says) as found:
        mistake()
    assert "\n" not in str(found.value)
    assert "--" not in str(found.value)


def test_a_learner_has_no_clone() -> None:
    learner = maml.MAML(dense())
    assert not hasattr(learner, "clone")
    with pytest.raises(AttributeError, match=r"no clone: fast = learner.adapt"):
        learner.clone()


def test_losses_that_are_no_numbers_are_told_once() -> None:
    learner, tasks = maml.MAML(dense()), made((6, 6, 6, 3))
    for i in (1, 3):
        tasks[i][0][0] = torch.nan
    with pytest.warns(UserWarning, match=r"^the outer loss is not finite in tasks 1, 3: "):
        learner(tasks)
    with warnings.catch_warnings(action="error"):
        assert learner(tasks).isnan()
