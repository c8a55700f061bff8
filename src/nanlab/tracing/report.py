"""What ``locate`` returns: prints as text, shows as a card in Jupyter."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

CARD = (  # the colours come from the page, so that the card is readable on a light and on a dark one
    "<section style='border:1px solid currentColor;border-left:6px solid {};border-radius:4px;padding:.6em 1em;"
    "max-width:60em;color:inherit;background:transparent'><h4 style='margin:0'>{}</h4>"
    "<dl style='margin:0;overflow-wrap:anywhere'>{}</dl></section>"
)
ITEM = "<dt style='font-weight:600;margin-top:.5em'>{}</dt><dd style='margin:0 0 0 1em'>{}</dd>"
NOTHING = "No non-finite number reached the result, the gradients, the parameters or the optimizer state."


def listed(rows: list[int]) -> str:
    return f"row{'s' * (len(rows) > 1)} " + ", ".join(map(str, rows[:8])) + ", …" * (len(rows) > 8)


@dataclass(eq=False, repr=False)
class Report:
    """The first non-finite number that reached something that matters, or ``found = False``; then ``explanation`` tells
    of one that the code looked at and left out.

    ``cause``: one of the closed list ``nanlab.tracing.causes.CAUSES``. ``kind``: "nan" or "inf", as it was born.
    ``phase``: "data", "state", "forward", "backward" or "optimizer". ``op``: the operation, or the name of the tensor
    that was bad on arrival. ``module``: qualified name; for a gradient, of the forward operation. ``source``:
    "file.py:12", the innermost line of the user's own code; ``library``: the innermost line of a library, when the
    fault is in there, else ""; ``code``: function and text of the two; ``call``: the line that gave a trainer to
    locate(), which says nothing about the fault. ``rows``: indices into the first dimension of
    the bad tensor (the batch, for data and activations), which is ``length`` long: all that are bad, also those that
    are left out later. ``others``: further independent births, earliest first. ``exception``: what the step raised, if
    it did. ``growth``: the largest |parameter| before each optimizer step up to the birth, and at it. From a trainer:
    ``batch`` (from 0), ``examples``: the rows of its dataset, where known, in the order of ``rows``, and ``texts`` of
    the bad rows.
    """

    found: bool = False
    cause: str = ""
    kind: str = ""
    phase: str = ""
    op: str = ""
    module: str = ""
    source: str = ""
    library: str = ""
    rows: list[int] = field(default_factory=list)
    length: int = 0
    explanation: str = ""
    story: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    advice: str = ""
    lesson: str = ""
    code: tuple[str, str] = ("", "")
    call: str = ""
    others: list[Report] = field(default_factory=list)
    exception: BaseException | None = None
    growth: list[float] = field(default_factory=list)
    batch: int | None = None
    examples: list[int] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The user's line, or the library's where the user has only called locate()."""
        return self.library if self.library and self.source in ("", self.call) else self.source

    @property
    def headline(self) -> str:
        where = f"{self.op} in {self.module}" if self.module else self.op
        line = self.line or "an unknown line"
        return f"{self.cause}: {self.kind} in {self.phase}, {where}, at {line}" if self.found else "nothing found"

    def items(self) -> list[tuple[str, list[str]]]:
        """(title, paragraphs): the one content behind text and card."""
        growth, others = " → ".join(f"{g:.3g}" for g in self.growth[-6:]), [o.headline for o in self.others]
        known = self.batch is None or self.examples or self.texts  # else its rows may be tokens
        of = "" if known and self.phase != "state" else " of the tensor"
        rows = f"{listed(self.rows)}{of} (from 0, of {self.length})" if self.rows else ""
        verb = "are" if self.examples[1:] else "is"
        examples = f"which {verb} {listed(self.examples)} of the dataset" if self.examples else ""
        batch = f"batch {self.batch} (from 0)" if self.batch is not None else ""
        texts = [f"row {row}: {text}" for row, text in self.texts.items()]
        items = {
            "Line": [f"{self.source}  {self.code[0]}" if self.line == self.source and self.code[0] else ""],
            "What": [self.explanation or ("" if self.found else NOTHING)],
            "In the library": [f"{self.library}  {self.code[1]}".strip()],
            "Rows": [", ".join(filter(None, [batch, rows, examples])), *texts],
            "Story": self.story,
            "Inputs": self.inputs,
            "Largest |parameter|": [growth if self.growth and self.growth[-1] > 10 * self.growth[0] else ""],
            "Advice": [self.advice],
            "Lesson": [self.lesson and f"notebooks/{self.lesson}.ipynb"],
            "Independent of it": [f"{len(others)} more:" if others else "", *others],
            "The step raised": [f"{type(self.exception).__name__}: {self.exception}" if self.exception else ""],
        }
        return [(title, shown) for title, lines in items.items() if (shown := [line for line in lines if line])]

    def __str__(self) -> str:
        blocks = (f"  {title}: " + "\n    ".join(lines) for title, lines in self.items())
        return "\n".join([f"locate: {self.headline}", *blocks])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        items = (ITEM.format(escape(title), "<br>".join(map(escape, lines))) for title, lines in self.items())
        colour = "#c0392b" if self.found or self.exception else "#2e8b57"
        return CARD.format(colour, escape(f"locate: {self.headline}"), "".join(items))
