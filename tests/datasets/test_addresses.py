"""The generator is splitmix64, and what is built on it is unbiased."""

from itertools import permutations

import numpy as np
import pytest

from datasets import addresses


def many(n: int, purpose: str = "test") -> addresses.Keys:
    return addresses.keys(0, "train", purpose, np.arange(n))


def chi_square(counts: np.ndarray) -> float:
    """In standard deviations from the mean of the chi-square distribution of a fair die."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


def test_streams_are_splitmix64():
    """Outputs of the reference implementation for the states 0 and 1234567."""
    words = addresses.derive(np.array([0, 1234567], dtype=np.uint64), 3)
    assert words[0].tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert words[1].tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_golden_values_never_change():
    """Every published number of this project depends on these bits."""
    keys = addresses.keys(0, "train", "classes", [0, 1, 2**40]).tolist()
    assert keys == [18034795360614447773, 14005630521491197239, 12992506051608912166]
    drawn = addresses.choose(addresses.keys(7, "test", "drawings", np.arange(3)), 20, 5)
    assert drawn.tolist() == [[6, 0, 10, 17, 7], [11, 9, 16, 17, 0], [13, 19, 12, 8, 6]]


def test_every_part_of_the_address_matters():
    base = (0, "train", "classes")
    others = [(1, *base[1:]), (0, "test", "classes"), (0, "train", "rotation")]
    others += [(0, "trainc", "lasses"), (-1, "train", "classes")]
    index = np.arange(10_000)
    everything = np.concatenate([addresses.keys(*a, index) for a in (base, *others)])
    assert len(np.unique(everything)) == len(everything)


@pytest.mark.filterwarnings("error")
def test_uniforms_are_uniform_along_streams_and_along_indices():
    with np.errstate(all="raise"):
        u = addresses.uniforms(many(20_000), 10)
    assert u.min() >= 0 and u.max() < 1
    for some in (u, u[:, 0], u[:, 9], u[0:20_000:2, 0]):
        assert abs(chi_square(np.histogram(some, bins=100, range=(0, 1))[0])) < 4
    # Neighbours, in the stream and in the index, are uncorrelated in pairs.
    for a, b in ((u[:, 0], u[:, 1]), (u[:-1, 0], u[1:, 0])):
        pairs = np.histogram2d(a, b, bins=20, range=((0, 1), (0, 1)))[0]
        assert abs(chi_square(pairs)) < 4


@pytest.mark.parametrize(("n", "k"), [(5, 2), (4, 4), (6, 3)])
def test_choose_draws_every_ordered_choice_equally_often(n, k):
    drawn = addresses.choose(many(60_000), n, k)
    codes = (drawn * n ** np.arange(k)).sum(axis=1)
    possible = [sum(c * n**i for i, c in enumerate(p)) for p in permutations(range(n), k)]
    counts = np.bincount(codes, minlength=n**k)
    assert counts.sum() == counts[possible].sum(), "a choice repeated an element"
    assert abs(chi_square(counts[possible])) < 4
