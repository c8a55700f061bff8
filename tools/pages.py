"""HTML of notebooks that needs no network: formulas as MathML, no script from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import latex2mathml.converter
from nbconvert import HTMLExporter
from nbconvert.preprocessors import Preprocessor

TEMPLATES = Path(__file__).parent / "templates"
# Code first: a dollar in it is a dollar.
_MATH = re.compile(r"(?P<code>```.*?```|`[^`\n]*`)|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+?)\$", flags=re.DOTALL)
_LOADS = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^"'> ]+""")


class MathML(Preprocessor):
    """TeX between dollars in Markdown cells becomes MathML, which browsers set by themselves."""

    def preprocess_cell(self, cell, resources, index):
        if cell.cell_type == "markdown":
            cell.source = _MATH.sub(_as_mathml, cell.source)
        return cell, resources


def _as_mathml(match: re.Match) -> str:
    if match["code"]:
        return match["code"]
    display = "block" if match["block"] else "inline"
    return latex2mathml.converter.convert(match["block"] or match["inline"], display=display)


def loads(page: str) -> list[str]:
    """What a page would fetch from a network when it is opened. Links that a reader may follow are not among it."""
    return _LOADS.findall(page)


def linked(page: str, ending: str) -> str:
    """Links from notebook to notebook lead to their pages, which stand beside this one."""
    return re.sub(r'href="(\d\d_\w+)\.ipynb(?=["#])', rf'href="\1{ending}', page)


def html(path: Path) -> str:
    """A notebook with its outputs as one page."""
    exporter = HTMLExporter(
        template_name="page",
        extra_template_basedirs=[str(TEMPLATES)],
        preprocessors=[MathML],
        exclude_anchor_links=True,
    )
    page, _ = exporter.from_filename(str(path))
    return linked(page, ".html")
