"""A sweep's file has the meaning that it has for W&B: W&B's own package is the oracle."""

import importlib
import itertools
import os
import random
import re
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.trial import FrozenTrial, TrialState, create_trial

from maml.config import cli
from maml.errors import UserError
from maml.studies.sweeping import command, file
from maml.studies.sweeping.file import KINDS
from maml.studies.sweeping.sweep import next_point
from tests.launching import REPO
from tests.studies.sweeps import written

READY = sorted((REPO / "launch" / "sweeps").glob("*.yaml"))


def tried(described: file.SweepFile, point: dict[str, Any], value: float | None) -> FrozenTrial:
    """Return a finished trial, or a running one if it has no value."""
    state = TrialState.RUNNING if value is None else TrialState.COMPLETE
    return create_trial(state=state, value=value, params=point, distributions=described.space)


def run_to_the_end(described: file.SweepFile, running: bool = False) -> list[dict[str, Any]]:
    past: list[FrozenTrial] = []
    while (point := next_point(described, past, "me")) is not None:
        value = None if running else random.Random(len(past)).random()
        past.append(tried(described, point, value))
    return [trial.params for trial in past]


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
    theirs: list[Any] = []
    while (suggested := sweeps.next_run(said, theirs)) is not None:
        suggested.state = "finished"
        theirs.append(suggested)
    points = [{name: value["value"] for name, value in run.config.items()} for run in theirs]
    assert run_to_the_end(described) == points


def test_flags_of_ready_programs_are_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every point of a file whose program is not train_maml.py, which then parses them."""
    monkeypatch.setattr("train_maml.main", cli.parse)
    each = [command.command_of(f, p, None) for f in map(file.read, READY) for p in f.grid()]
    for words in (words for words in each if words[2] == "-m"):
        program = importlib.import_module(words[3])
        getattr(program, "read", program.main)(words[4:])


DRAWN = {
    "constant": {"value": 3},
    "categorical": {"values": [1, 2]},
    "int_uniform": {"min": 2, "max": 9},
    "uniform": {"min": -1.5, "max": 3.0},
    "log_uniform_values": {"min": 0.001, "max": 1.0},
}


def test_a_grid_s_range_may_be_wide(tmp_path: Path) -> None:
    """Its points are made one by one, the last parameter fastest. Equal values are one."""
    parameters = {"order": {"values": ["first", "second"]}, "seed": {"min": -1, "max": 10**12}}
    described = file.read(written(tmp_path, parameters=parameters))
    points = itertools.islice(described.grid(), 3)
    assert [tuple(point[name] for name in parameters) for point in points] == [
        ("first", -1), ("first", 0), ("first", 1),
    ]  # fmt: skip
    assert described.size == 2 * (10**12 + 2)
    parameters = {"inner_lr": {"values": [1, 1.0, 2]}}
    assert file.read(written(tmp_path, parameters=parameters)).size == 2


def test_distributions_are_theirs(tmp_path: Path) -> None:
    """The right share of 300 draws lies below each of W&B's quantiles."""
    params = pytest.importorskip("sweeps.params", reason="W&B's package needs Python below 3.13")
    assert DRAWN.keys() == KINDS.keys()
    parameters = {kind: {"distribution": kind, **said} for kind, said in DRAWN.items()}
    described = file.read(written(tmp_path, method="random", parameters=parameters))
    sampler = optuna.samplers.RandomSampler(1)
    study = optuna.create_study(sampler=sampler)
    drawn = [study.ask(described.space).params for _ in range(300)]
    for kind, said in parameters.items():
        theirs = params.HyperParameter(kind, said)
        for u in (0.013, 0.26, 0.51, 0.77, 0.99):
            (edge,) = [theirs.ppf(u)] if not isinstance(theirs.ppf(u), list) else theirs.ppf(u)
            below = sum(point[kind] < edge for point in drawn) / 300
            up_to = sum(point[kind] <= edge * (1 + 1e-9) for point in drawn) / 300
            assert below - 0.1 < u < up_to + 0.1, (kind, u)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("method", ["random", "bayes"])
def test_no_point_comes_twice(method: str, running: bool, tmp_path: Path) -> None:
    parameters = {"seed": {"min": 0, "max": 9}, "inner_lr": {"values": [0.1, 0.2, 0.3]}}
    described = file.read(written(tmp_path, method=method, parameters=parameters))
    points = run_to_the_end(described, running)
    assert len(points) == 30 == len({repr(point) for point in points})


def test_commands_are_spelled_as_theirs(tmp_path: Path) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    point = {"inner_lr": 0.4, "transductive": False, "order": "first"}
    parameters = {name: {"value": value} for name, value in point.items()}
    theirs = create_sweep_command_args({"args": parameters})["args"]
    words = ["${program}", "maml-glyphs-5way-1shot", "${args}"]
    described = file.read(written(tmp_path, parameters=parameters, command=words), trust=True)
    assert command.command_of(described, point, None) == ["train_maml.py", words[1], *theirs]
    found = command.command_of(described, point, Path("there"))
    assert found[-1] == "--run_dir=there"


def test_arguments_of_a_component_are_values_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of docs/sweeps.md works. A mistyped argument is refused at once."""
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
    with pytest.raises(UserError, match="unexpected keyword argument 'widht'; it"):
        command.check(file.read(written(tmp_path, parameters=wrong), trust=True))


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"method": "gird"}, "method: 'gird' is not one of grid, random, bayes"),
        ({"parameters": {"seed": {"min": 1}}}, "seed: uniform has min and max"),
        ({"parameters": {"seed": {"distribution": "even"}}}, "distribution 'even' is not one of"),
        ({"parameters": {"seed": {"distribution": "int_uniform", "min": 2, "max": 1}}}, "low=2"),
        ({"parameters": {"seed": {"min": 0, "max": 10**30}}}, r"seed: min and max must lie within"),
        ({"parameters": {"inner_lr": {"min": 0.0, "max": 1.0}}}, "a grid needs a finite number"),
        ({"command": ["python"]}, r"command: has no \$\{args\}"),
        ({"command": ["${env}/${args}", "${args}"]}, r"command: \$\{env\}/\$\{args\} is not known"),
        ({"program": "nowhere.py"}, "program: there is no nowhere.py here"),
        ({"metric": None}, "metric: name one, as in"),
        ({"parameters": {"inner_lrr": {"value": 1}}}, "--inner-lrr.*did you mean --inner-lr"),
        ({"parameters": {"inner_lr": {"values": [0.4, -1]}}}, "with inner_lr=-1: --inner-lr"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_one_line(said: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = written(tmp_path, **({"parameters": {"seed": {"values": [0, 1]}}} | said))
    with pytest.raises(UserError, match=f"{path}: .*{says}") as caught:
        command.check(file.read(path))
    assert "\n" not in str(caught.value)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=f"{pipe}: cannot read: Not a regular file"):
        file.read(pipe)
    for text, says in (("{", "not YAML"), ("- 1", "not a sweep")):
        path.write_text(text)
        with pytest.raises(UserError, match=f"^{path}: .*{says}[^\n]*$"):
            file.read(path)
