"""Slides of each lesson with reveal.js, readable without a network: `make slides` writes them to `build/slides`.

The notebooks know nothing of slides. A rule cuts: a heading `#` or `##` begins a slide, `###` a slide below it, and
what does not fit goes on below. Set-up and solutions are left out. S opens the presenter's view, `?print-pdf` prints.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import nbformat
from nbconvert import SlidesExporter

from tools.pages import TEMPLATES, MathML, linked, sheet

ROOT = Path(__file__).resolve().parents[1]
REVEAL = "5.2.1"
REVEAL_SHA512 = "r7//6mIM5p34hFiDMvYfXgyjXqGRta+/psd9YtytsgRlrpRzFv4RbH76TXd2qD+7ZPZEbpBDhdRhJaFgfQ7zNQ=="
WIDTH, HEIGHT = 1280, 800
LINES = 24  # that fit on a slide; a figure takes FIGURE of them
FIGURE = 17
LEFT_OUT = {"colab", "setup", "solution"}


def as_slides(notebook):
    """A copy of `notebook` in cells that each carry the slide type nbconvert reads."""
    slides, room = copy.deepcopy(notebook), 0
    slides.cells = [part for cell in slides.cells for part in _parts(cell)]
    for cell in slides.cells:
        for data in [output["data"] for output in cell.get("outputs", []) if "text/html" in output.get("data", {})]:
            data["text/html"] = re.sub(r"(</?)section\b", r"\1div", data["text/html"])  # to reveal.js it is a slide
        heading = re.match(r"#+ ", cell.source) if cell.cell_type == "markdown" else None
        room -= _lines(cell)
        kind = "-"
        if heading:
            kind = "slide" if len(heading.group()) <= 3 else "subslide"
        elif room < 0:
            kind = "subslide"
        if kind != "-":
            room = LINES - _lines(cell)
        cell.metadata["slideshow"] = {"slide_type": kind}
    return slides


def _parts(cell) -> list:
    """A Markdown cell cut before each heading; another cell as it is; nothing of what is left out."""
    if LEFT_OUT & set(cell.metadata.get("tags", [])):
        return []
    if cell.cell_type != "markdown":
        return [cell]
    texts = re.split(r"\n+(?=#{1,3} )", cell.source)
    return [nbformat.v4.new_markdown_cell(text) for text in texts if text.strip()]


def _lines(cell) -> int:
    """Lines that a cell takes on a slide, roughly: text breaks after 100 characters, outputs count too."""
    data = [output.get("data", {}) for output in cell.get("outputs", [])]
    figures = [any(kind.startswith("image/") for kind in kinds) for kinds in data]
    texts = [kinds.get("text/plain", "") for kinds, figure in zip(data, figures, strict=True) if not figure]
    texts += [cell.source, *(output.get("text", "") for output in cell.get("outputs", []))]
    return FIGURE * sum(figures) + sum(1 + len(line) // 100 for text in texts for line in text.splitlines()) + 1


def write_slides(path: Path, target: Path) -> Path:
    exporter = SlidesExporter(
        template_name="slides", extra_template_basedirs=[str(TEMPLATES)], preprocessors=[MathML],
        reveal_url_prefix="reveal.js", reveal_width=str(WIDTH), reveal_height=str(HEIGHT), exclude_anchor_links=True,
    )  # fmt: skip
    slides = as_slides(nbformat.read(path, as_version=4))
    page, _ = exporter.from_notebook_node(slides, {"metadata": {"name": path.stem}})
    file = target / f"{path.stem}.slides.html"
    file.write_text(linked(page, ".slides.html"), encoding="utf-8")
    return file


def put_reveal(target: Path, cache: Path) -> None:
    """The pinned reveal.js, checked by its hash, into `target/reveal.js`. npm fetches it once, into `cache`."""
    archive = cache / f"reveal.js-{REVEAL}.tgz"
    if not archive.is_file():
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit("slides: npm is missing (it comes with Node.js); it fetches reveal.js once")
        command = [npm, "pack", "--silent", f"reveal.js@{REVEAL}", "--pack-destination", str(cache)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != REVEAL_SHA512:
        raise SystemExit(f"slides: {archive} is not reveal.js {REVEAL}: delete it and try again")
    shutil.rmtree(target / "reveal.js", ignore_errors=True)
    with tarfile.open(archive) as files:
        wanted = [m for m in files if m.name.startswith(("package/dist/", "package/plugin/notes/", "package/LICENSE"))]
        for member in wanted:
            member.name = member.name.replace("package", "reveal.js", 1)
        known = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.11.2 has no filters
        files.extractall(target, members=wanted, **known)
    for theme in (target / "reveal.js" / "dist" / "theme").glob("*.css"):  # they ask a host for its fonts
        theme.write_text(
            re.sub(r"@import url\(https?:[^)]*\);", "", theme.read_text(encoding="utf-8")), encoding="utf-8"
        )


def main(target: Path = ROOT / "build" / "slides") -> int:
    target.mkdir(parents=True, exist_ok=True)
    put_reveal(target, cache=target.parent)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        print(write_slides(path, target))
    (target / "cheatsheet.html").write_text(sheet(ROOT / "docs" / "cheatsheet.md"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
