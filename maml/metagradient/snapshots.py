"""Which states of an inner loop are kept for the way back, where memory is not there for all.

The states are visited from the last one to the first. One that is not kept is computed again from
an earlier one, and on that way others are kept in the room of those that have been visited: as few
steps are taken twice as can be (Griewank and Walther 2000, doi:10.1145/347837.347846, revolve).
"""

from math import comb


def kept_between(first: int, end: int, room: int) -> set[int]:
    """Return which of the states ``first`` … ``end - 1`` are kept, ``first`` among them.

    Args:
        first: A state that is at hand.
        end: After the state that is visited first.
        room: How many may be kept besides ``first``.
    """
    kept = {first}
    while room > 0 and end - first > 1:
        n, times = end - first, 0
        while comb(room + 1 + times, times) < n:  # as far as steps that are taken so often lead
            times += 1
        first += min(comb(room + times, times - 1), n - comb(room + times - 1, times - 1))
        kept.add(first)
        room -= 1
    return kept
