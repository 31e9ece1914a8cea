"""Presets say what was published: names, sources, numbers and protocols."""

import fnmatch
import re

import pytest
import torch

from maml.config import registry
from maml.config.cli import parse
from maml.config.presets import (
    DEVIATIONS,
    PRESETS,
    describe,
    experiment,
    published_row,
    title,
    with_values,
)
from maml.learners.data import training_task
from maml.worker import Worker

# MAML on Omniglot as its released code and tables have it (arXiv:1703.03400): meta-batch, inner
# rate on a *sum* of cross-entropies each divided by K, inner steps in training and at test,
# queries per class in training and at test, published accuracy.
OMNIGLOT = {
    (5, 1): (32, 0.4, 1, 3, 1, 1, 0.987),
    (5, 5): (32, 0.4, 1, 3, 5, 5, 0.999),
    (20, 1): (16, 0.1, 5, 5, 1, 1, 0.958),
    (20, 5): (16, 0.1, 5, 5, 5, 5, 0.989),
}


FEW_SHOT = re.compile(r"([a-z0-9]+)-([a-z0-9]+)-(?:(\d+)way-)?(\d+)shot(-\w+)?")


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_says_what_the_preset_is(name: str) -> None:
    config = PRESETS[name]
    assert config.preset == name
    if config.learner == "supervised":
        assert name == f"supervised-{config.data}-{config.network}"
        return
    if registry.learner(config.learner).tasks == "environments":
        assert name == f"{config.learner.split('-')[0]}-{config.data.split('-')[0]}"
        return
    found = FEW_SHOT.fullmatch(name)
    assert found
    learner = "fomaml" if (config.learner, config.order) == ("maml", "first") else config.learner
    said = (found[1], found[2], int(found[3] or 1), int(found[4]))
    assert said == (learner, config.data, config.ways, config.shots)
    # A second row of the same problem names its network.
    assert found[5] in (None, f"-{config.network}", f"-{config.filters}filters")


def test_a_preset_names_its_source() -> None:
    listed = {line.split()[0]: line for line in describe().splitlines()}
    for name, config in PRESETS.items():
        assert re.search(r"arXiv:\d{4}\.\d{4,5}|doi:10\.\d{4}/\S+", config.source)
        assert config.source in listed[name]
        if config.published is None:
            continue
        # The number with its interval, and its kind if it differs from our kind.
        assert listed[name].endswith(f": {config.claim}")
        said = re.fullmatch(r"(\d\d\.\d+)( ± \d\.\d+)? %( \(.*\))?", config.claim)
        assert said and float(said[1]) == pytest.approx(100 * config.published, abs=1e-9)
        kind = said[3] or ""
        assert config.transductive or config.data == "mnist" or "(non-transductive" in kind
        assert ("(ensemble)" in kind) == (config.learner in ("mamlpp", "metacurv"))
        # Its deviations are stated.
        assert published_row(config)["deviations"] or config.learner == "supervised", name
    assert all(fnmatch.filter(PRESETS, of) for patterns in DEVIATIONS.values() for of in patterns)


@pytest.mark.parametrize(("ways", "shots"), OMNIGLOT)
def test_omniglot_follows_the_published_protocol(ways: int, shots: int) -> None:
    config = PRESETS[f"maml-omniglot-{ways}way-{shots}shot"]
    batch, raw_rate, steps, eval_steps, queries, eval_queries, published = OMNIGLOT[ways, shots]
    assert (config.meta_batch_size, config.published) == (batch, published)
    assert (config.inner_steps, config.eval_inner_steps) == (steps, eval_steps)
    assert (config.queries, config.eval_queries) == (queries, eval_queries)
    # Each of the N·K cross-entropies is divided by K there: N times the gradient of the mean.
    assert config.inner_lr == pytest.approx(ways * raw_rate, rel=1e-12)
    assert (config.meta_lr, config.iterations, config.test_tasks) == (1e-3, 60_000, 600)
    assert (config.inner_optimizer, config.order, config.network) == ("sgd", "second", "conv4")
    assert config.grad_clip is None  # clipped on MiniImageNet only
    assert config.omniglot_split == "maml" and config.transductive


@pytest.mark.parametrize("shots", [1, 5])
def test_miniimagenet_follows_the_published_protocol(shots: int) -> None:
    """Published rate and clip are for sums over examples, divided by K; ours are for means."""
    for name in ("maml", "fomaml", "anil"):
        config = PRESETS[f"{name}-miniimagenet-5way-{shots}shot"]
        assert (config.inner_steps, config.eval_inner_steps) == (5, 10)
        assert (config.queries, config.eval_queries) == (15, shots)
        assert config.inner_lr == pytest.approx(5 * 0.01)
        assert config.grad_clip == pytest.approx(10 / (5 * 15 / shots))


def test_a_run_of_another_row_has_no_published_number() -> None:
    """A run's title says where the run differs from the row that its preset names."""
    preset = PRESETS["maml-omniglot-5way-1shot"]
    longer = with_values(preset, iterations=7)
    assert title(longer) == preset.preset
    of_row = {"published": 0.987, "claim": "98.7 ± 0.4 %", "source": preset.source}
    said = published_row(longer)
    assert of_row.items() < said.items() and "200,000" in said["deviations"][0]
    own = with_values(preset, data="folder", data_root="here", ways=3)
    assert title(own) == "maml-omniglot-5way-1shot with --data folder --ways 3"
    assert published_row(own) == dict.fromkeys(of_row) | {"deviations": []}
    other = with_values(longer, network="my:Net", transductive=False, adapt="*,@norm=0")
    assert experiment(preset) == preset.preset
    assert experiment(other) == (
        "maml-omniglot-5way-1shot with --network my:Net --adapt '*,@norm=0' --iterations 7 "
        "--no-transductive"
    )


def test_only_a_learner_that_reads_them_trains_at_other_ways_and_shots() -> None:
    """Reptile's preset trains with ten shots, ProtoNet's with more ways; MAML ignores both."""
    reptile, protonet = "reptile-glyphs-5way-1shot", "protonet-glyphs-5way-1shot"
    assert training_task(PRESETS[reptile]) == (5, 10)
    ways = PRESETS[protonet].train_ways
    assert ways and training_task(PRESETS[protonet]) == (ways, 1)
    for name in (reptile, protonet):
        config = parse([name, "--learner", "maml", "--test-tasks", "0", "--eval-every", "0"])
        assert Worker(config, torch.device("cpu")).training.tasks(torch.arange(1)).support_x.shape[
            :2
        ] == (1, 5)
