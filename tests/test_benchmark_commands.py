"""The benchmarks' command lines: bad input is refused before anything is measured."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import released_maml, rows
from benchmarks.command import begun, write
from maml.config import Config
from maml.errors import UserError
from maml.learners import build_learner
from maml.params import Params
from maml.run import directory
from maml.run.provenance import digest_of
from tests.runs import glyphs

COMMANDS = (
    "adaptation",
    "hosts",
    "memory",
    "observers",
    "precision",
    "released_maml",
    "rows",
    "scaling",
    "solved",
    "tables",
    "throughput",
)


def refusal(monkeypatch, capsys, name: str, *arguments: str) -> str:
    """Call a benchmark as its command does; return the line in which it refuses."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"benchmarks.{name}").main()
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_how_it_is_called(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"benchmarks.{name}").main()
    assert caught.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "tables"])
def test_a_file_that_cannot_be_written_is_refused_at_once(monkeypatch, capsys, tmp_path, name):
    for path in (tmp_path, tmp_path / "none" / "record.json"):
        line = refusal(monkeypatch, capsys, name, "--json", str(path))
        assert "--json" in line and str(path) in line


@pytest.mark.parametrize(
    "name, flag, value",
    [
        ("throughput", "--rounds", "0"),
        ("throughput", "--threads", "-1"),
        ("precision", "--tasks", "0"),
        ("scaling", "--workers", "0"),
        ("scaling", "--warm-up", "some"),
        ("hosts", "--iterations", "0"),
        ("rows", "--seconds", "0"),
        ("rows", "--presets", "maml-glyphs-*"),
    ],
)
def test_a_number_out_of_range_is_refused(monkeypatch, capsys, name, flag, value):
    line = refusal(monkeypatch, capsys, name, flag, value)
    assert flag in line and value in line


def test_a_record_replaces_the_one_before(tmp_path):
    path = tmp_path / "record.json"
    for report in ({"rows": [1, 2]}, {"rows": []}):
        write(path, report)
    assert path.read_text() == '{\n  "rows": []\n}\n'
    write(None, {})


def test_rows_without_their_data_are_left_out(monkeypatch, capsys, tmp_path):
    """The others are measured, by the steps that a training takes in its middle."""
    presets = {
        "here": glyphs(preset="here", published=0.9, iterations=7200),
        "elsewhere": glyphs(preset="elsewhere", published=0.9, data="miniimagenet"),
        "unpublished": glyphs(preset="unpublished"),
    }
    monkeypatch.setattr(rows, "PRESETS", presets)
    path = tmp_path / "rows.json"
    asked = ["rows", "--seconds", "1e-3", "--data-root", str(tmp_path), "--json", str(path)]
    monkeypatch.setattr(sys, "argv", asked)
    rows.main()
    output = capsys.readouterr()
    assert "elsewhere: left out: " in output.err
    (row,) = json.loads(path.read_text())["records"]
    assert (row["preset"], row["measured_iterations"]) == ("here", rows.LEAST)
    assert row["core_hours"] == pytest.approx(2 * row["core_seconds"] / rows.LEAST)
    assert "| `here`" in output.out and "unpublished" not in output.out


def test_a_record_is_gone_on_with_if_it_is_of_the_same(tmp_path):
    path = tmp_path / "record.json"
    fresh = {"steps": (1, 2), "rows": []}
    assert begun(path, fresh, ["steps"]) is fresh is begun(None, fresh, ["steps"])
    write(path, fresh | {"rows": [1]})
    assert begun(path, fresh, ["steps"])["rows"] == [1]
    with pytest.raises(SystemExit, match=r"--json .*record.json: it is of other steps: \[1, 2\]"):
        begun(path, {"steps": [3]}, ["steps"])
    path.write_text("{")
    with pytest.raises(SystemExit, match=r"--json .*record.json: no record to go on with"):
        begun(path, fresh, ["steps"])


def test_released_weights_are_read_into_our_network(tmp_path):
    """Of a file in TensorFlow's layout each value is where the same product is computed here."""
    values = np.random.default_rng(0).standard_normal(32_773).astype("<f4")
    path = tmp_path / "weights"
    values.tofile(path)
    found = released_maml.read_released(path)
    learner = build_learner(released_maml.released())
    assert {n: t.shape for n, t in found.items()} == {
        n: t.shape for n, t in learner.meta_parameters().items()
    }
    shifts, biases, rest = np.split(values, [128, 256])
    assert found["network.blocks.2.norm.bias"].tolist() == shifts[64:96].tolist()
    assert found["network.blocks.2.conv.bias"].tolist() == biases[64:96].tolist()
    assert found["network.head.bias"].tolist() == rest[:5].tolist()
    second = rest[5 + 864 :][: 9 * 32 * 32].reshape(3, 3, 32, 32)
    assert found["network.blocks.1.conv.weight"][7, 5, 2, 1] == second[2, 1, 5, 7]
    head = rest[-4000:].reshape(5, 5, 32, 5)  # of a map: row, column, channel
    assert found["network.head.weight"].reshape(5, 32, 5, 5)[4, 3, 1, 2] == head[1, 2, 3, 4]
    whole = path.read_bytes()
    for content, line in (
        (whole[4:], "131088 bytes, not 131092"),
        (whole + b"end", "131095 bytes, not 131092"),
        (np.full_like(values, np.nan).tobytes(), "its model holds numbers that are not finite"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=line):
            released_maml.read_released(path)


@pytest.fixture
def as_released(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Params:
    """Weights of a small network, which the benchmark takes for the released ones."""
    config = glyphs(eval_queries=5)
    params = {n: t.detach() for n, t in build_learner(config).meta_parameters().items()}
    monkeypatch.setattr(released_maml, "released", lambda: config)
    monkeypatch.setattr(released_maml, "read_released", lambda path: params)
    return params


def record_of(folder: Path, config: Config, params: Params) -> Path:
    folder.mkdir()
    directory.write_config(folder, config)
    torch.save(params, folder / "model.pt")
    made = {"model_sha256": digest_of(folder / "model.pt")}
    (folder / "record.json").write_text(json.dumps(made))
    return folder


def test_records_beside_the_released_weights_are_tested_on_their_tasks(
    as_released, monkeypatch, capsys, tmp_path
):
    """The same weights score the same, whatever the seed; and each row says what it is of."""
    folders = [
        record_of(tmp_path / str(seed), glyphs(seed=seed, meta_lr=0.5), as_released)
        for seed in (0, 1)
    ]
    report = tmp_path / "report.json"
    for tasks in ("8", "1"):
        words = ["file", "--queries", "5", "--tasks", tasks, "--json", str(report), "--beside"]
        monkeypatch.setattr(sys, "argv", ["released_maml", *words, *map(str, folders)])
        released_maml.main()
        found = json.loads(report.read_text())["records"]
        scores = [[row[name] for name in released_maml.NAMES] for row in found]
        assert scores[0] == scores[1] == scores[2]
    first, second = (row["model"] for row in found[1:])
    assert first.startswith("`maml-glyphs-5way-1shot with ") and "--meta-lr 0.5" in first
    assert second == f"{first}, seed 1"
    # One task has no interval.
    assert capsys.readouterr().out.splitlines()[-1].count("± ? %") == 2


def test_what_is_unlike_the_released_weights_is_refused(as_released, monkeypatch, capsys, tmp_path):
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in as_released.items()}
    other = record_of(tmp_path / "other", glyphs(shots=3), as_released)
    nan = record_of(tmp_path / "nan", glyphs(), bad)
    edited = record_of(tmp_path / "edited", glyphs(), as_released)
    torch.save(bad, edited / "model.pt")
    for folder, says in (
        (other, f"{other}: it is of --shots 3, the released weights of --shots 1"),
        (nan, f"{nan}: its model holds numbers that are not finite"),
        (edited, f"{edited}/model.pt: not the file that was recorded: its digest differs"),
    ):
        line = refusal(monkeypatch, capsys, "released_maml", "file", "--beside", str(folder))
        assert line.endswith(f"error: --beside {says}")
