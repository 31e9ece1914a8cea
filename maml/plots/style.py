"""The shared style of all pictures: colours, sizes, percent axes and output files.

The colours are those of Okabe and Ito (2008), which colour-blind readers can distinguish. Their
yellow is left out, because it is hard to see on white.
"""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maml.run.files import write_bytes

BLUE, ORANGE, GREEN, RED, PINK, SKY, BLACK = COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000",
)  # fmt: skip
GREY = "#888888"
DASHES = ("-", "--", ":")
WIDEST = 56
"""Number of characters that fit on a legend's line."""


def look_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a colour and a dash for each name; they repeat after 21 names."""
    looks = [(colour, dash) for dash in DASHES for colour in COLOURS]
    return {name: looks[i % len(looks)] for i, name in enumerate(names)}


def figure(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (5.0, 3.6), **options: Any
) -> Any:
    """Return a figure of ``rows × columns`` axes, each of ``size`` inches, and all axes."""
    # Avoid pyplot: importing it takes longer than drawing, and a run draws only once.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    whole = size[0] * columns, size[1] * rows
    drawn: Any = FigureCanvasAgg(Figure(figsize=whole, layout="constrained")).figure
    drawn.get_layout_engine().set(w_pad=0.08)
    return drawn, drawn.subplots(rows, columns, squeeze=False, **options)


def finish(axis: Any, x: str, y: str, *, metric: str = "") -> None:
    """Add labels, a grid and, above the axis, a legend of everything that has a label.

    ``metric`` is the metric on the y-axis; accuracies are shown as percent.
    """
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.25)
    if metric.endswith("accuracy"):
        from matplotlib.ticker import PercentFormatter

        axis.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, -0.02), min(high, 1.02))
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        once = {textwrap.fill(label, WIDEST): h for label, h in zip(labels, handles, strict=True)}
        axis.legend(
            once.values(), once, fontsize=8, frameon=False, loc="lower left", borderaxespad=0.3,
            bbox_to_anchor=(0, 1), ncols=max(1, WIDEST // (max(map(len, labels)) + 8)),
        )  # fmt: skip


def save(drawn: Any, path: Path, *, pdf: bool = True) -> Path:
    """Write a figure as ``path``.png and, for papers, as ``path``.pdf; return the PNG's path.

    Legends and title make the figure taller, so that its axes do not shrink. The PDF has no title
    and no creation date, so the same picture gives the same file. Its text stays text (TrueType).
    """
    import matplotlib
    from matplotlib.text import Text

    for text in drawn.findobj(Text):
        # A user's text may contain a $. Only a log axis writes formulas, perhaps later.
        if (said := text.get_text()) and r"\mathdefault{" not in said:
            text.set_parse_math(False)
    title = textwrap.fill(
        drawn.get_suptitle(), int(12 * drawn.get_figwidth()), break_on_hyphens=False
    )
    legends = [axis.get_legend() for axis in drawn.axes if axis.get_legend()]
    taller = max((each.get_window_extent().height / drawn.dpi for each in legends), default=0)
    drawn.set_figheight(drawn.get_figheight() + taller + 0.17 * title.count("\n"))
    for kind in ("png", "pdf") if pdf else ("png",):
        drawn.suptitle(title if kind == "png" else "", fontsize=10)
        picture = io.BytesIO()
        metadata = {"CreationDate": None} if kind == "pdf" else None
        with matplotlib.rc_context({"pdf.fonttype": 42}):
            drawn.savefig(picture, format=kind, dpi=130, metadata=metadata)
        write_bytes(path.with_name(f"{path.name}.{kind}"), picture.getvalue())
    return path.with_name(f"{path.name}.png")


def smooth(values: Sequence[float]) -> list[float]:
    """Return means over about a fifteenth of the rows, fewer at the ends; centred, without lag."""
    reach = max(1, len(values) // 30)
    halves = [min(reach, i, len(values) - 1 - i) for i in range(len(values))]
    return [sum(values[i - h : i + h + 1]) / (2 * h + 1) for i, h in enumerate(halves)]
