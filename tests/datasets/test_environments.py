"""Environments as tensors: gymnasium's CartPole step by step, draws by address, episodes' ends."""

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from datasets import DataError, Task, open_environments
from datasets.environments.acting import play
from datasets.environments.cartpole import CartPole, Physics, TurnedCartPole
from datasets.environments.navigation import Navigation

COUNTS = {"shots": 2, "queries": 3, "seed": 0, "horizon": 20}


def test_cartpole_is_gymnasium_s_step_by_step() -> None:
    """Sixteen carts of different physics, side by side, against sixteen of gymnasium's."""
    environment = TurnedCartPole()
    tasks = open_environments("cartpole-turned", "train", **COUNTS).tasks(torch.arange(16))
    state = tasks.query_x[:, 0, 0]
    theirs = []
    for row in state:
        one = gymnasium.make("CartPole-v1").unwrapped
        one.reset()
        one.gravity, one.masscart, one.masspole, one.length, one.force_mag = row[4:].tolist()
        one.total_mass = one.masspole + one.masscart
        one.polemass_length = one.masspole * one.length
        one.state = row[:4].numpy()
        theirs.append(one)
    fallen: set[int] = set()
    for step in range(40):
        actions = torch.from_numpy(np.random.default_rng(step).integers(2, size=16))
        state, reward, ended = environment.step(state, actions)
        seen = environment.observe(state)
        for index in set(range(16)) - fallen:
            one = theirs[index]
            observed, expected, terminated, _, _ = one.step(int(actions[index]))
            np.testing.assert_allclose(state[index, :4], one.state, rtol=0, atol=1e-11)
            np.testing.assert_allclose(seen[index], observed, rtol=1e-6, atol=1e-9)
            assert (bool(ended[index]), float(reward[index])) == (terminated, expected)
            fallen |= {index} if terminated else set()
    assert 2 < len(fallen) < 16


@pytest.mark.parametrize("name", ["cartpole", "cartpole-turned", "navigation"])
def test_chance_has_addresses(name: str) -> None:
    """A task is the same alone and in a batch. All draws of all tasks and episodes differ."""
    opened = open_environments(name, "train", **COUNTS, starts=2)
    together = opened.tasks(torch.tensor([7, 3, 5]))
    alone = opened.tasks(torch.tensor([3]))
    for one, many in zip(alone, together, strict=True):
        assert torch.equal(one[0], many[1])
    assert together.support_x.shape[:3] == (3, 2, 2)
    assert together.support_y.shape[:3] == (3, 2, 20)
    draws = torch.cat([together.support_y.flatten(), together.query_y.flatten()])
    assert len(draws.unique()) == len(draws)
    other = open_environments(name, "test", **COUNTS, starts=2).tasks(torch.tensor([3]))
    assert not torch.equal(other.query_y, alone.query_y)
    with pytest.raises(DataError, match="--horizon 0"):
        open_environments(name, "train", **COUNTS | {"horizon": 0})


def test_physics_are_gymnasium_s_or_drawn_around_them() -> None:
    one = gymnasium.make("CartPole-v1").unwrapped
    assert Physics() == (one.gravity, one.masscart, one.masspole, one.length, one.force_mag)
    tasks = open_environments("cartpole", "test", **COUNTS).tasks(torch.arange(2))
    standard = torch.tensor(Physics(), dtype=torch.float64)
    assert torch.equal(tasks.query_x[..., 4:], standard.expand(2, 3, 1, 5))

    def drawn(name: str, moving: int) -> Tensor:
        tasks = open_environments(name, "train", **COUNTS).tasks(torch.arange(500))
        return tasks.query_x[:, 0, 0, moving:]

    physics = drawn("cartpole-turned", 4)
    factors = physics / standard
    sizes = factors.abs()
    assert 0.5 <= float(sizes.min()) < 0.51 and 1.49 < float(sizes.max()) < 1.5
    assert 200 < int((factors[:, 4] < 0).sum()) < 300 and bool((factors[:, :4] > 0).all())
    assert torch.equal(drawn("cartpole-physics", 4), physics.abs())
    goals = drawn("navigation", 2)
    assert 0.49 < float(goals.max()) < 0.5 and -0.5 < float(goals.min()) < -0.49


def right(observations: Tensor, draws: Tensor) -> Tensor:
    return torch.ones(observations.shape[:-1], dtype=torch.int64)


def test_an_episode_that_ends_goes_on_with_the_next_start_or_stands_still() -> None:
    """If the cart is always pushed right, the pole falls after about ten steps."""
    for starts in (1, 3):
        tasks: Task = open_environments(
            "cartpole", "train", **COUNTS | {"horizon": 60}, starts=starts
        ).tasks(torch.arange(2))
        played = play(CartPole(), tasks.query_x, tasks.query_y, right, torch.float64)
        assert played.observations.shape == (2, 3, 60, 4)
        assert torch.equal(played.ends.sum(-1), torch.full((2, 3), float(starts)).double())
        assert torch.equal(played.rewards, played.alive)
        for task in range(2):
            for episode in range(3):
                ends = played.ends[task, episode].nonzero().flatten().tolist()
                lengths = np.diff([-1, *ends])
                assert lengths.min() >= 7 and lengths.max() <= 12
                assert float(played.alive[task, episode].sum()) == ends[-1] + 1
                # The observation after an end is that of the next start.
                for start, end in enumerate(ends[:-1], 1):
                    torch.testing.assert_close(
                        played.observations[task, episode, end + 1],
                        tasks.query_x[task, episode, start, :4], rtol=1e-6, atol=0,
                    )  # fmt: skip


def test_the_time_limit_ends_first_episodes_alone() -> None:
    """Of 15 steps, about ten are the first episode; the second one is cut and has no end."""
    tasks = open_environments("cartpole", "train", **COUNTS, starts=9).tasks(torch.arange(1))
    for horizon in (5, 15):
        draws = tasks.query_y[..., :horizon, :]
        played = play(CartPole(), tasks.query_x, draws, right, torch.float64)
        assert played.ends.sum(-1).tolist() == [[1.0] * 3]
        assert bool((played.ends[..., -1] == 1).all()) == (horizon == 5)


def test_navigation_walks_and_arrives() -> None:
    """A step is clipped to a tenth along each axis; the reward is minus the squared distance."""
    state, environment = torch.tensor([[0.0, 0.0, 0.25, -0.05]]).double(), Navigation()
    walk = [((5.0, -0.05), (0.1, -0.05)), ((0.1, -0.5), (0.2, -0.15)), ((0.05, 0.1), (0.25, -0.05))]
    for velocity, place in walk:
        state, reward, ended = environment.step(state, torch.tensor([velocity]))
        assert environment.observe(state)[0].tolist() == pytest.approx(place)
        away = (place[0] - 0.25) ** 2 + (place[1] + 0.05) ** 2
        assert float(reward) == pytest.approx(-away, abs=1e-12)
        assert bool(ended) == (place == (0.25, -0.05))
