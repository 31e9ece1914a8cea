"""Methods side by side: means or differences with their intervals; main effects of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from maml.plots import style
from maml.plots.curves import mean_and_spread
from maml.plots.style import BLACK, BLUE, GREY

Interval = tuple[float, float, float]
"""A mean, and the ends of its interval."""


def intervals(
    rows: Mapping[str, tuple[Interval, Interval | None]], metric: str, *, differences: bool = False
) -> Any:
    """Draw a mean a row, with its interval over tasks, and a thinner one over seeds.

    Args:
        rows: By name, the intervals over tasks, and over seeds if there are several.
        metric: What it is the mean of.
        differences: Whether it is of a difference: right of 0 what is named first is greater.

    Returns:
        The figure.
    """
    drawn, ((axis,),) = style.figure(size=(7.0, 1.3 + (0.36 if differences else 0.32) * len(rows)))
    looks = dict.fromkeys(rows, (BLUE, "-")) if differences else style.look_of(list(rows))
    for y, (name, ((mean, *over_tasks), over_seeds)) in enumerate(rows.items()):
        colour = looks[name][0]
        if over_seeds is not None:
            axis.plot(over_seeds[1:], (y, y), "|-", color=GREY, lw=1.2, markersize=8, zorder=1)
        axis.plot(over_tasks, (y, y), color=colour, linewidth=4, alpha=0.55, zorder=2)
        axis.plot(mean, y, "o", color=colour, markersize=5, zorder=3)
    axis.plot([], [], color=BLUE, linewidth=4, alpha=0.55, label="95 %, over tasks (these runs)")
    if any(over_seeds is not None for _, over_seeds in rows.values()):
        axis.plot([], [], "|-", color=GREY, linewidth=1.2, label="95 %, over seeds")
    axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.25)
    axis.figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    axis.set_xlabel(f"difference in test {metric}" if differences else f"test {metric}")
    if differences:
        axis.axvline(0, color=BLACK, linewidth=0.8, zorder=0)
    if metric.endswith("accuracy") and differences:
        from matplotlib.ticker import FuncFormatter

        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:+.4g}"))
        axis.set_xlabel(f"difference in test {metric}, percentage points")
    elif metric.endswith("accuracy"):
        style.percent(axis, "x")
    return drawn


ROOM = 30
"""Letters that stand side by side below a panel."""


def main_effects(
    points: Sequence[Mapping[str, Any]],
    values: Sequence[float],
    names: Sequence[str],
    metric: str,
) -> Any:
    """Draw what each parameter does to the metric, over all values of the others.

    A dot is a trial, a line joins the means of numbers. Where a parameter has many values, as drawn
    by random search, the dots alone are drawn. The interval is Student's, of the mean.

    Args:
        points: A trial's parameters each.
        values: Its metric.
        names: The parameters to draw.
        metric: Its name.

    Returns:
        The figure.
    """
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    drawn, axes = style.figure(rows, columns, (3.4, 3.0), sharey=True)
    for axis, name in zip(axes.flat, names, strict=False):
        # Words stay in their order: that of the sweep's file.
        levels = list(dict.fromkeys(point[name] for point in points))
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in levels)
        if numbers:
            levels.sort()
        if numbers and len(levels) > 6:
            axis.plot([point[name] for point in points], values, "o", color=BLUE, alpha=0.6)
            if min(levels) > 0 and max(levels) / min(levels) >= 100:
                axis.set_xscale("log")
        else:
            pairs = [(point[name], value) for point, value in zip(points, values, strict=True)]
            at = [[value for at, value in pairs if at == level] for level in levels]
            for x, of_level in enumerate(at):
                axis.plot([x] * len(of_level), of_level, "o", color=GREY, alpha=0.5, markersize=4)
            spread = [mean_and_spread(of_level) for of_level in at]
            axis.errorbar(
                range(len(levels)), [m for m, _ in spread], yerr=[half for _, half in spread],
                color=BLUE, marker="o", capsize=3, linestyle="-" if numbers else "none",
            )  # fmt: skip
            said = [str(level) for level in levels]
            axis.set_xticks(range(len(levels)), said, fontsize=8)
            if sum(map(len, said)) > ROOM:
                axis.tick_params(axis="x", rotation=90)
            axis.set_xlim(-0.4, len(levels) - 0.6)
        axis.set_xlabel(name)
        axis.grid(axis="y", alpha=0.25)
        if metric.endswith("accuracy"):
            style.percent(axis)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis in axes[:, 0]:
        axis.set_ylabel(metric)
    wrapped = "\n" if columns == 1 else " "
    title = f"means with 95 % intervals over{wrapped}all other values; dots are trials"
    drawn.suptitle(title, fontsize=9)
    return drawn
