"""The outer loop's optimizer: the one place where meta-parameters change."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from maml.config import Config
from maml.errors import UserError
from maml.params import ParamLayout, Params

_REMEMBERED = {"adam": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}
"""The names in each optimizer's state after its first step."""


class NotFiniteError(ArithmeticError):
    """A step of a mean ``loss`` cannot be taken; ``str(error)`` says why. Nothing has changed."""

    def __init__(self, why: str, loss: float) -> None:
        super().__init__(why)
        self.loss = loss


class OuterOptimizer:
    """Steps meta-parameters along the mean over tasks of their gradient.

    Adam as in the released code of MAML (arXiv:1703.03400), or SGD with momentum. Both work
    element by element, so all meta-parameters are one flat tensor. Every other process waits for a
    step, and on one tensor it is a few operations. ``--weight-decay`` shrinks the network's weights
    before each step, separately from the gradient (arXiv:1711.05101, algorithm 2, line 12).

    Attributes:
        params: The meta-parameters by name, views of the flat tensor. A step changes them; writing
            to them in place sets them.
    """

    _latest: torch.Tensor | None = None

    def __init__(self, config: Config, meta_params: Params, frozen: Collection[str] = ()) -> None:
        """Begin with a copy of ``meta_params`` (one dtype, one device); never change ``frozen``."""
        self._clip = config.grad_clip
        self._config = config
        self._layout = ParamLayout(meta_params)
        self._flat = self._layout.params(meta_params)
        self.params = self._layout.to_params(self._flat)
        self._state: dict[str, torch.Tensor] = {}
        self._frozen = set(frozen)
        if self._frozen.issuperset(meta_params):
            raise UserError("all parameters are frozen (--freeze): nothing is left that learns")
        self._decays: torch.Tensor | None = None
        if config.weight_decay:
            # Only network weights decay: learned inner rates, for example, should not shrink to 0.
            of = {n: n.startswith("network.") and n not in self._frozen for n in meta_params}
            decays = {n: torch.full_like(t, float(of[n])) for n, t in self.params.items()}
            self._decays = self._layout.params(decays) * config.weight_decay

    def step(
        self,
        gradients: Params,
        n_tasks: int,
        iteration: int = 0,
        total: torch.Tensor | None = None,
    ) -> float:
        """Step along Σ gradient / n (arXiv:1703.03400, algorithm 2, line 10), clipped.

        The sizes that decide are read together, because a read waits for the device.

        Args:
            gradients: Σ over the tasks of the outer loss's gradient.
            n_tasks: n.
            iteration: The number of steps before; the learning rate may depend on it.
            total: Σ over the tasks of the outer loss, a scalar; None: 0.

        Returns:
            The mean outer loss.

        Raises:
            NotFiniteError: if the loss, an element of the gradient, or the square of a clipped
                element, is not finite: Adam's second moment would stay infinite, and that weight
                would never move again. Parameters and state are unchanged.
        """
        still = {name: torch.zeros_like(self.params[name]) for name in self._frozen}
        gradient = self._layout.params({**gradients, **still}).div_(n_tasks)
        # The largest magnitude, not a sum of squares: it has the same bits on every machine, so
        # all processes that take this step make the same decision. NaN if an element is NaN.
        sizes = [gradient.new_zeros(()) if total is None else total.to(gradient)]
        sizes.append(torch.stack(torch.aminmax(gradient)).abs().max())
        if self._clip is not None:
            gradient.clamp_(-self._clip, self._clip)
        if self._config.grad_clip_norm is not None:
            # In float64, so that processes with different numbers of threads decide the same.
            sizes.append(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        loss, peak, *norm = torch.cat([size[None] for size in sizes]).tolist()
        loss /= n_tasks
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss is {loss}", loss)
        if not math.isfinite(peak):
            raise NotFiniteError("the gradient is not finite", loss)
        if self._clip is not None:
            peak = min(peak, self._clip)
        if self._config.grad_clip_norm is not None:
            # As torch's clip_grad_norm_.
            by = min(1.0, self._config.grad_clip_norm / (norm[0] + 1e-6))
            gradient.mul_(by)
            peak *= by
        if peak**2 > torch.finfo(gradient.dtype).max:
            why = f"the gradient is too large, {peak:.1g}: its square is not finite"
            raise NotFiniteError(why, loss)
        self._latest = gradient
        self._update(gradient, rate_at(self._config, iteration))
        return float(loss)

    def _update(self, gradient: torch.Tensor, rate: float) -> None:
        # PyTorch's functions, not its classes: the classes import its compiler, which takes two
        # seconds at every process's start.
        state, flat = self._state, self._flat
        if self._decays is not None:
            flat.mul_(1 - rate * self._decays)
        if self._config.meta_optimizer == "adam":
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
                state["exp_avg"], state["exp_avg_sq"] = flat.new_zeros(2, *flat.shape)
            adam(
                [flat], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
                lr=rate, beta1=0.9, beta2=0.999, eps=self._config.meta_eps, weight_decay=0.0,
                amsgrad=False, maximize=False, fused=True,
            )  # fmt: skip
            return
        buffers = [state.get("momentum_buffer")]
        sgd(
            [flat], [gradient], buffers, lr=rate, momentum=self._config.meta_momentum,
            dampening=0.0, nesterov=False, weight_decay=0.0, maximize=False, fused=True,
        )  # fmt: skip
        if buffers[0] is not None:
            state["momentum_buffer"] = buffers[0]

    @property
    def norm(self) -> float:
        """The Euclidean norm of the latest gradient, after clipping; 0 before the first step."""
        return 0.0 if self._latest is None else float(self._latest.norm())

    def is_finite(self) -> bool:
        """Return whether the parameters and the optimizer's state are finite."""
        return all(bool(tensor.isfinite().all()) for tensor in (self._flat, *self._state.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint, in PyTorch's form: ``{"state": {0: {name: tensor}}}``.

        It is on the CPU, for a machine without this device.
        """
        state = {name: tensor.cpu() for name, tensor in self._state.items()}
        return {"state": {0: state} if state else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a copy of ``state``; the state of a PyTorch optimizer works, too.

        Raises:
            ValueError: if it is not for one tensor of all parameters, or from another optimizer.
        """
        kept = {n: t for n, t in state["state"].get(0, {}).items() if t is not None}
        known = _REMEMBERED[self._config.meta_optimizer]
        whole = [
            tensor.shape == self._flat.shape for name, tensor in kept.items() if name != "step"
        ]
        if set(state["state"]) - {0} or set(kept) not in (set(), known) or not all(whole):
            raise ValueError("the state of another optimizer, or of other parameters")
        self._state = {name: t.to(self._flat.device, copy=True) for name, t in kept.items()}


def rate_at(config: Config, iteration: int) -> float:
    """Return the outer loop's learning rate for the step after ``iteration`` other steps.

    ``--meta-schedule``: linear as in Reptile (arXiv:1803.02999, section 6.1); cosine annealing
    (arXiv:1608.03983, equation 5), here at each step, in MAML++ at each epoch; halving as in
    Prototypical Networks (arXiv:1703.05175, section 3.1), or with another factor
    (``--meta-decay``) as in CAVIA's released code.
    """
    done = min(iteration / max(config.iterations, 1), 1.0)
    if config.meta_schedule == "halving":
        return config.meta_lr * config.meta_decay ** (iteration // config.meta_halve_every)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return config.meta_lr_end + (config.meta_lr - config.meta_lr_end) * left[config.meta_schedule]
