"""The benchmarks' command lines: bad input is refused before anything is measured."""

import importlib

import pytest

import maml
from benchmarks import observers, orders, scaling
from benchmarks.record import table, write
from maml.config.presets import with_values
from maml.errors import UserError
from maml.run.files import append_row
from tests.launching import REPO


@pytest.mark.parametrize(
    "name, flag, value",
    [
        ("throughput", "--rounds", "0"),
        ("throughput", "--json", "/no/record.json"),
        ("scaling", "--warm-up", "some"),
        ("orders", "--batches", "1"),
        ("observers", "--observers", "0"),
        ("tables", "--chekc", "--check"),
    ],
)
def test_bad_input_is_refused_at_once(capsys, name, flag, value):
    main = importlib.import_module(f"benchmarks.{name}").main
    with pytest.raises(UserError, match=f"{flag}.*{value}"):
        main([flag, value])
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


def test_scaling_s_figures_are_those_of_a_run_s_metrics(tmp_path):
    """Only iterations after the warm-up count. Rows are medians, relative to the first row."""
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
    assert "| `apart`  | 2       | 20.0    | 10.0–30.0 | 1.00 | 7" in shown
    assert "dropped" not in shown
    write(tmp_path / "record.json", {"rows": []})
    assert (tmp_path / "record.json").read_text() == '{\n  "rows": []\n}\n'


def test_orders_differ_by_the_inner_steps_alone():
    model = maml.load(
        REPO / "launch" / "records" / "maml-glyphs-5way-1shot" / "seed-0", device="cpu"
    )
    found, without = (
        orders.compare(with_values(model.config, **changes), model.meta_params, 3)
        for changes in ({}, {"inner_steps": 0})
    )
    assert without["interval"] == pytest.approx([1, 1]) and without["cosine"] == pytest.approx(1)
    assert without["first_halves"] == pytest.approx(without["second_halves"]) != 1
    assert found["interval"][0] <= found["cosine"] <= found["interval"][1] < 0.9
    assert found["tasks"] == 3 * model.config.meta_batch_size


def test_observers_figures_are_those_of_a_run_s_metrics_and_drawn(tmp_path, capsys):
    """Medians without a run's first iteration, and the ratios of ways in the same round."""
    for run, speeds in {"batched": (300, 200), "unbatched": (100, 400)}.items():
        for number, speed in enumerate(speeds):
            (tmp_path / f"{run}-{number}").mkdir()
            for n, rate in enumerate((1, speed, speed + 10, speed - 10), 1):
                row = {
                    "iteration": n,
                    "requests_per_second": rate,
                    "action_ms": {"p50": 1.0, "p95": 2.5},
                }
                append_row(tmp_path / f"{run}-{number}" / "metrics.jsonl", row)
    found = observers.figures(tmp_path, 2)
    assert found["batched"] == {"p50": 1.0, "p95": 2.5, "per_second": 250}
    assert found["ratio"] == [0.5, 1.75, 3.0]
    rows = [{"observers": n, **found} for n in (1, 2)]
    write(tmp_path / "record.json", {"columns": observers.COLUMNS, "rows": rows})
    picture = tmp_path / "picture.png"
    observers.main(["--record", str(tmp_path / "record.json"), "--picture", str(picture)])
    assert picture.stat().st_size > 10_000
    assert "| 2         | 250                | 250 " in capsys.readouterr().out
