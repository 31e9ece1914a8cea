"""Comparisons: which runs are compared, on which tasks, and what is said."""

import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from maml.errors import UserError
from maml.evaluation import intervals
from maml.run import directory, reading
from maml.run.files import write_tasks
from maml.studies import arms, compare
from maml.studies.sweeping import file
from maml.studies.sweeping.sweep import Sweep
from tests.runs import glyphs
from tests.studies import sweeps

NAMES = ("loss", "accuracy", "non_transductive_loss", "non_transductive_accuracy")


def made(folder: Path, edge: float = 0.0, tasks: int = 60, **values: Any) -> Path:
    """Write a run's configuration and the scores of its test tasks, which its seed decides."""
    config = glyphs(**values)
    folder.mkdir(parents=True)
    directory.write_config(folder, config)
    rng = np.random.default_rng(config.seed)
    accuracy = np.clip(rng.normal(0.6 + edge, 0.1, tasks), 0, 1)
    rows = [[1 - a, a, 1.1 - a, a - 0.1] for a in accuracy.tolist()]
    write_tasks(folder, "test", config.seed, NAMES, rows)
    return folder


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Two learning rates of three seeds, as a sweep leaves them."""
    for seed in range(3):
        made(tmp_path / "trials" / f"{seed}", 0.05 + seed / 1000, inner_lr=0.4, seed=seed)
        made(tmp_path / "trials" / f"{3 + seed}", inner_lr=0.1, seed=seed)
    return tmp_path


def test_a_report_says_what_the_statistics_say(
    there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [f"{there}:inner_lr=1e-1,adapt=None,compile=off", f"{there}:inner-lr=0.4"]
    assert compare.main([*sides, "--folder", str(tmp_path / "said")]) == 0
    said = capsys.readouterr().out
    report = (tmp_path / "said" / "report.md").read_text()
    assert said.partition("\nreport ")[0].strip() in report
    first, second = (arms.read(side, None) for side in sides)
    a, b = arms.paired(second, first)
    assert a.shape == (3, 60)
    found = intervals.difference(a, b)
    row = next(
        line for line in said.splitlines() if line.startswith(f"| {sides[1]}") and "+" in line
    )
    mean, low, high = (100 * each for each in found.runs[:3])
    assert f"{mean:+.2f}" in row and f"{low:+.2f} to {high:+.2f}" in row
    assert row.rstrip(" |").endswith("holds over seeds")
    # Intervals of the means have the same definition.
    low, high = stats.t.interval(0.95, 179, a.mean(), stats.sem(a, axis=None))
    assert f"{100 * a.mean():.2f} ± {50 * (high - low):.2f} %" in said
    for name in ("differences.png", "differences.pdf"):
        assert (tmp_path / "said" / name).stat().st_size > 1000
    assert "![differences](differences.png)" in report
    with open(tmp_path / "said" / "means.csv", newline="") as file:
        means = [*csv.DictReader(file)]
    assert float(means[1]["accuracy"]) == pytest.approx(a.mean()) and means[1]["seeds"] == "3"
    with open(tmp_path / "said" / "differences.csv", newline="") as file:
        (shift,) = csv.DictReader(file)
    both = found.runs.mean, found.over_seeds.low  # type: ignore[union-attr]
    assert [float(shift[name]) for name in ("mean", "low_over_seeds")] == pytest.approx(both)
    table = (tmp_path / "said" / "differences.tex").read_text()
    assert rf"{mean:+.2f} & " in table and table.count(r" \\") == 2 and r"a\_report\_says" in table
    # With one run on each side, nothing is said about other seeds.
    trials = there / "trials"
    assert compare.main([str(trials / "3"), str(trials / "0"), str(trials / "0/../0")]) == 0
    said = capsys.readouterr().out
    assert said.count("holds for these runs; over seeds not shown (one seed)") == 2
    assert "Holm's, for 2 comparisons" in said


def test_seeds_that_tie_tell_nothing_of_others(tmp_path: Path, capsys: Any) -> None:
    """Each seed may begin from its own weights; a seed that was not tested is said."""
    for seed in range(2):
        init = str(tmp_path / "base" / str(seed))
        made(tmp_path / "base" / str(seed), tasks=60 - 20 * seed, seed=seed)
        made(tmp_path / "then" / str(seed), 0.05, tasks=60 - 20 * seed, seed=seed, init=init)
    sides = [str(tmp_path / name) for name in ("base", "then")]
    (made(tmp_path / "then" / "2", seed=2) / "test_tasks.csv").unlink()
    assert compare.main(sides) == 0
    said, beside = capsys.readouterr()
    assert "| +5.00 | tied       | < 0.001 | tied       | 0.500 |" in said and "sign test" in said
    assert "over seeds not shown (2 seeds)" in said and "| 2     | 40–60      |" in said
    assert f"left out: {tmp_path / 'then' / '2'}: it was not tested" in beside
    other = str(made(tmp_path / "other" / "0", init=str(tmp_path / "apart" / "0")).parent)
    methods = reading.methods(reading.find([*map(Path, sides), Path(other)]))
    assert [len(runs) for runs in methods.values()] == [3, 2, 1]


def test_a_run_that_went_on_after_its_test_has_none(there: Path) -> None:
    """Its test scores are those of an earlier model, perhaps with other flags."""
    run_dir = there / "trials/0"
    directory.write_status(run_dir, "finished", 3)
    assert arms.read(str(run_dir), None).scores
    directory.write_status(run_dir, "failed", 5)
    with pytest.raises(UserError, match=rf"{run_dir}: went on after the test"):
        arms.read(str(run_dir), None)


def test_skewed_tasks_are_warned_of(tmp_path: Path, capsys: Any) -> None:
    """However many they are: near 100 %, a few tasks decide the mean."""
    sides = [str(made(tmp_path / name)) for name in ("skewed", "even")]
    for side, missed in zip(sides, (8, 60), strict=True):
        rows = [[0.1, 0.8 if task < missed else 1.0, 0.1, 0.9] for task in range(600)]
        write_tasks(Path(side), "test", 0, NAMES, rows)
    assert compare.main(sides) == 0
    said = capsys.readouterr().out
    assert f"Too skewed for ±: {sides[0]}. A few" in said
    assert "| 99.73 ± 0.18 %         | 99.43 % to 99.92 % |" in said
    # Bounds of the metric are bounds of the interval.
    write_tasks(Path(sides[0]), "test", 0, NAMES, [[0.1, 0.8, 0.1, 1], *[[0.1, 1, 0.1, 1]] * 9])
    assert compare.main(sides) == 0
    assert " % to 100.00 % |" in capsys.readouterr().out


def test_what_makes_two_scores_differ_is_said(tmp_path: Path, capsys: Any) -> None:
    """The steps of the tests, and losses that learners state themselves."""
    values: list[dict[str, Any]] = [{}, {"eval_inner_steps": 5}, {"learner": "protonet"}]
    sides = [str(made(tmp_path / str(i), **each)) for i, each in enumerate(values)]
    own = str(made(tmp_path / "own"))
    config = Path(own, "config.yaml")
    config.write_text(config.read_text().replace("learner: maml\n", "learner: mine:Learner\n"))
    assert compare.main([*sides, "--metric", "loss"]) == 0
    said = capsys.readouterr().out
    rows = [line.split("|") for line in said.splitlines()[2:5]]
    assert [row[-2].strip() for row in rows] == ["1", "5", "–"] and "loss of its own" not in said
    assert compare.main([sides[0], own]) == 0
    said = capsys.readouterr().out
    assert "loss of its own" not in said
    assert compare.main([sides[0], own, "--metric", "loss"]) == 0
    assert "may state a loss of its own (maml, mine:Learner);" in capsys.readouterr().out


def test_the_headline_is_each_run_s_own_unless_a_metric_is_named(tmp_path: Path) -> None:
    made(tmp_path / "a", transductive=True)
    made(tmp_path / "b", transductive=False)
    first, second = (arms.read(str(tmp_path / name), None) for name in "ab")
    a, b = arms.paired(first, second)
    assert a - b == pytest.approx(0.1)
    first, second = (arms.read(str(tmp_path / name), "loss") for name in "ab")
    a, b = arms.paired(first, second)
    assert (a == b).all()


def test_tasks_are_paired_by_address(tmp_path: Path) -> None:
    """Runs with different tasks or seeds are compared on those that both have."""
    a = arms.arm_of("a", reading.find([made(tmp_path / "a", 0.1)]), None)
    b = arms.arm_of("b", reading.find([made(tmp_path / "b", tasks=60)]), None)
    short = {seed: dict(list(of.items())[10:40]) for seed, of in b.scores.items()}
    first, second = arms.paired(a, dataclasses.replace(b, scores=short | {7: {0: 0.5}}))
    assert first.shape == (1, 30)
    assert first - second == pytest.approx(0.1, abs=0.05)


def test_arguments_of_a_component_tell_runs_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    networks = ["torch.nn:Linear(bias=True, dtype=None)", "torch.nn:Linear(bias=False, dtype=None)"]
    for seed in range(2):
        for i, network in enumerate(networks):
            made(tmp_path / "trials" / f"{i}-{seed}", network=network, inner_lr=0.1, seed=seed)
    for network in networks:
        side = f"{tmp_path}:inner_lr=0.1,network={network},shots=5"
        with pytest.raises(UserError, match=r"no run in .* has these values"):
            arms.read(side, None)
        arm = arms.read(side.replace("=5", f"={glyphs().shots}"), None)
        assert arm.first.config.network == network and arm.scores.keys() == {0, 1}
    sides = [f"{tmp_path}:network={network}" for network in networks]
    assert compare.main(sides) == 0
    said = capsys.readouterr().out
    assert all(f"| {side} " in said for side in sides)
    with pytest.raises(UserError, match="its runs differ in network: name one"):
        arms.read(str(tmp_path), None)


def test_values_may_be_those_of_a_sweep_or_have_commas(tmp_path: Path) -> None:
    parameters = {"inner_lr": {"values": ["1e-1", "4e-1"]}, "my-part": {"value": "a"}}  # texts
    sweep = Sweep(tmp_path / "s", file.read(sweeps.written(tmp_path, parameters=parameters)))
    for inner_lr, adapt in ((0.1, "*,@norm=0"), (0.4, "@head")):
        trial = sweep.take(None)
        assert trial is not None
        made(trial.run_dir, inner_lr=inner_lr, adapt=adapt)
        sweep.end(trial, 0.5)
    for values in ("inner_lr=0.1", "inner-lr=1e-1,my-part=a", "adapt=*,@norm=0,my_part=a"):
        assert arms.read(f"{sweep.folder}:{values}", None).first.config.inner_lr == 0.1
    own = made(tmp_path / "at 12:lr=1")  # a folder whose name looks so
    assert arms.read(str(own), None).first.path == own
    with pytest.raises(UserError, match=r"these values: inner_lr=.0\.4,part=a."):
        arms.read(f"{sweep.folder}:inner_lr=0.4,part=a", None)


@pytest.mark.parametrize(
    ("sides", "says"),
    [
        (["{}/trials/0", "{}/trials/0"], "named twice"),
        (["{}/trials/0", "{}/nowhere"], "nowhere: no run directory"),
        (["{}/trials/0", "~no-such/x"], "~no-such/x: no run directory"),
        (["{}/trials/0", "{}"], "differ in inner_lr: name one, as in .*:inner_lr=0.1"),
        (["{}/trials/0", "{}:inner=0.7"], "no run has a value named inner"),
        (["{}/trials/0", "{}/trials/1"], r"no seed in common.*\[1\] and \[0\]"),
        (
            ["{}/trials/0", "{}/shots"],
            "not tested on the same tasks: shots is 5 for the first and 1 for",
        ),
        (["{}/trials/0", "{}/batches"], "they are batches for the first and episodes for"),
        (["{}/trials/0", "{}/loss"], "/loss is scored by loss and .*/0 by accuracy: give --metric"),
        (["{}/trials/0", "{}/empty"], "/empty/0/test_tasks.csv: it has no rows"),
        (["{}/trials/0", "{}/twice"], "two runs have seed 0"),
        (["{}/mine/0", "{}/mine/1"], "not tested on the same tasks: their images differ"),
        (["{}/mine", "{}/mine/1"], "its runs were not all tested on the same tasks: their images"),
        (["{}/trials/0", "{}/trials/3", "--metric", "f1"], "no f1; it has loss, accuracy"),
    ],
)
def test_what_cannot_be_compared_is_one_line(sides: list[str], says: str, there: Path) -> None:
    made(there / "shots" / "0", shots=5)
    made(there / "batches" / "0", learner="supervised")
    write_tasks(made(there / "loss" / "0"), "test", 0, NAMES[:1], [[0.5], [0.6]])
    write_tasks(made(there / "empty" / "0"), "test", 0, NAMES, [])
    made(there / "twice" / "0")
    made(there / "twice" / "1")
    # Runs with a user's own images. Their results say which images these were.
    for i, (root, images) in enumerate([("here", "1"), ("here", "2"), ("there", "1")]):
        run_dir = made(there / "mine" / str(i), data="folder", data_root=root, inner_lr=0.1)
        result = {"tasks": 1, "transductive": True, "test_images": images}
        (run_dir / "result.json").write_text(json.dumps(result))
    a, b = (arms.read(str(there / "mine" / str(i)), None) for i in (0, 2))
    assert len(arms.paired(a, b)[0]) == 1  # a folder that has moved is the same
    with pytest.raises(UserError, match=says) as caught:
        compare.main([side.format(there) for side in sides])
    assert "\n" not in str(caught.value) and not re.search(r"\bNone\b", str(caught.value))
