"""What all pictures share: colours, sizes, percent axes, and the files that they become.

The colours are Okabe and Ito's (2008), which the colour-blind tell apart; without their yellow,
which is lost on white.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maml.run.files import write_bytes

BLUE, ORANGE, GREEN, RED, PINK, SKY, BLACK = COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000",
)  # fmt: skip
GREY = "#888888"
DASHES = ("-", "--", ":")


def look_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a colour and a dash for each name; 21 look different."""
    looks = [(colour, dash) for dash in DASHES for colour in COLOURS]
    return {name: looks[i % len(looks)] for i, name in enumerate(names)}


def figure(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (5.0, 3.6), **options: Any
) -> Any:
    """Return a figure of ``rows × columns`` axes, each of ``size`` inches, and all axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(
        rows, columns, figsize=(size[0] * columns, size[1] * rows), layout="constrained",
        squeeze=False, **options,
    )  # fmt: skip
    return drawn, axes


def finish(axis: Any, x: str, y: str, *, metric: str = "") -> None:
    """Say what an axis shows: its labels, a grid, and a legend of what has a label.

    Args:
        axis: What has been drawn on.
        x: What is drawn from left to right.
        y: What is drawn upwards.
        metric: Which metric that is; accuracies are shown as percent.
    """
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.25)
    if metric.endswith("accuracy"):
        from matplotlib.ticker import PercentFormatter

        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, -0.02), min(high, 1.02))
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def save(drawn: Any, path: Path, kinds: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write a figure as ``path``.png and so on, for each of ``kinds``; return the files.

    Raises:
        UserError: if one cannot be written.
    """
    import matplotlib.pyplot as plt

    written = []
    for kind in kinds:
        picture = io.BytesIO()
        # Without a date: the same picture is the same file.
        metadata = {"CreationDate": None} if kind == "pdf" else None
        drawn.savefig(picture, format=kind, dpi=130, metadata=metadata)
        written.append(path.with_name(f"{path.name}.{kind}"))
        write_bytes(written[-1], picture.getvalue())
    plt.close(drawn)
    return written


def smooth(values: Sequence[float]) -> list[float]:
    """Return centred means over about a fifteenth of the rows: they do not lag.

    Near an end the window shrinks on both sides.
    """
    reach = max(1, len(values) // 30)
    found = []
    for i in range(len(values)):
        half = min(reach, i, len(values) - 1 - i)
        window = values[i - half : i + half + 1]
        found.append(sum(window) / len(window))
    return found
