"""Pictures of runs: what they show is what the runs say, and each is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import maml
from maml.config import Config
from maml.errors import UserError
from maml.plots import __main__ as command
from maml.plots import adaptation, curves, style, tasks
from maml.run import reading
from tests.runs import glyphs, result, sinusoid, train

BRIEF: dict[str, Any] = {"iterations": 4, "eval_every": 2, "test_tasks": 8}


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs: a method of two seeds, another rate, another learner, a regression."""
    folder = tmp_path_factory.mktemp("runs")
    metasgd = glyphs(learner="metasgd", inner_steps=2, preset="metasgd-glyphs-5way-1shot", **BRIEF)
    made: dict[str, Config] = {
        "a-0": glyphs(**BRIEF), "a-1": glyphs(seed=1, **BRIEF),
        "b-0": glyphs(inner_lr=0.1, **BRIEF), "c-0": metasgd, "d-0": sinusoid(**BRIEF),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "maml.training.testing.draw_curves", lambda run_dir, *rest: run_dir / "curves.png"
        )
        for name, config in made.items():
            train(config, folder / name)
    return folder


def drawn(folder: Path) -> set[str]:
    """Return the names of the pictures in a folder, each of which has something on it, twice."""
    for path in folder.glob("*.png"):
        assert np.asarray(Image.open(path).convert("L")).std() > 5, path
        assert path.with_name(f"{path.name[:-4]}.pdf").read_bytes().startswith(b"%PDF")
    return {path.name[:-4] for path in folder.glob("*.png")}


def test_all_that_there_is_is_drawn(there: Path, tmp_path: Path, capsys: Any) -> None:
    paths = [str(there / name) for name in ("a-0", "a-1", "b-0")]
    assert command.main([*paths, "--folder", str(tmp_path / "two"), "--tasks", "4"]) == 0
    panels = {"panel-inner_lr=0.4", "panel-inner_lr=0.1"}
    assert drawn(tmp_path / "two") == {"curves", "steps", *panels}
    assert f"4 pictures of 3 runs, each as PNG and PDF: {tmp_path}" in capsys.readouterr().out
    assert command.main([str(there / "d-0"), "--tasks", "4"]) == 0
    assert drawn(there / "d-0" / "plots") == {"curves", "steps"}
    said = capsys.readouterr()
    assert said.out.startswith("2 pictures of 1 run, each as PNG and PDF: ")
    # Nothing is said of a picture that these runs have nothing for.
    lines = [line for line in said.err.splitlines() if line.startswith("drawn")]
    assert lines == ["drawn: curves", "drawn: steps"]


def test_runs_that_differ_in_their_seed_alone_are_one_method(there: Path) -> None:
    found = reading.methods(reading.find([there / name for name in ("a-0", "a-1", "b-0")]))
    assert {name: [run.path.name for run in each] for name, each in found.items()} == {
        "inner_lr=0.4": ["a-0", "a-1"], "inner_lr=0.1": ["b-0"]
    }  # fmt: skip
    # Learners differ in more than their name, which says it all.
    found = reading.methods(reading.find([there / "a-0", there / "c-0"]))
    assert list(found) == ["maml", "metasgd"]
    assert len(reading.find([there])) == 5
    with pytest.raises(UserError, match="no run directory"):
        reading.find([there / "a-0" / "checkpoints"])


def test_scores_by_step_are_the_evaluation_s(there: Path) -> None:
    """After as many steps as the run was tested with, to the bit."""
    model = maml.load(there / "a-0")
    metric, (none, one) = adaptation.scores_by_step(model, [0, 1], 8)
    assert metric == "accuracy" and none != one
    assert np.mean(one) == pytest.approx(result(there / "a-0")["accuracy"], abs=1e-7)
    axis = adaptation.by_step({"maml": [model, maml.load(there / "a-1")]}, 8).axes[0]
    each = [result(there / name)["accuracy"] for name in ("a-0", "a-1")]
    assert axis.lines[0].get_ydata()[1] == pytest.approx(np.mean(each), abs=1e-7)


def test_curves_are_means_over_seeds(there: Path) -> None:
    two = reading.find([there / "a-0", there / "a-1"])
    mean, *each = curves.learning_curves({"maml": two}).axes[0].lines
    values = [[*reading.history(run.rows, "validation/accuracy").values()] for run in two]
    assert mean.get_xdata().tolist() == [2, 4]
    assert mean.get_ydata() == pytest.approx(np.mean(values, 0))
    assert [line.get_ydata().tolist() for line in each] == values


def test_a_panel_s_frames_say_what_was_right(there: Path) -> None:
    model = maml.load(there / "a-0")
    figure = tasks.panel(model, 3)
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    task, _ = tasks.task_of(model, 3)
    answers = model.learner.predictions(model.meta_params, task, 1).transductive[0].argmax(-1)
    right = int((answers == task.query_y[0]).sum())
    assert len(titles) == len(task.query_y[0])
    assert titles.count("✓") == right
    assert f"{100 * right / len(titles):.0f} %" in figure.get_suptitle()
    assert tasks.panel(maml.load(there / "d-0")) is None


def test_smoothing_does_not_lag() -> None:
    """A straight line stays where it is, and a step stays in its place."""
    line = [float(i) for i in range(300)]
    assert style.smooth(line) == pytest.approx(line)
    step = [0.0] * 150 + [1.0] * 150
    assert style.smooth(step)[149] + style.smooth(step)[150] == pytest.approx(1.0)
    assert style.smooth([2.0]) == [2.0]


def test_bad_requests(there: Path) -> None:
    for flags, says in (
        (["/no/where"], "/no/where: no run"),
        ([str(there), "--tasks", "1"], "--t"),
    ):
        with pytest.raises(UserError, match=says):
            command.main(flags)
