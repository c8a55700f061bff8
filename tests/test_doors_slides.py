"""Slides and HTML copies: cut at the headings, formulas without a script, nothing that needs a network."""

import re

import doors
import nbformat
import pytest

pytestmark = pytest.mark.doors
NOTEBOOKS = sorted((doors.ROOT / "notebooks").glob("*.ipynb"))
v4 = nbformat.v4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tools import slides

    target = tmp_path_factory.mktemp("build") / "slides"
    assert slides.main(target) == 0
    return target


def kinds(*cells):
    from tools.slides import as_slides

    return [(c.source, c.metadata["slideshow"]["slide_type"]) for c in as_slides(v4.new_notebook(cells=cells)).cells]


def test_headings_begin_slides_and_set_up_and_solutions_are_left_out():
    cells = [v4.new_code_cell("x", metadata={"tags": [tag]}) for tag in ("colab", "setup", "solution")]
    text = v4.new_markdown_cell("# Title\n\nText.\n\n## Predict\n\nWhat?\n\n### Finer")
    assert kinds(text, *cells, v4.new_code_cell("1 + 1")) == [
        ("# Title\n\nText.", "slide"), ("## Predict\n\nWhat?", "slide"), ("### Finer", "subslide"), ("1 + 1", "-"),
    ]  # fmt: skip


def test_what_does_not_fit_goes_on_below():
    long = [v4.new_code_cell("\n".join(["line"] * 15)) for _ in range(2)]
    assert [kind for _, kind in kinds(v4.new_markdown_cell("## Title"), *long)] == ["slide", "-", "subslide"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_has_every_heading_and_loads_nothing_from_a_network(path, folder):
    from tools.pages import html, loads

    page = (folder / f"{path.stem}.slides.html").read_text(encoding="utf-8")
    copy = html(path)
    for text in (page, copy):
        assert loads(text) == []
        assert "MathJax" not in text
    cells = nbformat.read(path, as_version=4).cells
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    titles = [title for text in texts for title in re.findall(r"^#{1,2} (.+)$", text, re.MULTILINE)]
    slides = re.findall(r"<h[12][^>]*>(.*?)</h[12]>", page)
    assert len(slides) >= len(titles) > 2
    figures = re.findall(r"<img [^>]*>", page + copy)
    assert all(re.search(r'alt="(?!No description)[^"]{20,}"', figure) for figure in figures)
    for file in re.findall(r'(?:src|href)="(reveal\.js/[^"]+)"', page):
        assert (folder / file).is_file()
    for other in re.findall(r'href="(\d\d_[^"#]+)', page):
        assert (folder / other).is_file(), "a link leads to a page beside this one"


def test_a_page_that_loads_something_is_seen():
    from tools.pages import loads

    assert loads('<script src="https://example.org/x.js"></script><a href="https://example.org">x</a>') != []
    assert loads('<a href="https://example.org">x</a>') == []


def test_formulas_become_mathml_and_code_stays():
    from tools.pages import MathML

    cell = v4.new_markdown_cell("Half: $\\frac{1}{2}$ and `$HOME`.\n\n$$a^2$$")
    MathML().preprocess_cell(cell, {}, 0)
    assert cell.source.count("<math") == 2
    assert "<mfrac>" in cell.source
    assert "`$HOME`" in cell.source


def test_another_reveal_than_the_pinned_one_is_refused(tmp_path):
    from tools import slides

    (tmp_path / f"reveal.js-{slides.REVEAL}.tgz").write_bytes(b"something else")
    with pytest.raises(SystemExit, match=r"is not reveal.js"):
        slides.put_reveal(tmp_path / "slides", tmp_path)
