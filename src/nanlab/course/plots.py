"""The house style of the figures: told apart in grey by dash and marker, never by colour alone, and read aloud."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib

from nanlab.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Dark to light, so that a grey print keeps the order; each comes with a dash and a marker of its own.
# Lightness (CIE L*) rises by at least 8 each, and all stand out from white by 3:1 (WCAG 2.2, 1.4.11).
COLORS = ("#10202f", "#4b2a86", "#a8343f", "#2a877d", "#c8871a")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v")
STYLE = {
    "figure.dpi": 100,
    "figure.figsize": (7.0, 3.2),
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
}


def figure(rows: int = 1, columns: int = 1, **kwargs) -> tuple[Figure, Axes]:
    """`plt.subplots` in the house style: a figure and its axes (an array of them, where there are several)."""
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(STYLE):
        return plt.subplots(rows, columns, **kwargs)


def curves(
    ax: Axes, x: Sequence[float], lines: Mapping[str, Sequence[float]], *, markers: bool = False, band: bool = False
) -> None:
    """One line a name over `x`, with a legend. Gaps (NaN) stay gaps. At most five: more cannot be told apart.

    `band`: the first line is a wide grey one, so that another that lies on it can be seen.
    """
    if len(lines) > len(COLORS):
        raise InputError(f"curves: {len(lines)} lines, {len(COLORS)} can be told apart; split the figure")
    for (name, y), color, dash, marker in zip(lines.items(), COLORS, DASHES, MARKERS, strict=False):
        ax.plot(x, y, color=color, linestyle=dash, marker=marker if markers else None, markersize=4, label=name)
    if band:
        ax.lines[0].set(linewidth=6, alpha=0.4)
    ax.legend(frameon=False, fontsize=9)


def show(fig: Figure, alt: str) -> None:
    """Display a figure as PNG with `alt`, one sentence that says what it shows, for those who do not see it.

    The sentence goes into the output's metadata, where HTML export reads it, and is the output's plain text. Outside
    a notebook only the sentence is printed. The figure is closed.
    """
    import matplotlib.pyplot as plt
    from IPython import get_ipython
    from IPython.display import display

    if not alt.strip():
        raise InputError("show: alt is empty; say in one sentence what the figure shows")
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=100, facecolor="white", metadata={"Software": None})
    plt.close(fig)
    if get_ipython() is None:
        print(alt)
        return
    data = {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": alt}
    display(data, metadata={"image/png": {"alt": alt}}, raw=True)
