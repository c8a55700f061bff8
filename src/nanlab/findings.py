"""What a check found: the small types that `preflight` and `autopsy` share, and how they read."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SHOWN = 5  # rows named in a table; a longer list is no help to a reader
_WIDTH = 64  # characters of the last column of the text table


@dataclass(frozen=True)
class Finding:
    """One kind of fault, wherever it occurs.

    `rows` are the places, from 0 upward: rows of a data set, or steps of a run. It is empty for a fault of the set-up.
    `count` is the number of places or of things (tensors, settings) with the fault. `fix` says what to do or to run
    next, `lesson` names the notebook that explains it, and `confidence` is "certain", "likely" or "possible".
    """

    code: str
    count: int
    message: str
    fix: str
    lesson: str
    rows: Sequence[int] = field(default=(), repr=False)
    confidence: str = "certain"

    def where(self) -> str:
        """The first places as text: "3, 17, 20, …", or "" where the fault has no row."""
        first = ", ".join(str(row) for row in self.rows[:SHOWN])
        return first + ", …" if len(self.rows) > SHOWN else first

    def to_dict(self) -> dict:
        """Plain types for JSON, with every row."""
        return {**vars(self), "count": int(self.count), "rows": [int(row) for row in self.rows]}


def amount(number: int, one: str, many: str = "") -> str:
    """How many of what: "1 row", "1,234 rows"; `many` where an s is not enough."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


class Findings(Sequence):
    """A sequence of `Finding`: false when nothing was found, a table when printed or shown in Jupyter.

    `subject` says what was looked at ("100 rows"), `unit` what `Finding.rows` counts ("row" or "step").
    """

    def __init__(self, findings: Iterable[Finding], *, subject: str, unit: str = "row") -> None:
        self._findings = tuple(findings)
        self.subject = subject
        self.unit = unit

    def __getitem__(self, index):
        return self._findings[index]

    def __len__(self) -> int:
        return len(self._findings)

    @property
    def codes(self) -> list[str]:
        """The codes in order, to ask `"empty_text" in findings.codes`."""
        return [finding.code for finding in self]

    def to_dict(self) -> dict:
        """Plain types for JSON."""
        return {"subject": self.subject, "unit": self.unit, "findings": [finding.to_dict() for finding in self]}

    def _title(self) -> str:
        return f"{amount(len(self), 'finding')} in {self.subject}" if self else f"Nothing found in {self.subject}."

    def __repr__(self) -> str:
        if not self:
            return self._title()
        head = ("code", "count", f"{self.unit}s", "sure", "what, and what to do")
        cells = [(f.code, str(f.count), f.where(), f.confidence) for f in self]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=False)]
        lines = [self._title(), "", "  ".join([*map(str.ljust, head[:4], widths), head[4]])]
        for finding, cell in zip(self, cells, strict=True):
            told = [*textwrap.wrap(finding.message, _WIDTH)]
            told += textwrap.wrap(finding.fix, _WIDTH, initial_indent="→ ", subsequent_indent="  ")
            told.append(f"  lesson {finding.lesson}")
            lines.append("  ".join([*map(str.ljust, cell, widths), told[0]]))
            lines += [" " * (sum(widths) + 8) + line for line in told[1:]]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if not self:
            return f"<p>{html.escape(self._title())}</p>"
        head = "".join(f"<th>{name}</th>" for name in ("code", "count", f"{self.unit}s", "sure", "what", "what to do"))
        rows = []
        for f in self:
            cells = (f.code, str(f.count), f.where(), f.confidence, f.message, f"{f.fix} (lesson {f.lesson})")
            rows.append("".join(f'<td style="text-align:left">{html.escape(cell)}</td>' for cell in cells))
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<p><b>{html.escape(self._title())}</b></p><table><tr>{head}</tr>{body}</table>"
