"""A sweep's file means what it means to W&B: its own package is the oracle."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.sweeping import choosing, command, early, file
from launch.sweeping.choosing import Chosen, Past, _place
from launch.sweeping.parameters import KINDS, read_parameter, same
from maml.errors import UserError
from tests.launch.sweeps import written
from tests.launching import REPO

READY = sorted((REPO / "launch" / "sweeps").glob("*.yaml"))


def run_to_the_end(described: file.SweepFile, most: int = 1000) -> list[dict[str, Any]]:
    """Return the points of a sweep, one worker alone having run it."""
    past: list[Past] = []
    while len(past) < most:
        chosen = choosing.next_point(described, past, "me")
        if chosen is None:
            break
        past.append(Past(chosen, random.Random(len(past)).random(), runs=False))
    return [trial.chosen.point for trial in past]


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_ready_files_are_theirs_and_ours(path: Path) -> None:
    """W&B accepts each as it is, and its flags are legal at every point."""
    sweeps = pytest.importorskip("sweeps", reason="W&B's package needs Python below 3.13")
    said = yaml.safe_load(path.read_text())
    assert sweeps.schema_violations_from_proposed_config(said) == []
    described = file.read(path)
    assert described.said == said
    command.check(described)
    assert described.method == "grid", "its points are compared below"
    assert [same_point(p) for p in run_to_the_end(described)] == [
        same_point(p) for p in theirs(said)
    ]


def theirs(said: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the points that W&B's own package goes through, in its order."""
    sweeps = pytest.importorskip("sweeps", reason="W&B's package needs Python below 3.13")
    runs: list[Any] = []
    while (suggested := sweeps.next_run(said, runs)) is not None:
        suggested.state = "finished"
        runs.append(suggested)
    return [{name: value["value"] for name, value in run.config.items()} for run in runs]


def same_point(point: dict[str, Any]) -> dict[str, str]:
    return {name: same(value) for name, value in point.items()}


def test_a_grid_is_theirs_point_by_point(tmp_path: Path) -> None:
    said = {
        "method": "grid",
        "parameters": {
            "seed": {"min": 0, "max": 2},
            "inner_lr": {"values": [0.1, 0.4, 0.4, 1]},
            "order": {"values": ["first", "second"]},
            "meta_lr": {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 0.25},
            "transductive": {"values": [True, False]},
            "iterations": {"value": 40},
        },
    }
    points = run_to_the_end(file.read(written(tmp_path, **said)))
    assert len(points) == 3 * 3 * 2 * 4 * 2 == file.read(written(tmp_path, **said)).size
    assert [same_point(point) for point in points] == [same_point(p) for p in theirs(said)]


DRAWN = {
    "constant": {"value": 3},
    "categorical": {"values": [1, "two", None]},
    "categorical_w_probabilities": {"values": [1, 2], "probabilities": [0.3, 0.7]},
    "int_uniform": {"min": 2, "max": 9},
    "uniform": {"min": -1.5, "max": 3.0},
    "q_uniform": {"min": 0, "max": 10, "q": 3},
    "log_uniform": {"min": -3.0, "max": 0.5},
    "log_uniform_values": {"min": 0.001, "max": 1.0},
    "q_log_uniform": {"min": 0.0, "max": 4.0, "q": 0.5},
    "q_log_uniform_values": {"min": 1, "max": 100, "q": 10},
    "inv_log_uniform": {"min": -3.0, "max": 0.5},
    "inv_log_uniform_values": {"min": 0.001, "max": 1.0},
    "normal": {"mu": 1.0, "sigma": 2.0},
    "q_normal": {"mu": 1.0, "sigma": 2.0, "q": 0.5},
    "log_normal": {},
    "q_log_normal": {"sigma": 2.0, "q": 1},
    "beta": {"a": 2, "b": 3},
    "q_beta": {"a": 2, "b": 3, "q": 0.1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_are_theirs(kind: str) -> None:
    """Quantile by quantile; what is drawn fits the file that it was drawn from."""
    params = pytest.importorskip("sweeps.params", reason="W&B's package needs Python below 3.13")
    said = {"distribution": kind, **DRAWN[kind]}
    other = params.HyperParameter("x", said)
    ours = read_parameter("a file", "x", said)
    for u in (0.013, 0.26, 0.51, 0.77, 0.99):
        value, oracle = ours.at(u), other.ppf(u)
        oracle = oracle[0] if isinstance(oracle, list) else oracle
        if isinstance(value, str | None):
            assert value == oracle
        else:
            assert value == pytest.approx(oracle, rel=1e-9, abs=1e-12)
        assert ours.may_be(value)
        record = ours.recorded(value)
        assert same(record.to_external_repr(record.to_internal_repr(value))) == same(value)


def test_random_never_repeats_a_point_and_ends(tmp_path: Path) -> None:
    parameters = {"seed": {"min": 0, "max": 9}, "inner_lr": {"values": [0.1, 0.2, 0.3]}}
    described = file.read(written(tmp_path, method="random", parameters=parameters))
    points = run_to_the_end(described)
    assert len(points) == 30 == len({choosing.key(point) for point in points})
    endless = {"inner_lr": {"distribution": "log_uniform_values", "min": 0.01, "max": 1}}
    described = file.read(written(tmp_path, method="random", parameters=endless))
    drawn = [point["inner_lr"] for point in run_to_the_end(described, 200)]
    assert min(drawn) < 0.02 and max(drawn) > 0.5 and described.size is None
    # Uniform in the logarithm: half lie below the geometric mean of the ends.
    assert 0.4 < sum(value < 0.1 for value in drawn) / 200 < 0.6


def test_bayes_finds_what_random_search_does_not(tmp_path: Path) -> None:
    """The best of 40 points for a bowl in two dimensions and a choice, over four identities."""
    parameters = {
        "inner_lr": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e2},
        "meta_lr": {"min": 0.0, "max": 1.0},
        "order": {"values": ["first", "second"]},
    }

    def loss(point: dict[str, Any]) -> float:
        bowl = (math.log10(point["inner_lr"]) + 1) ** 2 + 10 * (point["meta_lr"] - 0.3) ** 2
        return bowl + (point["order"] == "first")

    best: dict[str, list[float]] = {"bayes": [], "random": []}
    for method, found in best.items():
        path = written(
            tmp_path, method=method, parameters=parameters, metric={"name": "validation/loss"}
        )
        described = file.read(path)
        for identity in "abcd":
            past: list[Past] = []
            for _ in range(40):
                chosen = choosing.next_point(described, past, identity)
                assert chosen is not None
                # Two others run meanwhile: they have no value yet.
                past.append(Past(chosen, loss(chosen.point), runs=False))
            found.append(min(trial.value for trial in past if trial.value is not None))
    assert sum(best["bayes"]) < 0.5 * sum(best["random"])


def test_bayes_keeps_away_from_what_runs(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        method="bayes",
        metric={"name": "validation/accuracy", "goal": "maximize"},
        parameters={"order": {"values": ["first", "second"]}, "seed": {"values": [0, 1, 2]}},
    )
    described, past = file.read(path), []
    for _ in range(6):
        chosen = choosing.next_point(described, past, "me")
        assert chosen is not None
        past.append(Past(chosen, None, runs=True))
    assert len({choosing.key(trial.chosen.point) for trial in past}) == 6
    assert choosing.next_point(described, past, "me") is None


@pytest.mark.parametrize("strict", [{"strict": True}, {"strict": False}, {}], ids=str)
@pytest.mark.parametrize("goal", ["minimize", "maximize"])
@pytest.mark.parametrize("rule", [{"min_iter": 1, "eta": 2}, {"max_iter": 9, "s": 2, "eta": 3}])
def test_trials_are_ended_as_theirs_are(
    rule: dict[str, Any], goal: str, strict: dict[str, bool], tmp_path: Path
) -> None:
    sweeps = pytest.importorskip("sweeps", reason="W&B's package needs Python below 3.13")
    said = {
        "method": "random",
        "metric": {"name": "validation/loss", "goal": goal},
        "early_terminate": {"type": "hyperband", **strict, **rule},
        "parameters": {"inner_lr": {"min": 0.0, "max": 1.0}},
    }
    described = file.read(written(tmp_path, **said))
    assert described.early is not None and described.metric is not None
    draw = random.Random(f"{rule} {goal}")
    for _ in range(20):
        histories = [[draw.random() for _ in range(draw.randint(1, 9))] for _ in range(8)]
        runs = [
            sweeps.SweepRun(
                name=str(i), state="running", history=[{"validation/loss": v} for v in history]
            )
            for i, history in enumerate(histories)
        ]
        ended = {int(run.name) for run in sweeps.stop_runs(said, runs)}
        own = [[-described.metric.sign * v for v in history] for history in histories]
        at = {
            band: [history[band - 1] for history in own if len(history) >= band]
            for band in described.early.bands
        }
        assert ended == {
            i for i, history in enumerate(own) if early.should_end(described.early, history, at)
        }


def test_commands_are_spelled_as_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    monkeypatch.setenv("A_PRESET", "maml-glyphs-5way-1shot")
    point = {"inner_lr": 0.4, "transductive": False, "order": "first"}
    theirs = create_sweep_command_args(
        {"args": {name: {"value": value} for name, value in point.items()}}
    )
    parameters = {name: {"value": value} for name, value in point.items()}
    for macro in (
        "args", "args_no_hyphens", "args_no_equals", "args_no_boolean_flags", "args_json",
        "args_append_hydra", "args_override_hydra",
    ):  # fmt: skip
        words = ["${program}", "${envvar:A_PRESET}", f"${{{macro}}}"]
        described = file.read(written(tmp_path, parameters=parameters, command=words), trust=True)
        found = command.command_of(described, point, None)
        assert found == ["train_maml.py", create_sweep_command(words[1:2])[0], *theirs[macro]]
    found = command.command_of(described, point, Path("there"))
    assert found[-1] == "++run_dir=there"


def test_the_program_is_here_or_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep over components of a user's own is begun in their folder."""
    described = file.read(written(tmp_path, parameters={"seed": {"value": 0}}), trust=True)
    monkeypatch.chdir(tmp_path)
    assert command.command_of(described, {}, None)[0] == str(REPO / "train_maml.py")
    (tmp_path / "train_maml.py").touch()
    assert command.command_of(described, {}, None)[0] == "train_maml.py"


def test_arguments_of_a_component_are_values_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/sweeps.md has it, of the documented example; a mistyped one is told at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (page,) = re.findall(r"^  (network: .*)$", (REPO / "docs" / "sweeps.md").read_text(), re.M)
    source = (REPO / "docs" / "examples" / "my_network.py").read_text()
    (tmp_path / "my_swept_network.py").write_text(source)
    parameters = yaml.safe_load(page.replace("my_network", "my_swept_network"))
    described = file.read(written(tmp_path, parameters=parameters), trust=True)
    command.check(described)
    asked = [command.command_of(described, point, None)[-1] for point in described.grid()]
    spelled = [f"my_swept_network:Wide(width={width})" for width in (16, 32)]
    assert asked == [f"--network={network}" for network in spelled]
    wrong = {"network": {"values": [spelled[0], "my_swept_network:Wide(widht=16)"]}}
    with pytest.raises(UserError, match=r"with network=.*no argument widht; did you mean width"):
        command.check(file.read(written(tmp_path, parameters=wrong), trust=True))


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"method": "gird"}, "method: 'gird' is not one of grid, random, bayes"),
        ({"parameters": {}}, "parameters: there are none"),
        ({"nonsense": 1}, "nonsense: not known here"),
        ({"parameters": {"seed": 3}}, "seed: must be a mapping"),
        ({"parameters": {"seed": {"values": []}}}, "seed: values: must be a list"),
        ({"parameters": {"seed": {"value": [1]}}}, "seed: .* no value of a flag"),
        ({"parameters": {"seed": {"min": 1}}}, "seed: uniform needs max"),
        ({"parameters": {"seed": {"min": 2, "max": 1}}}, "seed: min 2 must be below max 1"),
        ({"parameters": {"seed": {"distribution": "even"}}}, "unknown distribution 'even'"),
        ({"parameters": {"inner_lr": {"min": 0.0, "max": 1.0}}}, "uniform has no grid"),
        ({"command": ["python"]}, r"command: has no \$\{args\}"),
        ({"command": ["${progam}", "${args}"]}, r"command: \$\{progam\} is not known"),
        ({"program": None}, "program: .* needs one"),
        ({"program": "nowhere.py"}, "program: there is no nowhere.py here"),
        ({"method": "bayes"}, "metric: method: bayes needs one"),
        ({"metric": {"name": "accuracy"}}, "'accuracy' must begin with train/"),
        ({"run_cap": 0}, "run_cap: 0"),
        ({"early_terminate": {"type": "median"}}, "type: must be hyperband"),
        ({"parameters": {"inner_lrr": {"value": 1}}}, "--inner-lrr.*did you mean --inner-lr"),
        ({"parameters": {"inner_lr": {"values": [0.4, -1]}}}, "with inner_lr=-1: --inner-lr"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_one_line(said: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = written(tmp_path, **({"parameters": {"seed": {"values": [0, 1]}}} | said))
    with pytest.raises(UserError, match=f"{path}: .*{says}") as caught:
        command.check(file.read(path))
    assert "\n" not in str(caught.value)


def test_yaml_that_is_none_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    for text, says in (("{", "not YAML"), ("- 1", "not a sweep"), (None, "No such file")):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=f"{path}: .*{says}") as caught:
            file.read(path)
        assert "\n" not in str(caught.value)
    # A number, though YAML 1.1 has it a word.
    path = written(tmp_path, parameters={"meta_lr": {"value": 1}})
    path.write_text(path.read_text().replace("value: 1", "value: 1e-3"))
    assert file.read(path).parameters[0].values == [0.001]


def test_chosen_points_say_where_they_lie() -> None:
    """What Bayesian search needs of a point that was listed rather than drawn."""
    parameter = read_parameter("a file", "seed", {"values": [5, 7, 9]})
    for value in (5, 7, 9):
        quantile = choosing._quantile(parameter, {"seed": value})
        assert parameter.at(quantile) == value
    assert Chosen({"seed": 5}, {}).point == {"seed": 5}


def test_what_is_written_reads_as_the_same(tmp_path: Path) -> None:
    """Texts that look like numbers, and dates, which no flag is."""
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "method: grid\nprogram: train_maml.py\ndescription: 2026-11-22\n"
        "parameters: {seed: {values: ['1e-3', 1e-3]}}\n"
        "command: ['${program}', maml-glyphs-5way-1shot, '--meta-lr', '1e-3', '${args}']\n"
    )
    said = file.read(path).said
    assert said["description"] == "2026-11-22"
    assert said["parameters"]["seed"]["values"] == ["1e-3", 0.001]
    path.write_text(file.written(said))
    assert file.read(path).said == said


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ({"min": 0.0, "max": 1.0}, {"min": 0.0, "max": 10.0}),
        (
            {"distribution": "log_uniform_values", "min": 1e-3, "max": 1e-1},
            {"distribution": "log_uniform_values", "min": 1e-5, "max": 1.0},
        ),
        (
            {"distribution": "inv_log_uniform", "min": 1.0, "max": 2.0},
            {"distribution": "inv_log_uniform", "min": 0.0, "max": 5.0},
        ),
    ],
)
def test_a_point_keeps_its_place_in_wider_bounds(
    narrow: dict[str, Any], wide: dict[str, Any]
) -> None:
    then, now = (read_parameter("a file", "lr", said) for said in (narrow, wide))
    for u in (0.1, 0.5, 0.9):
        chosen = Chosen({"lr": then.at(u)}, {"lr": u})
        assert now.at(_place(now, chosen)) == pytest.approx(then.at(u), rel=1e-6)
        assert _place(then, chosen) == u
