"""The generator is splitmix64, and what is built on it is unbiased."""

import numpy as np
import pytest

from datasets import addresses


def many(n: int, purpose: str = "test") -> addresses.Keys:
    return addresses.keys(0, "train", purpose, np.arange(n))


def test_streams_are_splitmix64():
    """Outputs of the reference implementation for the states 0 and 1234567."""
    words = addresses.derive(np.array([0, 1234567], dtype=np.uint64), 3)
    assert words[0].tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert words[1].tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_golden_values_never_change():
    """Every published number of this project depends on these bits."""
    assert addresses.keys(0, "train", "classes", [0, 1, 2**40]).tolist() == [
        18034795360614447773,
        14005630521491197239,
        12992506051608912166,
    ]
    drawn = addresses.choose(addresses.keys(7, "test", "drawings", np.arange(3)), 20, 5)
    assert drawn.tolist() == [[6, 0, 10, 17, 7], [11, 9, 16, 17, 0], [13, 19, 12, 8, 6]]


def test_every_part_of_the_address_matters():
    base = (0, "train", "classes")
    others = [(1, *base[1:]), (0, "test", "classes"), (0, "train", "rotation")]
    others += [(0, "trainc", "lasses"), (-1, "train", "classes")]
    index = np.arange(10_000)
    everything = np.concatenate([addresses.keys(*a, index) for a in (base, *others)])
    assert len(np.unique(everything)) == len(everything)


@pytest.mark.parametrize(
    "draw",
    [
        addresses.uniforms,
        addresses.derive,
        addresses.permutation,
        lambda keys, n: addresses.choose(keys, 20, n),
        lambda keys, n: addresses.integers(keys, 20, n),
    ],
)
def test_a_draw_does_not_depend_on_its_neighbours(draw):
    keys = many(50)
    together = draw(keys, 7)
    for i in (0, 13, 49):
        assert (draw(keys[i : i + 1], 7)[0] == together[i]).all()
    assert (draw(keys.reshape(5, 10), 7).reshape(50, 7) == together).all()


def test_choose_takes_a_bound_for_each_key():
    keys = addresses.derive(many(500), 4)
    n = np.arange(6, 10) * np.array([[1]] * 499 + [[1000]])
    drawn = addresses.choose(keys, n, 6)
    for place in range(4):
        for row in (0, 1, 499):
            alone = addresses.choose(keys[row, place : place + 1], n[row, place], 6)
            assert (alone[0] == drawn[row, place]).all()
    # The whole of the smallest range, distinct in the others.
    assert (np.sort(drawn[:499, 0]) == np.arange(6)).all()
    assert (np.diff(np.sort(drawn), axis=-1) > 0).all() and (drawn < n[..., None]).all()
    with pytest.raises(ValueError, match="6 of 5"):
        addresses.choose(keys, np.where(n == 7, 5, n), 6)
