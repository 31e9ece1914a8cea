"""What a run tells of its inner loop: a step too many is said at its end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from maml.run import insight
from maml.run.insight import fewer_steps
from tests.runs import glyphs, metrics, sinusoid, supervised, train

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_fewer_steps_are_advised_where_more_are_clearly_worse() -> None:
    generator = torch.Generator().manual_seed(0)
    tasks = torch.rand(16, generator=generator) / 2
    noise = torch.rand(16, generator=generator) / 10
    after = {0: 0.0 * tasks, 1: tasks + 0.3, 2: tasks + 0.2, 3: tasks + 0.1 + noise}
    left, reached = (100 * float(after[n].mean()) for n in (3, 1))
    assert fewer_steps(after) == (
        f"after 3 inner steps validation accuracy is {left:.0f} %, after 1 it is {reached:.0f} % "
        "(16 tasks): try --eval-inner-steps 1, or a lower --inner-lr"
    )
    # Where the first step already harms, none is better than fewer.
    harmed = {0: tasks + 0.3, 1: tasks}
    assert fewer_steps(harmed).endswith("(16 tasks): try a lower --inner-lr")
    # Better, worse by little, worse by chance; and where no step is taken.
    assert not fewer_steps({0: tasks, 1: tasks + 0.3})
    assert not fewer_steps({1: tasks + 0.04, 2: tasks})
    assert not fewer_steps(
        {1: torch.tensor([1.0, 0.0] * 7 + [1.0, 1.0]), 2: torch.full((16,), 0.4)}
    )
    assert not fewer_steps({})


def test_chance_advises_nothing() -> None:
    """Of tasks with five queries, after steps that are all as good and have nothing in common."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(6, (1000, 11, 16), generator=generator) / 5
    said = sum(bool(fewer_steps(dict(enumerate(run)))) for run in scores)
    assert said <= 10


def test_it_is_said_of_the_model_that_is_tested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last validation, or looked at anew where that is of another iteration."""
    seen: list[dict[str, float]] = []

    def line(after: dict[int, torch.Tensor]) -> str:
        seen.append({str(n): float(scores.mean()) for n, scores in after.items()})
        return "a line"

    monkeypatch.setattr(insight, "fewer_steps", line)
    config = glyphs(eval_inner_steps=3, eval_every=2)
    train(config, tmp_path / "validated", iterations=4)
    assert capsys.readouterr().out.count("a line") == 1
    (_, last) = (row["after"] for row in metrics(tmp_path / "validated") if "split" in row)
    assert list(last) == ["0", "1", "2", "3"]
    train(config, tmp_path / "later", iterations=5)
    train(config, tmp_path / "later-2", iterations=4, eval_every=3)
    assert seen[0] == last == seen[2] != seen[1]
    # Nobody validates, no class is told apart, or nothing adapts.
    capsys.readouterr()
    train(config, tmp_path / "never", eval_every=0)
    train(sinusoid(eval_every=1), tmp_path / "regression")
    train(supervised(eval_every=1), tmp_path / "supervised")
    assert len(seen) == 3 and "a line" not in capsys.readouterr().out
