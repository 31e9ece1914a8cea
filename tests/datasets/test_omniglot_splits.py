"""The splits are fixed for ever, disjoint, and of the published sizes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from datasets import DataError
from datasets.omniglot_classes import (
    BACKGROUND,
    EVALUATION,
    SPLITS,
    class_names,
    split_classes,
)

GOLDEN = {
    ("maml", "train"): "7f38404651b37e6d",
    ("maml", "validation"): "426d0586d9baa8c8",
    ("maml", "test"): "ee59e3b1de1f97ce",
    ("mamlpp", "train"): "1f656ac1dbd7f52d",
    ("mamlpp", "validation"): "864af66f93aff1aa",
    ("mamlpp", "test"): "ee59e3b1de1f97ce",
    ("vinyals", "train"): "30ff3709708f0f35",
    ("vinyals", "validation"): "323fd61ecb332c48",
    ("vinyals", "test"): "cb5bfaa503b77285",
}


def test_the_table_of_alphabets_has_the_published_counts():
    assert (len(BACKGROUND), sum(BACKGROUND.values())) == (30, 964)
    assert (len(EVALUATION), sum(EVALUATION.values())) == (20, 659)
    names = class_names()
    assert len(names) == len(set(names)) == 1623
    assert names[0] == "Alphabet_of_the_Magi/character01"
    assert names[963] == "Tifinagh/character55"
    assert names[964] == "Angelic/character01"
    assert names[-1] == "ULOG/character26"
    assert names[:964] == sorted(names[:964]) and names[964:] == sorted(names[964:])


@pytest.mark.parametrize("name", SPLITS)
def test_splits_partition_the_classes(name):
    parts = [split_classes(name, split) for split in ("train", "validation", "test")]
    assert [len(p) for p in parts] == list(SPLITS[name].values())
    assert all(p.dtype == np.int64 and (np.diff(p) > 0).all() for p in parts)
    assert (np.sort(np.concatenate(parts)) == np.arange(1623)).all()


@pytest.mark.parametrize(("name", "split"), GOLDEN)
def test_splits_never_change(name, split):
    rows = split_classes(name, split).astype("<i8")
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == GOLDEN[name, split]


def test_maml_and_mamlpp_share_their_test_classes_and_vinyals_does_not():
    maml = split_classes("maml", "test")
    assert (maml == split_classes("mamlpp", "test")).all()
    assert (maml != split_classes("vinyals", "test")).any()
    # Shuffled: both halves of the data set are in each part.
    assert 150 < (maml < 964).sum() < 350


def test_vinyals_validation_is_five_alphabets_and_its_test_is_the_tail():
    names = np.array(class_names())
    alphabets = {n.split("/")[0] for n in names[split_classes("vinyals", "validation")]}
    assert alphabets == {
        "Armenian",
        "Bengali",
        "Early_Aramaic",
        "Hebrew",
        "Mkhedruli_(Georgian)",
    }
    assert (split_classes("vinyals", "test") == np.arange(1200, 1623)).all()


def test_unknown_names_name_the_flag():
    with pytest.raises(DataError, match=r"--omniglot-split lake.*maml, mamlpp, vinyals"):
        split_classes("lake", "train")
    with pytest.raises(DataError, match=r"--split val:.*train, validation, test"):
        split_classes("maml", "val")
