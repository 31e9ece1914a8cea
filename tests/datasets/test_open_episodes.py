"""The one door to the data sets."""

from pathlib import Path

import pytest

from datasets import DataError, open_episodes
from datasets.registry import data_sets
from datasets.sinusoid import Sinusoid

REQUEST = {"ways": 5, "shots": 1, "queries": 1, "seed": 0}


def test_an_unknown_data_set_names_the_flag_and_the_known_ones():
    with pytest.raises(DataError) as caught:
        open_episodes("omniglott", "train", **REQUEST)
    message = str(caught.value)
    assert message.startswith("--data omniglott")
    assert all(name in message for name in data_sets())
    assert "\n" not in message
    with pytest.raises(DataError, match="--split val: unknown; one of train, validation, test"):
        open_episodes("glyphs", "val", **REQUEST)


def test_an_opener_is_told_what_it_asks_for(monkeypatch, tmp_path):
    """All with ``**options``, and only what it names without."""
    seen = []

    def everything(split, **options):
        seen.append(options | {"split": split})
        return Sinusoid(split=split, shots=1, queries=1, seed=0)

    def a_little(split, *, data_root):
        return everything(split, data_root=data_root)

    monkeypatch.setattr("datasets.sinusoid.Sinusoid", everything)
    monkeypatch.setenv("MAML_DATA", str(tmp_path))
    open_episodes("sinusoid", "test", data_root="/somewhere", of_its_own="x", **REQUEST)
    expected = {"split": "test", "data_root": Path("/somewhere"), "of_its_own": "x", **REQUEST}
    assert expected.items() <= seen[0].items()
    monkeypatch.setattr("datasets.sinusoid.Sinusoid", a_little)
    open_episodes("sinusoid", "validation", **REQUEST)
    assert seen[1] == {"split": "validation", "data_root": tmp_path}


def test_importing_is_light_and_knows_nothing_of_the_learners(run_python):
    code = """
import sys, datasets
from datasets import open_episodes
open_episodes("sinusoid", "train", ways=1, shots=1, queries=1, seed=0)
open_episodes("glyphs", "validation", ways=5, shots=1, queries=1, seed=0)
heavy = [m for m in ("torchvision", "PIL", "maml", "learn2learn") if m in sys.modules]
print(heavy)
"""
    out, err = run_python(code).communicate(timeout=600)
    assert out.strip() == "[]", err
