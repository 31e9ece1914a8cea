"""Make one of the program's learners around a user's module."""

import copy
import re
from collections.abc import Callable
from typing import Any, Self, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, jit, nn
from torch.nn.parameter import is_lazy

from maml.config import Config, checks
from maml.config.fields import FACTS, from_values, with_values
from maml.errors import UserError
from maml.execution.copies import closed_copy
from maml.learners import Learner
from maml.learners.base import PARTS_OF_A_LOSS
from maml.learners.objectives import CLASSIFICATION, Given
from maml.learners.rates import OWN, Rates
from maml.library.alone import in_words_of_the_library
from maml.library.checking import Waiting
from maml.library.fast_module import FastModule
from maml.library.flags import facts_of, known
from maml.networks.headless import in_short, layer_of
from maml.networks.loss import LearnedLoss
from maml.networks.ordinary import check_parameters, explicit, to_buffers

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
ORDERS = {1: "first", 2: "second"}
NEVER_CALLED = (
    *("problem", "training_problem", "support_loss", "query_loss", "answers", "metrics"),
    *PARTS_OF_A_LOSS,
)
"""Methods of a program's learner. In a subclass of a meta-learner, nothing would call them."""


def learner_around(
    kind: type, module: nn.Module, loss: Loss, head: str | None, flags: dict[str, Any]
) -> Learner:
    """Return the program's learner that the class ``kind`` stands for."""
    if not isinstance(module, nn.Module):
        raise UserError(f"module is {module!r}; give a torch.nn.Module")
    if isinstance(module, Waiting | FastModule):
        raise UserError(f"module is a {type(module).__name__}; give the module that it is made of")
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise UserError(f"module: {name} has no size yet; call the module on an example first")
        if parameter.is_inference():
            raise UserError(
                f"module: {name} was made under torch.inference_mode, so it can have no gradient; "
                "make the module outside of it"
            )
    for name in NEVER_CALLED:
        if hasattr(kind, name):
            raise UserError(
                f"{kind.__name__}.{name} is never called: give loss=, or take an outer loss of "
                "your own by adapt(); such methods are for train_maml.py, in a subclass of a "
                "learner of maml.learners (docs/extending.md)"
            )
    if getattr(loss, "inner", None) is not None and "inner_steps" not in known(kind):
        raise UserError(f"{kind.__name__} takes no inner_loss: it has no inner loop")
    needed = {parameter: parameter.requires_grad for parameter in module.parameters()}
    nothing = UserError(f"module: {type(module).__name__} has no parameter that could learn")
    try:
        given_rates = _given_rates(kind, flags)
        layer = flags.pop("context_layer", None) if "context_layer" in known(kind) else None
        config = _config(kind, module, flags)
        rates = None
        if given_rates is not None:
            rates = Rates(given_rates, config.inner_steps, getattr(torch, config.dtype))
        given = Given(_network(module, head, layer), CLASSIFICATION._replace(loss=loss), rates)
        learner: Learner = facts_of(kind).maker()(config, given)
    except UserError as error:
        if not needed:
            raise nothing from error
        line = in_words_of_the_library(str(error), FACTS).replace("network ", "module ", 1)
        line = line.replace("the network", "the module")
        line = re.sub(r"give its class head_prefix = .*", 'give head="name of the layer"', line)
        line = line.replace("give its class context_layer = ", "give context_layer=")
        raise UserError(line) from error
    finally:
        # The learner shares the module's tensors, and has begun to change what is frozen.
        for parameter, needs in needed.items():
            parameter.requires_grad_(needs)
    if not learner.meta_parameters():
        raise nothing
    return learner


def loss_of(loss: Loss | None, inner: Loss | None, module: nn.Module) -> Loss:
    """Return the losses as a learner takes them: modules with parameters of their own learn.

    ``inner``: the inner loop's loss, if it is another one than the outer ``loss``.

    Raises:
        UserError: if they have another dtype than the module's.
    """
    loss = F.cross_entropy if loss is None else loss
    for name, each in (("loss", loss), ("inner_loss", inner)):
        if each is not None and (not callable(each) or isinstance(each, type)):
            raise UserError(f"{name} is {each!r}; give a function of (outputs, targets)")
    if inner is None and not isinstance(loss, nn.Module):
        return loss
    of_module, kept = {*module.parameters()}, list[Any]()
    for each in (loss, inner):
        own = each.parameters() if isinstance(each, nn.Module) else ()
        learning = {p for p in own if p.requires_grad}
        learns = learning and not learning & of_module
        kept.append(each if learns or each is None else OfModule(each))
        dtypes = [{p.dtype.to_real() for p in some} for some in (learning, of_module)]
        if learns and dtypes[0] != dtypes[1]:
            kinds = (", ".join(sorted(map(str, some))) for some in dtypes)
            raise UserError("loss: its parameters are {}, and the module's {}".format(*kinds))
    if inner is None and isinstance(kept[0], OfModule):
        return kept[0]
    learned = closed_copy(LearnedLoss(*kept), {})
    to_buffers(learned, [n for n, p in learned.named_parameters() if not p.requires_grad])
    return learned


class OfModule:
    """A loss that does not learn: the learner neither holds, casts nor copies it."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(self, outputs: Tensor, y: Tensor) -> Any:
        """Return the loss of outputs."""
        return self.loss(outputs, y)

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def _given_rates(kind: type, flags: dict[str, Any]) -> Any:
    """Take an ``inner_lr`` that is no number out of the flags, and return it; None: it is one."""
    given = flags.get("inner_lr")
    if not isinstance(given, OWN):
        return None
    if facts_of(kind).attribute != "MAML":
        raise UserError(
            f"inner_lr is a {type(given).__name__}: {kind.__name__} takes a number; MAML, ANIL and "
            "BOIL also take a parameter that learns, one rate for each step, or {pattern: rate}"
        )
    flags["inner_lr"] = 1.0
    return given


def _config(kind: type, module: nn.Module, flags: dict[str, Any]) -> Config:
    facts = facts_of(kind)
    names = known(kind)
    flags = {name: v.item() if isinstance(v, np.generic) else v for name, v in flags.items()}
    for name in flags:
        if name not in names:
            meant = f": give inner_{name}" if f"inner_{name}" in names else ""
            raise UserError(
                f"{kind.__name__} takes no {name}{meant}; besides module, loss, inner_loss, head, "
                f"batching and compile it takes {', '.join(sorted(names))} (docs/migration.md has "
                "the pairs of other libraries)"
            )
    if "order" in flags:
        if flags["order"] not in ORDERS:
            raise UserError(f"order {flags['order']!r}: 1 or 2")
        flags["order"] = ORDERS[flags["order"]]
    if "eval_inner_steps" in names and flags.get("eval_inner_steps") is None:
        flags["eval_inner_steps"] = flags.get("inner_steps", Config().inner_steps)
    config = from_values(flags)
    for name, value in flags.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            checks.check_bounds(name, value)
        if value != getattr(Config(), name):
            checks.check_read_with(config, name)
        refused = facts.refuses.get(name, {})
        if value in refused:
            raise UserError(f"{name} {value}: {kind.__name__} {refused[value]}")
    given = {p.dtype for p in module.parameters()}
    exact = {each.to_real() for each in given} or {torch.float32}
    dtypes = {torch.float32 if each == torch.bfloat16 else each for each in exact}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        named = ", ".join(sorted(map(str, given)))
        raise UserError(f"module: its parameters are {named}; give float32, bfloat16 or float64")
    dtype: Any = str(dtypes.pop()).removeprefix("torch.")
    return with_values(
        config, learner=facts.name, network=type(module).__name__, dtype=dtype, seed=0
    )


def _network(module: nn.Module, head: str | None, context_layer: str | None) -> nn.Module:
    """Return a copy of a module with the interface of `maml.networks`. Both share all tensors."""
    network = _copied(module)
    check_parameters(network, type(module).__name__, of_run=False)
    if head is not None:
        network.head_prefix = _prefix(head, network)  # type: ignore[assignment]
    if context_layer is not None:
        network.context_layer = context_layer  # type: ignore[assignment]
    return explicit(network, type(module).__name__)


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module. Both share all tensors, and what cannot be copied.

    Raises:
        UserError: for a module that cannot be copied.
    """
    shared = dict[int, Any]()
    for path, part in module.named_modules():
        if isinstance(part, jit.ScriptModule):
            raise _made_by("torch.jit.script", path, "its tensors cannot be replaced by a task's")
        if type(part).__name__ == "OptimizedModule":
            raise _made_by("torch.compile", path, "it has no second derivative")
        # A hook makes some anew at each call, as those of torch.nn.utils.prune and weight_norm do.
        made = bool(part._forward_pre_hooks)
        for t in (value for value in vars(part).values() if isinstance(value, Tensor)):
            # A loss that reads the view of a parameter is refused, so it stays a view.
            stays = t.is_leaf or isinstance(t._base, nn.Parameter)
            shared[id(t)] = t if stays and not made else t.detach()
    try:
        return closed_copy(module, shared | _stubborn(module, shared))
    except Exception as error:
        line = " ".join(str(error).split())
        raise UserError(f"module: it cannot be copied ({line})") from error


def _made_by(tool: str, path: str, why: str) -> UserError:
    what = f"module: {path or 'it'} is made by {tool}, so {why}"
    return UserError(f"{what}; give the module before {tool}")


def _stubborn(module: nn.Module, shared: dict[int, Any]) -> dict[int, Any]:
    """Return the values of attributes that cannot be copied, as locks and open files, by id."""
    known = shared | {id(part): part for part in module.modules()}
    found, of_torch = dict[int, Any](), vars(nn.Module())
    for part in module.modules():
        for name, value in vars(part).items():
            try:
                if name not in of_torch:
                    copy.deepcopy(value, dict(known))
            except Exception:
                found[id(value)] = value
    return found


def _prefix(head: str, module: nn.Module) -> str:
    """Return the prefix of the output layer's parameter names; "": the outputs are features."""
    if not isinstance(head, str):
        raise UserError(f"head is a {type(head).__name__}; give the name of the output layer")
    layer, name = layer_of(module, head.rstrip("."))
    if layer is None:
        of_parameters = (n for n, _ in module.named_parameters(remove_duplicate=False))
        layers = dict.fromkeys(n.rpartition(".")[0] for n in of_parameters)
        there = in_short(each or "the module itself" for each in layers)
        raise UserError(f"head {head!r}: no part of the module; those with parameters are {there}")
    return name and f"{name}."
