"""When a trial that does badly is ended early: Hyperband, as W&B has it.

Li et al. 2018, arXiv:1603.06560, without its brackets: after each band of values of the metric, the
best 1/η of all trials that came so far go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.sweeping.file import Hyperband


def should_end(early: Hyperband, own: Sequence[float], all_at: dict[int, Sequence[float]]) -> bool:
    """Return whether a trial is to be ended.

    Args:
        early: The rule.
        own: The trial's values so far, smaller ones better.
        all_at: By band, the values there of all trials that came so far, this one included.
    """
    reached = [band for band in early.bands if band <= len(own)]
    if not reached:
        return False
    band = reached[-1]
    others = sorted(all_at.get(band, ()))
    if not others:
        return False
    threshold = others[int(len(others) / early.eta)]
    return (own[band - 1] if early.strict else min(own)) > threshold
