"""What the site's builder has to be told: folds, figures' texts, anchors, formulas, how docstrings are written."""

from __future__ import annotations

import inspect
import json
import re
from base64 import b64decode
from hashlib import sha256
from pathlib import Path, PurePosixPath

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx


def jupyter_anchor(title: str) -> str:
    """The anchor that JupyterLab gives a heading; the links between the notebooks are written with it."""
    return title.strip().replace(" ", "-")


def adapt(app: Sphinx, docname: str, source: list[str]) -> None:
    """Solutions are folded, Colab's set-up is left out, and links in outputs lead to pages."""
    if app.env.doc2path(docname).suffix != ".ipynb":
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        tags = cell["metadata"].setdefault("tags", [])
        if "solution" in tags:
            tags.append("hide-cell")
            cell["metadata"]["mystnb"] = {"code_prompt_show": "Show the solution"}
        if "colab" in tags:
            tags.append("remove-cell")
        for data in [output["data"] for output in cell.get("outputs", []) if "text/html" in output.get("data", {})]:
            html = "".join(data["text/html"])
            data["text/html"] = re.sub(r"""(href=["']\d\d_\w+)\.ipynb\b""", r"\1.html", html)
    source[0] = json.dumps(notebook)


def alternatives(path: Path) -> dict[str, str]:
    """SHA-256 of each figure in a notebook (myst-nb names its file so) → its text."""
    outputs = [o for c in json.loads(path.read_text(encoding="utf-8"))["cells"] for o in c.get("outputs", [])]
    figures = [
        (o["data"]["image/png"], o["metadata"]["image/png"]["alt"]) for o in outputs if "image/png" in o.get("data", {})
    ]
    return {sha256(b64decode("".join(data))).hexdigest(): alt for data, alt in figures}


def describe_figures(app: Sphinx, doctree: nodes.document) -> None:
    """A figure gets the text that the notebook keeps for it, which myst-nb passes over."""
    path = app.env.doc2path(app.env.docname)
    if path.suffix == ".ipynb":
        texts = alternatives(path)
        for image in doctree.findall(nodes.image):
            image.setdefault("alt", texts.get(PurePosixPath(image["uri"]).stem, ""))


def inline_math(self, node: nodes.math) -> None:
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(self, node: nodes.math_block) -> None:
    self.body.append(tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode


def readable_docstring(app: Sphinx, what: str, name: str, obj, options, lines: list[str]) -> None:
    """The docstrings are written for `help()`; here "name: what it is" becomes a field, an indented block code."""
    known = set(inspect.signature(obj).parameters) if what in ("function", "method") else set()
    told, before, field = [], "", False
    for line in lines:
        names, colon, _ = line.partition(": ")
        begins = bool(colon) and set(names.split(", ")) <= known
        if line[:1] == " " and not before and told[-1:] == [""] and not field:
            told += ["::", ""]
        if field and not begins and line[:1] not in ("", " "):
            told.append("")
        field = begins or (field and line[:1] in ("", " "))
        told.append(escape_bars(f":param {line.replace(', ', ',', names.count(', '))}" if begins else line))
        before = line if line[:1] == " " else ""
    lines[:] = told


def escape_bars(line: str) -> str:
    """|x| is a magnitude, unless it is code."""
    return re.sub(r"(`+)[^`]*\1|\|", lambda found: "\\|" if found[0] == "|" else found[0], line)


def setup(app: Sphinx) -> dict:
    app.connect("source-read", adapt)
    app.connect("autodoc-process-docstring", readable_docstring, priority=400)  # before napoleon
    app.connect("doctree-read", describe_figures)
    app.add_html_math_renderer("mathml", inline_renderers=(inline_math, None), block_renderers=(block_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
