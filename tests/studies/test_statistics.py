"""Intervals cover as often as they should, on data whose true difference is known."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from maml.evaluation import intervals as statistics
from maml.evaluation.intervals import interval, is_skewed, p_of_zero
from maml.run import reading
from maml.studies.arms import other_tasks
from maml.studies.recorded import RECORDS

STUDIES, SEEDS, TASKS, QUERIES, TRUTH = 1000, 3, 50, 25, 0.03


def studies(rng: np.random.Generator, spread: float = 0.0) -> np.ndarray:
    """Return differences of two learners' accuracies ``[STUDIES, SEEDS, TASKS]``, around `TRUTH`.

    Both learners meet the same tasks, of the same difficulty. ``spread``: how much seeds differ.
    """
    share = np.clip(rng.normal(0.75, 0.15, (STUDIES, SEEDS, TASKS)), 0.05, 0.95)
    right, other = rng.binomial(QUERIES, share + TRUTH), rng.binomial(QUERIES, share)
    return (right - other) / QUERIES + spread * rng.normal(size=(STUDIES, SEEDS, 1))


def coverage(samples: np.ndarray) -> float:
    """Return the share of ``samples [STUDIES, n]`` whose interval holds the truth."""
    found = [statistics.shown(sample) for sample in samples]
    return float(np.mean([each.low <= TRUTH <= each.high for each in found]))


def test_intervals_cover() -> None:
    """If seeds differ, intervals over seeds cover, and intervals over tasks do not."""
    d = studies(np.random.default_rng(0))
    assert 0.93 < coverage(d.reshape(STUDIES, -1)) < 0.97
    d = studies(np.random.default_rng(1), spread=0.07)
    assert 0.93 < coverage(d.mean(axis=-1)) < 0.97
    assert coverage(d.reshape(STUDIES, -1)) < 0.6


def recorded() -> Iterator[np.ndarray]:
    """Yield accuracies of recorded tasks ``[600]``, and differences of two records' accuracies."""
    found = [reading.read(path) for path in sorted(RECORDS.glob("*-omniglot-5way-*/seed-0"))]
    for name in ("accuracy", "non_transductive_accuracy"):
        each = [np.array([run.scores["test", 0, i][name] for i in range(600)]) for run in found]
        yield from each
        for (a, of_a), (b, of_b) in combinations(zip(found, each, strict=True), 2):
            if not other_tasks(a, b):
                yield of_a - of_b


def test_intervals_of_skewed_tasks_cover() -> None:
    """Studies draw 600 of a record's tasks, again and again. Student's interval does not cover."""
    rng, ours, students = np.random.default_rng(2), [], []
    populations = [each for each in recorded() if is_skewed(each)]
    for population in populations:
        truth = population.mean()
        drawn = rng.choice(population, (400, 600))
        ends = np.array([interval(sample) for sample in drawn])
        ours.append(np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1])))
        low, high = stats.t.interval(0.95, 599, drawn.mean(1), stats.sem(drawn, axis=1))
        students.append(np.mean((low <= truth) & (truth <= high)))
        assert (ends[:, 0] <= low).all() and (high <= ends[:, 1]).all()
        for sample, (start, end) in zip(drawn[:20], ends, strict=False):
            assert (p_of_zero(sample - truth) < 0.05) == (not start <= truth <= end)
    assert len(populations) == 10
    assert min(ours) >= 0.94 and min(students) < 0.89


def test_a_difference_is_said_in_full() -> None:
    rng = np.random.default_rng(3)
    difficulty = rng.normal(0.8, 0.1, (4, 300))
    a, b = (difficulty + rng.normal(edge, 0.03, (4, 300)) for edge in (0.02, 0.0))
    found = statistics.difference(a, b)
    assert found.runs.low < found.runs.mean < found.runs.high
    assert found.runs.mean == pytest.approx((a - b).mean(), abs=1e-12)
    # Paired: the difficulty drops out.
    assert found.runs.detectable == pytest.approx(2.8 * 0.03 * 2**0.5 / 1200**0.5, rel=0.05)
    assert found.runs.p < 0.001
    over = found.over_seeds
    assert over is not None and (over.low > 0) == (over.p < 0.05)
    one, none = statistics.difference(a[:1], b[:1]), statistics.difference(a, a)
    assert one.over_seeds is None and none.runs[:3] == (0.0, 0.0, 0.0)
    # Equal differences of four seeds tell nothing of their spread: four coins fell alike.
    tied = statistics.difference(a, a - 0.1).over_seeds
    assert tied is not None and tied.p == 2 * 0.5**4 and np.isnan([tied.low, tied.high]).all()
    assert [shown for _, _, shown in statistics.verdicts([found, one, none])] == [
        "holds over seeds", "holds for these runs; over seeds not shown (one seed)", "not shown",
    ]  # fmt: skip


def test_the_detectable_difference_is_detected_in_four_studies_of_five() -> None:
    d = np.random.default_rng(4).normal(2.8016 * 0.02, 0.2, (STUDIES, 100))
    assert statistics.shown(d[0]).detectable == pytest.approx(2.8 * 0.02, rel=0.2)
    assert 0.76 < np.mean([statistics.shown(row).p < 0.05 for row in d]) < 0.84


def test_holm() -> None:
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.6, 0.7]) == [1.0, 1.0] and statistics.holm([]) == []
