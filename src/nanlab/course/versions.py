"""What you see on your version: the table that `python -m bench.versions` measured, with the reader's column marked."""

from __future__ import annotations

import json
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VERSIONS = Path(__file__).with_name("versions.json")
NAMES = ("transformers", "trl")
MARK = "background:rgba(127,127,127,.25);font-weight:bold"


def load_versions() -> dict:
    """`columns`: releases of torch, transformers and TRL and what each `seen` (row id: words); `rows`: what was run."""
    return json.loads(VERSIONS.read_text(encoding="utf-8"))


def version_rows(table: dict, lesson: str | None = None) -> list[list[str]]:
    """Cells of the rows that belong to a lesson ("10"), or of all: what was run, what is shown, then one a column."""
    rows = [row for row in table["rows"] if lesson is None or lesson in row["lessons"]]
    return [[row["run"], row["shown"], *(column["seen"][row["id"]] for column in table["columns"])] for row in rows]


def installed() -> dict[str, str]:
    """The reader's releases; "missing" where there is none."""
    found = {}
    for name in NAMES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def show_versions(lesson: str | None = None) -> None:
    """Show the rows of a lesson under every measured release, and mark the reader's. Outside a notebook: print them."""
    from IPython import get_ipython
    from IPython.display import display

    table, yours = load_versions(), installed()
    text = as_text(table, lesson, yours)
    if get_ipython() is None:
        print(text)
        return
    display({"text/html": as_html(table, lesson, yours), "text/plain": text}, raw=True)


def _is_yours(column: dict, yours: dict[str, str]) -> bool:
    return all(column[name] == yours[name] for name in NAMES)


def _caption(table: dict, yours: dict[str, str]) -> str:
    mine = " and ".join(f"{name} {release}" for name, release in yours.items())
    if any(_is_yours(column, yours) for column in table["columns"]):
        return f"Yours: {mine}."
    return f"Yours, {mine}, is none of these; in a checkout `python -m bench.versions --here` says what you see."


def as_text(table: dict, lesson: str | None, yours: dict[str, str]) -> str:
    """The table for the eye and for a screen reader: each row with one answer a release, * before the reader's."""
    releases = [f"{'* ' if _is_yours(column, yours) else ''}transformers {column['transformers']}, trl {column['trl']}"
                for column in table["columns"]]  # fmt: skip
    width = max(map(len, releases))
    lines = [_caption(table, yours)]
    for run, shown, *cells in version_rows(table, lesson):
        lines.append(f"{run}: {shown}")
        lines += [f"  {release:{width}}  {cell}" for release, cell in zip(releases, cells, strict=True)]
    return "\n".join(lines)


def as_html(table: dict, lesson: str | None, yours: dict[str, str]) -> str:
    styles = ["text-align:left", "text-align:left"]
    heads = ["what was run", "shown"]
    for column in table["columns"]:
        mine = _is_yours(column, yours)
        heads.append(f"transformers {column['transformers']}<br>trl {column['trl']}" + ("<br>yours" if mine else ""))
        styles.append("text-align:left;" + (MARK if mine else "font-weight:normal"))
    head = "".join(f"<th scope='col' style='{s}'>{text}</th>" for text, s in zip(heads, styles, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td style='{s}'>{escape(cell)}</td>" for cell, s in zip(row, styles, strict=True)) + "</tr>"
        for row in version_rows(table, lesson)
    )
    caption = f"<caption style='text-align:left'>{escape(_caption(table, yours))}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
