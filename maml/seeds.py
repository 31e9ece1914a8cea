"""Seeds for generators that libraries own, from the project's addresses."""

from __future__ import annotations

from datasets.addresses import keys


def seed_of(seed: int, purpose: str, index: int = 0) -> int:
    """Return the 63-bit seed at the address (seed, purpose, index)."""
    return int(keys(seed, "", purpose, index)[0]) >> 1
