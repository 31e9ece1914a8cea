"""One agent, many observers: the parameters of one process, and no wait for a failed one."""

import dataclasses
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maml.acting.learners.reinforce import Reinforce
from maml.acting.strategies.observers import Observers
from maml.config.presets import PRESETS, with_values
from maml.errors import UserError
from maml.metagradient.problem import Problem
from maml.params import Params
from maml.processes.world import World
from maml.worker import Worker
from tests.launching import SLACK, run, start_ranks, torchrun
from tests.runs import BRIEF, as_flags, last, metrics, sinusoid, train
from tests.strategies.faults import wait_for_iteration

SHORT: dict[str, Any] = {
    **BRIEF, "horizon": 40, "queries": 2, "meta_batch_size": 5, "dtype": "float64", "log_every": 2,
}  # fmt: skip
CONFIG = with_values(PRESETS["reinforce-cartpole"], **SHORT)


class Phased(Reinforce):
    """Calls its network in its own way, and states another loss after the first iterations."""

    last_phase = 1

    def phase(self, iteration: int) -> int:
        return int(iteration >= 2)

    def call_network(self, params: Params, x: Tensor, statistics: Any = None) -> Any:
        outputs, used = super().call_network(params, x, statistics)
        return 3 * outputs, used

    def training_problem(self, meta_params: Params, phase: int) -> Problem:
        def query(params: Params, task: Any, step: int) -> tuple[Tensor, Tensor]:
            loss, outputs = self.query_loss(params, task, step)
            return (2 - phase) * loss, outputs

        return dataclasses.replace(super().training_problem(meta_params, phase), query=query)


def test_equal_actions_and_gradients(tmp_path: Path) -> None:
    """An agent and its observers train an own learner's parameters as one process does.

    One observer or three, with one forward pass for all requests or one for each: five tasks do not
    divide evenly among three. An iteration's actions depend on the parameters before it, so a
    wrong gradient would change all later iterations.
    """
    own = with_values(CONFIG, learner="tests.acting.test_observers:Phased", iterations=4)
    alone = train(own, tmp_path / "alone")["model"]
    flags = as_flags(with_values(own, strategy="observers"))
    ways = {
        "batched": flags,
        "unbatched": [*flags, "--batched-inference", "false"],
        # Under a launcher each task may also act where it is computed.
        "rpc": [*flags, "--strategy", "rpc"],
    }
    for observers in (1, 3):
        names = {f"{way}-{observers}": ways[way] for way in ways if observers == 3 or way != "rpc"}
        script = ["-m", "tests.strategies.topologies", str(tmp_path), json.dumps(names)]
        run(torchrun(1 + observers, script), timeout=120)
        found = {name: last(tmp_path / name)["model"] for name in names}
        torch.testing.assert_close(found, dict.fromkeys(names, alone), rtol=0, atol=1e-10)
    row = metrics(tmp_path / "batched-3")[-1]
    assert row["requests"] == 2 * 3 * 40 and 80 <= row["forwards"] < 240 - row["flushed"]
    assert row["forwards"] == 80 or row["flushed"]
    assert row["return"] > 5
    row = metrics(tmp_path / "unbatched-3")[-1]
    assert row["requests"] == row["forwards"] == 2 * 3 * 40 and not row["flushed"]
    assert row["requests_per_second"] > 0 and 0 < row["action_ms"]["p50"] <= row["action_ms"]["p95"]


def test_a_batch_waits_for_the_observers_that_play_but_not_long() -> None:
    config = with_values(CONFIG, batch_wait=0.2)
    agent = Observers(config, World(0, 4, 0, 4, True), Worker(config, torch.device("cpu")))
    params = {name: tensor + 0.1 for name, tensor in agent.learner.meta_parameters().items()}
    policy = agent.learner.problem(params, 0).fixed
    rows = {rank: torch.rand(rank, 5, dtype=torch.float64) for rank in (1, 2, 3)}

    def ask(rank: int) -> torch.futures.Future[Tensor]:
        answer: torch.futures.Future[Tensor] = agent.ask(rank, rows[rank])
        return answer

    def play() -> None:
        for _ in range(5):
            answers = {rank: ask(rank) for rank in (3, 1, 2)}
            for rank, answer in answers.items():
                alone = agent.learner.actions(policy, rows[rank][:, :4], rows[rank][:, 4:])
                assert torch.equal(answer.wait(), alone)
        began = time.monotonic()
        assert len(ask(2).wait()) == 2  # the others are slow
        assert time.monotonic() - began >= 0.2
        agent.gone.add(3)  # so two requests are a whole batch
        assert [len(answer.wait()) for answer in (ask(1), ask(2))] == [1, 2]

    def end(_: object) -> None:
        for rank in (1, 2, 3):
            agent.exchange(rank, (tuple(rows.values()), torch.ones(40)))

    for rank in rows:
        agent.exchange(rank, None)  # they come
    with ThreadPoolExecutor(1) as threads:
        playing = threads.submit(play)
        playing.add_done_callback(end)
        found = agent.play(policy, {rank: torch.tensor([rank]) for rank in rows})
        playing.result()
    assert [int(part) for (_, part), _ in found] == [1, 2]
    assert agent._counts == {"forwards": 7, "requests": 18, "flushed": 1}


def test_what_observers_cannot_do_is_said_in_one_line() -> None:
    of_sinusoid = Worker(sinusoid(), torch.device("cpu"))
    with pytest.raises(UserError, match="--strategy observers: they play for --learner reinforce"):
        Observers(sinusoid(strategy="observers"), World(0, 3, 0, 3, True), of_sinusoid)
    worker = Worker(CONFIG, torch.device("cpu"))
    with pytest.raises(UserError, match="--strategy observers: needs 2 processes"):
        Observers(CONFIG, World(0, 1, 0, 1, True), worker)


def test_training_goes_on_without_observers_but_not_without_the_agent(tmp_path: Path) -> None:
    """One of three is killed, one stopped; then the agent is killed, and the last one says so."""
    config = with_values(CONFIG, iterations=100_000, checkpoint_every=2, strategy="observers")
    args = [*as_flags(config), "--run-dir", str(tmp_path), "--timeout", "15"]
    ranks = start_ranks(4, args)
    agent, _, killed, frozen = (launched.process.pid for launched in ranks)
    try:
        wait_for_iteration(ranks[0], tmp_path, 4, limit=90)
        os.kill(killed, signal.SIGKILL)
        os.kill(frozen, signal.SIGSTOP)
        at = metrics(tmp_path)[-1]["iteration"]
        wait_for_iteration(ranks[0], tmp_path, at + 20, limit=60)
        rows = metrics(tmp_path)
        assert sum(row.get("missed_tasks", 0) for row in rows) >= 1
        assert rows[-1]["requests"] == rows[-1]["forwards"]
        lost = rf"pid {killed}\) was killed.*; training goes on without"
        assert re.search(lost, ranks[0].stderr)
        os.kill(agent, signal.SIGKILL)
        ranks[1].process.wait(60 * SLACK)
    finally:
        ranks[3].process.kill()
        done = [launched.wait(30, expect=None) for launched in ranks]
    lines = done[1].stderr.replace("\r", "\n").splitlines()
    said = [line for line in lines if "error: " in line]
    assert len(said) == 1 and re.search(rf"rank 0 .*pid {agent}\) was killed", said[0])
    assert done[1].returncode == 1
