"""The house style of the figures: told apart in grey by dash and marker, never by colour alone, and read aloud."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

import matplotlib

# Dark to light, so that a grey print keeps the order; each comes with a dash and a marker of its own.
COLORS = ("#1b3a5c", "#c1440e", "#2a9d8f", "#e9a03b", "#8e6bbf")
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


def figure(rows: int = 1, columns: int = 1, **kwargs):
    """`plt.subplots` in the house style; returns (figure, axes)."""
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(STYLE):
        return plt.subplots(rows, columns, **kwargs)


def curves(ax, x: Sequence[float], lines: Mapping[str, Sequence[float]], *, markers: bool = False) -> None:
    """One line a name over `x`, with a legend. Gaps (NaN) stay gaps."""
    for i, (name, y) in enumerate(lines.items()):
        style = {"color": COLORS[i % 5], "linestyle": DASHES[i % 5], "label": name}
        ax.plot(x, y, **style, marker=MARKERS[i % 5] if markers else None, markersize=4)
    ax.legend(frameon=False, fontsize=9)


def show(fig, alt: str) -> None:
    """Display a figure as PNG with `alt`, one sentence that says what it shows, for those who do not see it."""
    import matplotlib.pyplot as plt
    from IPython.display import display

    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=100, facecolor="white", metadata={"Software": None})
    plt.close(fig)
    data = {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": alt}
    display(data, metadata={"image/png": {"alt": alt}}, raw=True)
