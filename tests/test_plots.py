"""The house style: told apart in grey, shown once, with a sentence for those who do not see it."""

from __future__ import annotations

import base64
import itertools
import struct

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from nanlab.course import plots
from nanlab.errors import InputError


def luminance(color: str) -> float:
    """Relative luminance, WCAG 2.2."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colors_can_be_told_apart_in_grey_and_from_the_paper():
    lightness = [116 * luminance(color) ** (1 / 3) - 16 for color in plots.COLORS]
    assert all(b - a >= 8 for a, b in itertools.pairwise(lightness)), lightness
    assert all(1.05 / (luminance(color) + 0.05) >= 3 for color in plots.COLORS)
    assert len(set(plots.DASHES)) == len(set(plots.MARKERS)) == len(plots.COLORS)


def test_curves_differ_by_more_than_colour():
    _, ax = plots.figure()
    plots.curves(ax, [0, 1], {name: [i, float("nan")] for i, name in enumerate("abcde")}, markers=True)
    looks = {(line.get_marker(), str(line._dash_pattern)) for line in ax.lines}
    assert len(looks) == 5
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list("abcde")
    with pytest.raises(InputError, match="6 lines, 5 can be told apart"):
        plots.curves(ax, [0], {name: [0] for name in "abcdef"})
    plt.close("all")


def test_the_style_stays_in_the_figure():
    before = dict(matplotlib.rcParams)
    fig, ax = plots.figure()
    assert not ax.spines["top"].get_visible()
    assert dict(matplotlib.rcParams) == before
    plt.close(fig)


def test_show_displays_one_png_at_100_dpi_with_alt_text():
    InteractiveShell.instance()
    try:
        fig, _ = plots.figure(figsize=(3, 2))
        with capture_output() as captured:
            plots.show(fig, alt="A flat line at zero.")
    finally:
        InteractiveShell.clear_instance()
    (output,) = captured.outputs
    png = base64.b64decode(output.data["image/png"])
    assert struct.unpack(">II", png[16:24]) == (300, 200)
    assert output.metadata["image/png"]["alt"] == output.data["text/plain"] == "A flat line at zero."
    assert captured.stdout == captured.stderr == ""
    assert not plt.fignum_exists(fig.number)  # else the notebook shows it a second time


def test_show_outside_a_notebook_prints_the_sentence_only(capsys):
    fig, _ = plots.figure()
    plots.show(fig, alt="A flat line at zero.")
    assert capsys.readouterr().out == "A flat line at zero.\n"
    with pytest.raises(InputError, match="alt is empty"):
        plots.show(fig, alt=" ")


def test_a_band_is_as_wide_in_the_legend_as_in_the_figure():
    _, ax = plots.figure()
    plots.curves(ax, [0, 1], {"wide": [1, 2], "thin": [1, 2]}, band=True)
    drawn = [line.get_linewidth() for line in ax.lines]
    assert drawn[0] > 3 * drawn[1]
    assert [line.get_linewidth() for line in ax.get_legend().get_lines()] == drawn
