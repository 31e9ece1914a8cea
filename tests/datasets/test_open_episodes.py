"""The one door to the data sets."""

from __future__ import annotations

import pytest
import torch

import datasets
from datasets import DataError, open_episodes
from datasets.sinusoid import Sinusoid

REQUEST = {"ways": 5, "shots": 1, "queries": 1, "seed": 0}


def test_an_unknown_data_set_names_the_flag_and_the_known_ones():
    with pytest.raises(DataError) as caught:
        open_episodes("omniglott", "train", **REQUEST)
    message = str(caught.value)
    assert message.startswith("--data omniglott")
    assert all(name in message for name in datasets.OPENERS)
    assert "\n" not in message


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_glyphs_open_in_every_split(split):
    e = open_episodes("glyphs", split, dtype=torch.float64, **REQUEST)
    task = e.tasks(e.ids(0, 2))
    assert e.split == split
    assert task.support_x.shape == (2, 5, 1, 28, 28) and task.support_x.dtype == torch.float64


def test_sinusoid_ignores_ways():
    e = open_episodes("sinusoid", "train", ways=0, shots=10, queries=10, seed=0)
    assert isinstance(e, Sinusoid)
    assert e.tasks(e.ids(0, 2)).support_x.shape == (2, 10, 1)


def test_too_many_ways_for_a_split():
    with pytest.raises(DataError, match="--ways 101: the validation split has only 100 classes"):
        open_episodes("glyphs", "validation", ways=101, shots=1, queries=1, seed=0)


def test_a_data_set_is_one_more_line(monkeypatch):
    seen = {}

    def opener(split, **options):
        seen.update(options, split=split)
        return Sinusoid(split=split, shots=1, queries=1, seed=0)

    monkeypatch.setitem(datasets.OPENERS, "mine", opener)
    open_episodes("mine", "test", data_root="/somewhere", omniglot_split="vinyals", **REQUEST)
    assert seen["split"] == "test" and seen["ways"] == 5 and str(seen["data_root"]) == "/somewhere"


def test_the_data_root_defaults_to_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MAML_DATA", str(tmp_path))
    seen = {}
    monkeypatch.setitem(datasets.OPENERS, "mine", lambda split, **options: seen.update(options))
    open_episodes("mine", "test", **REQUEST)
    assert seen["data_root"] == tmp_path


def test_importing_is_light_and_knows_nothing_of_the_learners(run_python):
    code = """
import sys, datasets
from datasets import open_episodes
open_episodes("sinusoid", "train", ways=1, shots=1, queries=1, seed=0)
open_episodes("glyphs", "validation", ways=5, shots=1, queries=1, seed=0)
heavy = [m for m in ("torchvision", "PIL", "maml", "learn2learn") if m in sys.modules]
print(heavy)
"""
    out, err = run_python(code).communicate(timeout=120)
    assert out.strip() == "[]", err
