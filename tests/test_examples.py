"""The examples: they run, and compute what the program computes."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import maml
from benchmarks.record import table
from datasets.tasks import Task
from examples import datarater
from examples import gpt_inner_loop as gpt
from examples import maml_from_scratch as scratch
from maml.config.presets import PRESETS, with_values
from maml.learners import build_learner
from tests.launching import REPO, run
from tests.metagradient.peer import by_hand


def test_the_program_s_gradient_is_the_taught_one() -> None:
    """Both use the same weights and tasks, in float64; the weights have the same names, too."""
    generator = torch.Generator().manual_seed(0)
    drawings = torch.rand(9, 20, 28, 28, generator=generator)
    tasks = [
        tuple(part.double() if part.is_floating_point() else part for part in task)
        for task in (scratch.sample_task(drawings, generator) for _ in range(3))
    ]
    begun = scratch.initial_weights(generator).items()
    weights = {name: w.detach().double().requires_grad_() for name, w in begun}
    loss = scratch.outer_loss(weights, tasks)
    taught = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))

    config = with_values(
        PRESETS["maml-omniglot-5way-1shot"], dtype="float64",
        inner_lr=scratch.INNER_RATE, inner_steps=scratch.INNER_STEPS, queries=scratch.QUERIES,
    )  # fmt: skip
    learner = build_learner(config).double()
    params = {f"network.{name}": w.detach() for name, w in weights.items()}
    assert params.keys() == learner.meta_parameters().keys()
    batch = Task(*(torch.stack(parts) for parts in zip(*tasks, strict=True)))
    found = learner.outer_gradient(params, batch)
    assert found.losses.mean() == pytest.approx(loss.item(), abs=1e-10)
    for name, gradient in taught.items():
        assert gradient.abs().max() > 1e-7 or name.endswith("conv.bias")
        assert (found.gradients[f"network.{name}"] / 3 - gradient).abs().max() < 1e-10


def test_it_trains_and_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patterns = (torch.rand(1623, 1, 28, 28) > 0.5).float().expand(-1, 20, -1, -1)
    monkeypatch.setattr(scratch, "read_characters", lambda folder: patterns)
    for name, value in {"FILTERS": 8, "META_BATCH": 4, "TESTS": 20}.items():
        monkeypatch.setattr(scratch, name, value)
    monkeypatch.setattr(sys, "argv", ["maml_from_scratch.py", "--iterations", "50"])
    scratch.main()
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("test accuracy ") and float(line.split()[2]) > 40


def test_without_data_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "examples/maml_from_scratch.py")]
    done = run(command, 60, expect=1, env={"MAML_DATA": str(tmp_path)})
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: no {tmp_path}/omniglot/images_background.zip: $MAML_DATA ")


@pytest.mark.parametrize("steps", [2, 13])
def test_a_gpt_s_inner_loop_has_the_gradient_of_a_plain_loop(steps: int) -> None:
    """AdamW and attention, in float64; with 13 steps, 2 states are kept."""
    torch.manual_seed(0)
    net = gpt.GPT(gpt.TINY).double()
    meta_params, task = gpt.begin(net), gpt.draw(gpt.TINY, steps)
    found = maml.meta_gradient(partial(gpt.problem, net, steps), meta_params, task).gradients
    with sdpa_kernel(SDPBackend.MATH):
        taught = by_hand(gpt.problem(net, steps, meta_params), task).gradients
    expected = {name: {**taught.start, **taught.fixed}[name] for name in found}
    assert expected["of sources"].abs().max() > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def test_a_gpt_s_sources_learn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpt_inner_loop.py", "--tiny"])
    torch.manual_seed(2)
    gpt.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert all(" ".join(row[3:7]) == "shares of the sources" for row in rows)
    assert float(rows[-1][7]) > 0.5  # the outer loss is of the first of the four sources


def test_a_datarater_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path
) -> None:
    """A few steps with fewer classes; the record has all that its table needs."""
    monkeypatch.setattr(datarater, "WAYS", 5)
    record = tmp_path / "record.json"
    words = ["--seeds", "2", "--outer-steps", "12", "--steps", "10", "--json", str(record)]
    monkeypatch.setattr(sys, "argv", ["datarater.py", *words])
    datarater.main()
    report = json.loads(record.read_text())
    assert [row["seed"] for row in report["rows"]] == [0, 1] and "mean" in report
    assert all(20 < row["unweighted"] <= 100 for row in report["rows"])
    assert table(report).count(" % ") == 4
