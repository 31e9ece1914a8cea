"""The nearest-neighbour baseline against a loop that cannot be wrong."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch

from datasets import FewShotImages, ImageClasses
from datasets.baselines import main, nearest_neighbour_accuracy
from datasets.errors import DataError


def episodes(images, **changes) -> FewShotImages:
    options = {"split": "test", "ways": 4, "shots": 3, "queries": 2, "seed": 0}
    options.update(changes)
    classes = ImageClasses.of_equal_size(images, np.arange(len(images)), rotate=False)
    return FewShotImages(**classes._asdict(), **options)


def test_agrees_with_a_plain_loop():
    rng = np.random.default_rng(0)
    # A class is a noisy template, so that accuracy is neither chance nor perfect.
    images = (rng.integers(0, 60, (9, 1, 6, 6)) + rng.integers(0, 190, (9, 8, 6, 6))).astype(
        np.uint8
    )
    e = episodes(images)
    ids = torch.arange(70)
    task = e.tasks(ids)
    expected = []
    for b in range(70):
        right = 0
        for query, label in zip(task.query_x[b], task.query_y[b], strict=True):
            distances = [float(((query - s).double() ** 2).sum()) for s in task.support_x[b]]
            right += int(task.support_y[b, int(np.argmin(distances))] == label)
        expected.append(right / 8)
    found = nearest_neighbour_accuracy(e, ids, batch=32)
    assert found.shape == (70,)
    assert found.tolist() == expected
    assert 0.3 < found.mean() < 0.95


def test_perfect_on_identical_drawings_and_chance_on_noise():
    rng = np.random.default_rng(0)
    same = np.repeat(rng.integers(0, 256, (9, 1, 6, 6), dtype=np.uint8), 8, axis=1)
    assert nearest_neighbour_accuracy(episodes(same), torch.arange(20)).tolist() == [1.0] * 20
    noise = rng.integers(0, 256, (40, 20, 6, 6), dtype=np.uint8)
    chance = nearest_neighbour_accuracy(episodes(noise, shots=1), torch.arange(1000)).mean()
    assert abs(chance - 0.25) < 0.04
    assert nearest_neighbour_accuracy(episodes(noise), torch.arange(0)).shape == (0,)


# ---- the command ------------------------------------------------------------------------------


@pytest.fixture
def little(small_images, monkeypatch):
    """Stand in for the data, which would be drawn first."""
    opened = episodes(small_images)
    monkeypatch.setattr("datasets.baselines.open_episodes", lambda *args, **options: opened)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("imagenet", "'imagenet'"),
        ("glyphs --split mine", "--split mine: unknown"),
        ("glyphs --ways five", "--ways: 'five' is not a whole number"),
        ("glyphs --tasks 0", r"--tasks: must be in \[1, 2147483647\], not 0"),
        ("glyphs --tasks 2147483648", "--tasks: must be in .*, not 2147483648"),
        ("glyphs --shots 0", "--shots: must be in"),
        ("glyphs --queries -1", "--queries: must be in"),
        ("glyphs --seed -1", "--seed: must be in .*, not -1"),
        ("glyphs --data-root=", '--data-root: "": empty'),
        ("glyphs --nonsense", "--nonsense"),
    ],
)
def test_bad_requests_are_one_line(arguments, says, capfd):
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    err = capfd.readouterr().err
    assert stop.value.code == 2
    assert re.fullmatch(rf"error: [^\n]*{says}[^\n]*\n", err), err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (DataError("a.zip: damaged"), 2, "error: a.zip: damaged\n"),
    ],
)
def test_how_it_ends(error, code, says, monkeypatch, capfd):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr("datasets.baselines.open_episodes", fail)
    with pytest.raises(SystemExit) as stop:
        main(["glyphs"])
    assert stop.value.code == code
    assert capfd.readouterr().err == says


def test_the_sentence_and_the_progress(little, capfd):
    main(["glyphs", "--tasks", "70"])
    out, err = capfd.readouterr()
    assert re.fullmatch(r"glyphs test 5-way .*: \d+\.\d\d ± \d+\.\d\d % over 70 tasks\n", out)
    assert "/70" in err


def test_one_task_has_no_interval(little, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        main(["glyphs", "--tasks", "1"])
    assert capfd.readouterr().out.endswith(" ± ? % over 1 task\n")
