"""Pictures of runs: each is drawn, and shows what the run has written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import maml
from maml.config import Config
from maml.config.fields import with_values
from maml.errors import UserError
from maml.learners.maml import MAML
from maml.plots import __main__ as command
from maml.plots import curves, style, tasks
from maml.run import reading
from maml.run.reading import Run
from maml.worker import Worker
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
        patch.setattr("maml.training.testing.draw_curves", lambda run_dir, *rest: run_dir / "none")
        for name, config in made.items():
            train(config, folder / name)
    return folder


def drawn(folder: Path) -> set[str]:
    """Return the names of the pictures in a folder. Each must show something, as PNG and PDF."""
    for path in folder.glob("*.png"):
        assert np.asarray(Image.open(path).convert("L")).std() > 5, path
        pdf = path.with_suffix(".pdf").read_bytes()
        assert pdf.startswith(b"%PDF") and b"/CIDFontType2" in pdf and b"/Type3" not in pdf
        assert b"CreationDate" not in pdf
    return {path.name[:-4] for path in folder.glob("*.png")}


def test_all_that_there_is_is_drawn(there: Path, tmp_path: Path, capsys: Any) -> None:
    paths = [str(there / name) for name in ("a-0", "a-1", "b-0")]
    assert command.main([*paths, "--folder", str(tmp_path / "two"), "--tasks", "4"]) == 0
    panels = {"panel-1-inner_lr=0.4", "panel-2-inner_lr=0.1"}
    assert drawn(tmp_path / "two") == {"curves", "steps", *panels}
    assert f"4 pictures of 3 runs, each as PNG and PDF: {tmp_path}" in capsys.readouterr().out
    assert command.main([str(there / "d-0"), "--tasks", "4"]) == 0
    assert drawn(there / "d-0" / "plots") == {"curves", "steps"}
    said = capsys.readouterr()
    assert said.out.startswith("2 pictures of 1 run, each as PNG and PDF: ")
    # No line names a picture that these runs cannot have.
    lines = [line for line in said.err.splitlines() if line.startswith("drawn")]
    assert lines == ["drawn: curves", "drawn: steps"]


def test_runs_that_differ_in_their_seed_alone_are_one_method(there: Path, capsys: Any) -> None:
    found = reading.methods(reading.find([there / name for name in ("a-0", "a-1", "b-0")]))
    assert {name: [run.path.name for run in each] for name, each in found.items()} == {
        "inner_lr=0.4": ["a-0", "a-1"], "inner_lr=0.1": ["b-0"]
    }  # fmt: skip
    # Learners differ in several fields. The learner's name is enough.
    found = reading.methods(reading.find([there / "a-0", there / "c-0"]))
    assert list(found) == ["maml", "metasgd"]
    assert len(reading.find([there])) == 5
    with pytest.raises(UserError, match="no run directory"):
        reading.find([there / "a-0" / "checkpoints"])
    runs = reading.find([there / name for name in ("a-0", "a-1", "b-0")])
    # There is one label for each method, or one for each run.
    assert [len(each) for each in command.named(["A", "B"], runs).values()] == [2, 1]
    assert list(command.named(["A", "B", "C"], runs)) == ["A", "B", "C"]
    with pytest.raises(UserError, match="--names: 1 name for 3 runs of 2 methods: "):
        command.named(["A"], runs)
    with pytest.raises(UserError, match="--names: one is given twice"):
        command.named(["A", "A"], runs)
    other = Run(Path("e"), with_values(runs[0].config, weight_decay=0.125, inner_steps=7))
    curves.learning_curves({"a": runs[:1], "other": [other]})
    assert "curves: other: no validation row that all its runs have" in capsys.readouterr().err
    assert [*reading.methods([runs[0], other])][1] == "inner_steps=7 weight_decay=0.125"


def test_what_is_shown_is_what_the_runs_say(there: Path, tmp_path: Path) -> None:
    """After as many steps as the test used, scores by step equal the test's, also if they draw."""
    own = {"network": "tests.strategies.test_own_networks:Everything", "dtype": "float64"}
    train(glyphs(**own, eval_draws=True, test_tasks=8), tmp_path)
    drawing = maml.load(tmp_path, trust=True)
    _, (drawn,) = curves.scores_by_step(drawing, [drawing.steps], 8)
    assert np.mean(drawn) == pytest.approx(result(tmp_path)["accuracy"], abs=1e-7)
    model = maml.load(there / "a-0")
    metric, (none, one) = curves.scores_by_step(model, [0, 1], 8)
    assert metric == "accuracy" and none != one
    assert np.mean(one) == pytest.approx(result(there / "a-0")["accuracy"], abs=1e-7)
    axis = curves.by_step({"maml": [model, maml.load(there / "a-1")]}, 8).axes[0]
    each = [result(there / name)["accuracy"] for name in ("a-0", "a-1")]
    assert axis.lines[0].get_ydata()[1] == pytest.approx(np.mean(each), abs=1e-7)
    # Curves are means over seeds, and each seed has its own line.
    two = reading.find([there / "a-0", there / "a-1"])
    mean, *lines = curves.learning_curves({"maml": two}).axes[0].lines
    values = [[*reading.history(run.rows, "validation/accuracy").values()] for run in two]
    assert mean.get_xdata().tolist() == [2, 4]
    assert mean.get_ydata() == pytest.approx(np.mean(values, 0))
    assert [line.get_ydata().tolist() for line in lines] == values


def test_legends_are_beside_axes_that_keep_their_size(there: Path, tmp_path: Path) -> None:
    """The number of lines and the length of their labels change nothing."""
    runs = reading.find([there / "a-0"])
    heights = []
    for count in (1, 9):
        figure = curves.learning_curves(
            {f"{i} $\\x$ {'name ' * 30}".strip(): runs for i in range(count)}
        )
        style.save(figure, tmp_path / "curves")
        (axis,) = figure.axes
        box, legend = axis.get_window_extent(), axis.get_legend().get_window_extent()
        whole = figure.bbox.expanded(1.001, 1.001)
        assert legend.y0 >= box.y1 and all(whole.contains(*end) for end in legend.get_points())
        assert len(axis.get_legend().get_texts()) == count
        heights.append(box.height)
    assert heights[1] == pytest.approx(heights[0], rel=0.05) and heights[0] > 0.5 * 4 * figure.dpi


def test_a_pdf_has_no_title_and_no_date(tmp_path: Path) -> None:
    made = []
    for title in ("a title", ""):
        figure, ((axis,),) = style.figure()
        figure.suptitle(title)
        # A name is no formula; the ticks of a log axis are.
        axis.text(0.5, 0.5, "$^$")
        axis.set(title="US$_$", xscale="log", xlim=(1, 100))
        axis.set_yticks([0.5], ["$^$"])
        png = style.save(figure, tmp_path / "picture")
        made.append((png.read_bytes(), png.with_suffix(".pdf").read_bytes()))
        assert axis.get_xticklabels()[1].get_parse_math()
    assert made[0][0] != made[1][0] and made[0][1] == made[1][1]


def test_a_panel_s_frames_say_what_was_right(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = maml.load(there / "a-0")
    figure = tasks.panel(model, 3)
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    task, _ = tasks.task_of(model, 3)
    answers = model.learner.predictions(model.meta_params, task, 1).transductive[0].argmax(-1)
    right = int((answers == task.query_y[0]).sum())
    assert len(titles) == len(task.query_y[0])
    assert titles.count("✓") == right
    assert f"{100 * right / len(titles):.0f} %" in figure.get_suptitle()
    listed = model.episodes("test").episodes.remade(lambda _: [task])  # as own data may
    with monkeypatch.context() as patch:
        patch.setattr(model, "episodes", lambda _: maml.Tasks(listed))
        patch.setattr(Worker, "evaluation", lambda *_: listed)
        assert tasks.panel(model, 3).get_suptitle() == figure.get_suptitle()
        assert curves.scores_by_step(model, [1], 1)[1] == [[pytest.approx(right / len(titles))]]
    waves = maml.load(there / "d-0")
    assert tasks.panel(waves) is None
    worker = Worker(waves.config, waves.device, trains=False)
    of = worker.evaluation("test")
    listed = of.remade(lambda ids: [of.tasks(ids)])
    drawn = []
    for many in (1, 2):
        real = MAML.predictions

        def several(*given: Any, many: int = many, real: Any = real) -> Any:
            return type(found := real(*given))(*(torch.cat([o] * many, dim=-1) for o in found))

        monkeypatch.setattr(MAML, "predictions", several)
        _, ((axis,),) = style.figure(1, 1, (5, 4))
        with monkeypatch.context() as patch:
            patch.setattr(worker, "evaluation", lambda _, listed=listed: listed)
            curves.adapted_curve(axis, worker, waves.meta_params)
        drawn.append((len(axis.lines), tasks.panel(model, 3) is None))
    assert drawn == [(5, False), (0, True)], "outputs are not one for each class or target"
