"""Policies: the estimator against a decision process whose return is known in closed form."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import maml
from maml import evaluate
from maml.acting.learners.maml_policy import MAMLPolicy, dice
from maml.acting.learners.reinforce import Reinforce, returns_to_go
from maml.acting.policy import Played
from maml.config.presets import PRESETS, with_values
from maml.errors import UserError
from maml.learners import build_learner
from maml.metagradient.differentiate import meta_gradient
from maml.metagradient.problem import Problem
from maml.params import Params
from maml.run.files import read_rows
from tests.runs import BRIEF, metrics, result, same, train, worker_of

# Two states, two actions, three steps; chance and the action choose the next state: 2^3·2^3 ways.
STEPS, RATE = 3, 0.7
FIRST = torch.tensor([0.7, 0.3], dtype=torch.float64)
MOVES = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [0.5, 0.5]]], dtype=torch.float64)
GAINS = torch.tensor([[1.0, -0.5], [0.3, 2.0]], dtype=torch.float64)
SUPPORT, QUERY = GAINS, torch.tensor([[0.2, 1.5], [-1.0, 0.4]], dtype=torch.float64)
THETA = torch.tensor([[0.3, -0.2], [0.1, 0.6]], dtype=torch.float64)


def exact_return(logits: Tensor, gains: Tensor) -> Tensor:
    """Return J by propagating the probabilities of states."""
    at, total = FIRST, torch.zeros((), dtype=torch.float64)
    policy = logits.softmax(-1)
    for _ in range(STEPS):
        total = total + (at[:, None] * policy * gains).sum()
        at = torch.einsum("s,sa,sat->t", at, policy, MOVES)
    return total


def ways() -> tuple[Tensor, Tensor, Tensor]:
    """Return all ways: states and actions ``[W, T]``, and the states' probabilities ``[W]``."""
    rows, chances = [], []
    for states in itertools.product((0, 1), repeat=STEPS):
        for actions in itertools.product((0, 1), repeat=STEPS):
            chance = FIRST[states[0]]
            for step in range(STEPS - 1):
                chance = chance * MOVES[states[step], actions[step], states[step + 1]]
            rows.append((states, actions))
            chances.append(chance)
    states, actions = (torch.tensor(part) for part in zip(*rows, strict=True))
    return states, actions, torch.stack(chances)


STATES, ACTIONS, CHANCES = ways()


def log_probabilities(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[STATES, ACTIONS]


def expected(logits: Tensor, gains: Tensor) -> Tensor:
    """Return DiCE's expectation over episodes, weighted by each way's probability, a constant."""
    logp = log_probabilities(logits)
    weights = (CHANCES * logp.sum(-1).exp()).detach()
    return weights @ torch.func.vmap(dice)(logp[:, None], gains[STATES, ACTIONS][:, None])


def test_drawn_episodes_have_no_bias() -> None:
    """With the other episodes as baseline, neither the gradient nor the Hessian has a bias."""
    generator = torch.Generator().manual_seed(0)
    batches, episodes = 4000, 5
    # The ways that the episodes take.
    chances = CHANCES * log_probabilities(THETA).sum(-1).exp()
    taken = torch.multinomial(chances, batches * episodes, replacement=True, generator=generator)
    taken = taken.view(batches, episodes)
    rewards = SUPPORT[STATES, ACTIONS]

    def surrogate(logits: Tensor, of: Tensor) -> Tensor:
        return dice(log_probabilities(logits)[of], rewards[of])

    for derived in (torch.func.grad, lambda f: torch.func.jacfwd(torch.func.grad(f))):
        exact = derived(lambda logits: exact_return(logits, SUPPORT))(THETA)
        found = torch.func.vmap(derived(surrogate), in_dims=(None, 0))(THETA, taken)
        error = found.std(0) / batches**0.5
        assert ((found.mean(0) - exact).abs() < 4.5 * error + 1e-12).all()


@pytest.mark.parametrize("way", ["reverse", "mixed"])
def test_the_meta_gradient_is_the_exact_one(way: Any) -> None:
    """By `meta_gradient`, as for every learner, with all ways as a task's support and query."""
    logits = THETA.clone().requires_grad_()
    # −J_query(θ + α ∇J_support(θ)), with all expectations inside.
    (inner,) = torch.autograd.grad(exact_return(logits, SUPPORT), logits, create_graph=True)
    (exact,) = torch.autograd.grad(-exact_return(logits + RATE * inner, QUERY), logits)

    def loss(gains: Tensor) -> Any:
        def of(params: Params, task: Any, step: int) -> tuple[Tensor, Tensor]:
            return -expected(params["logits"], gains), task

        return of

    def state(params: Params) -> Problem:
        return Problem(params, loss(SUPPORT), loss(QUERY), lr=RATE, steps=1)

    found = meta_gradient(state, {"logits": THETA}, torch.zeros(1, 1), way)
    torch.testing.assert_close(found.gradients["logits"], exact, rtol=0, atol=1e-12)
    # The first-order gradient differs by more than rounding.
    plain = torch.func.grad(lambda at: -exact_return(at, QUERY))(
        THETA + RATE * torch.func.grad(lambda at: exact_return(at, SUPPORT))(THETA)
    )
    assert (plain - exact).abs().max() > 0.01


def learner(preset: str, **values: Any) -> Any:
    small = {"horizon": 30, "queries": 3, "dtype": "float64", "shots": 3, **values}
    return build_learner(with_values(PRESETS[preset], **small))


@pytest.mark.parametrize("preset", ["maml-navigation", "reinforce-cartpole"])
def test_what_was_played_is_as_probable_as_it_says(preset: str) -> None:
    """Compute an episode's steps again by the network, and from the uniform numbers."""
    of = learner(preset)
    params = of.meta_parameters()
    tasks = of.open_tasks("train").tasks(torch.arange(2))
    played: Played = of.materialise(params, tasks)
    weights = of.network_weights(params)
    query = type(played.query)(*(part[1] for part in played.query))
    if preset != "reinforce-cartpole":
        # The second task's policy, adapted to it alone.
        one = type(tasks)(*(part[1:2] for part in tasks))
        alone = of.materialise(params, one)
        for mine, both in zip(alone.query, played.query, strict=True):
            # A task's tensors are as long as its longest episode; the rest is zeros.
            lasted = mine.shape[2]
            torch.testing.assert_close(mine[0], both[1][:, :lasted], rtol=0, atol=1e-10)
            assert not both[1][:, lasted:].any()
        return
    logp = of.log_probabilities(weights, query)
    outputs = of.network(query.observations)[0].log_softmax(-1)
    chosen = outputs.exp()[..., 0] <= tasks.query_y[1, ..., 0]
    assert torch.equal(chosen.long()[query.alive > 0], query.actions[query.alive > 0])
    expected = torch.where(query.actions == 1, outputs[..., 1], outputs[..., 0])
    torch.testing.assert_close(logp, expected * query.alive, rtol=0, atol=1e-12)


def test_returns_begin_anew_with_each_episode() -> None:
    of = learner("reinforce-cartpole")
    played = of.materialise(of.meta_parameters(), of.open_tasks("train").tasks(torch.arange(2)))
    query, discount = played.query, 0.9
    found = returns_to_go(query, discount)
    for environment in itertools.product(range(2), range(3)):
        rewards, ends = query.rewards[environment].tolist(), query.ends[environment].tolist()
        for step in range(30):
            expected, weight = 0.0, 1.0
            for later in range(step, 30):
                expected += weight * rewards[later]
                weight *= discount
                if ends[later]:
                    break
            assert float(found[environment][step]) == pytest.approx(expected)
    first = [int(query.ends[0, e].argmax()) + 1 for e in range(3)]
    assert float(played.query_y[0, 1]) == pytest.approx(sum(first) / 3)


@pytest.mark.parametrize("preset", ["maml-cartpole", "reinforce-cartpole"])
def test_a_discount_changes_the_gradient(preset: str) -> None:
    found = []
    for of in (learner(preset), learner(preset, discount=0.5)):
        params = of.meta_parameters()
        tasks = of.materialise(params, of.open_tasks("train").tasks(torch.arange(2)))
        found.append(of.outer_gradient(params, tasks).gradients)
    assert max(float((found[0][n] - found[1][n]).abs().max()) for n in found[0]) > 1e-6


class Recurrent(nn.Module):
    """Reads an observation's numbers one after the other. It asks for a value, so no batch."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.rnn(x[..., None])[0][:, -1])
        return outputs if bool((x < 1e9).all()) else 0 * outputs


class Centred(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Faster(MAMLPolicy):
    def training_problem(self, meta_params: Params, phase: int) -> Problem:
        return dataclasses.replace(super().training_problem(meta_params, phase), lr=2.0)


def test_a_policy_acts_by_its_training_problem_and_own_observation() -> None:
    def gradient(network: str, **values: Any) -> Params:
        small = {**BRIEF, "shots": 2, "queries": 2, "horizon": 10, **values}
        own = f"tests.acting.test_policies:{network}"
        worker = worker_of("maml-navigation", network=own, **small)
        assert worker.learner.batching == "tasks"
        params = worker.learner.meta_parameters()
        return worker.share(params, torch.arange(2), worker.learner).gradients

    stated = gradient("Recurrent", learner="tests.acting.test_policies:Faster")
    assert same(stated, gradient("Recurrent", inner_lr=2.0))
    assert not same(stated, gradient("Recurrent"))
    with pytest.raises(UserError, match="an action depends on what is seen in other environments"):
        gradient("Centred")


class Level(Reinforce):
    """Acts by weights that are all zero, so each action is as probable as the other."""

    def problem(self, meta_params: Params, steps: int) -> Problem:
        found = super().problem(meta_params, steps)
        fixed = {name: 0 * tensor for name, tensor in found.fixed.items()}
        return dataclasses.replace(found, fixed=fixed)


class Drawn(Reinforce):
    """Draws in its problem."""

    seen: ClassVar[list[float]] = []

    def problem(self, meta_params: Params, steps: int) -> Problem:
        self.seen.append(float(torch.randn(())))
        return super().problem(meta_params, steps)


def test_reinforce_acts_by_its_problem() -> None:
    worker = worker_of("reinforce-cartpole", learner="tests.acting.test_policies:Drawn")
    for _ in range(2):  # the first finds out that it draws
        Drawn.seen.clear()
        worker.share(worker.learner.meta_parameters(), torch.arange(2), worker.learner)
    acted, differentiated = Drawn.seen[:2], Drawn.seen[2:]
    assert acted == differentiated and acted[0] != acted[1]
    of = learner("reinforce-cartpole", learner="tests.acting.test_policies:Level")
    tasks = of.open_tasks("train").tasks(torch.arange(2))
    query = of.materialise(of.meta_parameters(), tasks, 0).query
    assert torch.equal(query.actions, (tasks.query_y[..., 0] >= 0.5) * query.alive.long())


class Hesitant(nn.Sequential):
    """A policy with dropout."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(nn.Linear(shape[0], 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, outputs))


def test_a_policy_is_trained_resumed_evaluated_and_drawn(tmp_path: Path) -> None:
    """Like every learner; a resumed run equals a run that was not stopped, also if it draws."""
    small = {"network": "tests.acting.test_policies:Hesitant"}
    small |= {"shots": 2, "queries": 2, "eval_queries": 2, "meta_batch_size": 2, "horizon": 160}
    config = with_values(PRESETS["maml-navigation"], **{**BRIEF, **small, "test_tasks": 4})
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", iterations=1)
    assert same(train(config, tmp_path / "parts")["model"], whole["model"])
    assert {"return", "return_before", "loss"} <= metrics(tmp_path / "whole")[0].keys()
    found = result(tmp_path / "whole")
    assert found["return"] == -found["loss"] < 0 and found["ci95"] == found["return_ci95"]
    assert (tmp_path / "whole" / "curves.png").stat().st_size > 5000
    evaluate.main([str(tmp_path / "whole"), "--tasks", "4", "--trust"])
    (row,) = read_rows(tmp_path / "whole" / "evaluations.jsonl")
    assert row["return"] == pytest.approx(found["return"])
    with pytest.raises(UserError, match="it acts, and answers no queries"):
        maml.load(tmp_path / "whole", trust=True)
