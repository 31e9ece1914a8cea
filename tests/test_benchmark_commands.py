"""The benchmarks' command lines: bad input is refused before anything is measured."""

from __future__ import annotations

import importlib
import sys

import pytest

from benchmarks import scaling
from benchmarks.command import write
from benchmarks.markdown import table

COMMANDS = ("inner_loop", "memory", "scaling", "tables", "throughput")


def ended(monkeypatch, name: str, *arguments: str) -> int | str | None:
    """Call a benchmark as its command does; return its exit code."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"benchmarks.{name}").main()
    return caught.value.code


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_how_it_is_called(monkeypatch, capsys, name):
    assert ended(monkeypatch, name, "--help") == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, flag, value",
    [
        ("throughput", "--rounds", "0"),
        ("throughput", "--threads", "-1"),
        ("throughput", "--json", "/"),
        ("memory", "--json", "/no/record.json"),
        ("scaling", "--workers", "0"),
        ("scaling", "--warm-up", "some"),
        ("scaling", "--plot", "/no/picture.png"),
    ],
)
def test_bad_input_is_refused_at_once(monkeypatch, capsys, name, flag, value):
    assert ended(monkeypatch, name, flag, value) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert flag in line and value in line


def test_a_record_replaces_the_one_before(tmp_path):
    path = tmp_path / "record.json"
    for report in ({"rows": [1, 2]}, {"rows": []}):
        write(path, report)
    assert path.read_text() == '{\n  "rows": []\n}\n'
    write(None, {})


def test_scaling_s_figures_are_those_of_a_run_s_metrics():
    """Of the iterations after the warm-up; medians over rounds, relative to the first row."""
    rows = [
        {"iteration": n, "seconds": 0.5 * n, "wire_bytes": 2048 * n, "staleness": [1, n // 4]}
        for n in (2, 4, 6, 8)
    ]
    found = scaling.figures(rows, batch=10, warm_up=4)
    assert found == {"tasks_per_second": 20.0, "kib": 7.0, "staleness": pytest.approx(3 / 5)}
    rounds = [found | {"tasks_per_second": rate} for rate in (30.0, 10.0, 20.0)]
    summed = scaling.summarise({("local", 1): [found], ("apart", 2): rounds[:2], ("x", 2): rounds})
    assert [row["times"] for row in summed] == [1, 1, 1] and summed[2]["range"] == [10.0, 30.0]
    shown = table({"columns": scaling.COLUMNS, "rows": summed})
    assert (
        "| `apart`  | 2       | 20.0    | 10.0–30.0 | 1.00 | 7" in shown and "dropped" not in shown
    )
