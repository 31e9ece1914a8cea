"""A heat map: a value for each pair of two parameters' values."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maml.plots import style


def draw(
    path: Path,
    names: tuple[str, str],
    axes: tuple[Sequence[Any], Sequence[Any]],
    cells: Mapping[tuple[Any, Any], float],
    metric: str,
) -> None:
    """Draw ``cells {(x, y): value}``, with their numbers in them; a missing pair is left blank.

    Args:
        path: Where the picture goes, without an ending.
        names: The names of x and y.
        axes: The values of x and y, in order.
        metric: What the values are; accuracies are shown in percent.
    """
    across, down = axes
    values = [[cells.get((x, y), math.nan) for x in across] for y in down]
    size = (1.6 + 0.75 * len(across), 1.3 + 0.45 * len(down))
    drawn, ((axis,),) = style.figure(size=(max(size[0], 3.6), max(size[1], 2.4)))
    image = axis.imshow(values, cmap="cividis", aspect="auto", origin="lower")
    percent = metric.endswith("accuracy")
    low, high = image.get_clim()
    for row, of_row in enumerate(values):
        for column, value in enumerate(of_row):
            if not math.isnan(value):
                said = f"{100 * value:.1f}" if percent else f"{value:.3g}"
                dark = high > low and (value - low) / (high - low) < 0.5
                place = {"ha": "center", "va": "center", "fontsize": 8}
                axis.text(column, row, said, color="white" if dark else style.BLACK, **place)
    axis.set_xticks(range(len(across)), [str(x) for x in across], fontsize=8)
    axis.set_yticks(range(len(down)), [str(y) for y in down], fontsize=8)
    axis.set_xlabel(names[0])
    axis.set_ylabel(names[1])
    bar = drawn.colorbar(image, ax=axis)
    bar.ax.tick_params(labelsize=8)
    bar.set_label(f"{metric}, %" if percent else metric, fontsize=8)
    if percent:
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}")
    style.save(drawn, path)
