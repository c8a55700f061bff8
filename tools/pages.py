"""HTML of notebooks that needs no network: formulas as MathML, no script from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import latex2mathml.converter
import mistune
from nbconvert import HTMLExporter
from nbconvert.preprocessors import Preprocessor

_SHEET = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
@page {{ size: A4 landscape; margin: 9mm }}
body {{ font: 14px/1.4 sans-serif; max-width: 1080px; margin: auto }}
h1 {{ font-size: 21px; margin: 4px 0 }} p {{ margin: 5px 0 }} code {{ font-size: 13px }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ border-bottom: 1px solid #999; text-align: left; padding: 3px 6px; vertical-align: top }}
</style></head><body>{body}</body></html>"""
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


def sheet(path: Path) -> str:
    """A Markdown file as a page that prints on one side of A4."""
    text = path.read_text(encoding="utf-8")
    return _SHEET.format(title=text.splitlines()[0].lstrip("# "), body=mistune.html(text))
