"""What a trace means for a person: one verdict, its story, and what to do. Prints as text, shows as a card in
Jupyter."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from html import escape

from nanlab.tracing.causes import CAUSES, CONSTANT

CARD = (  # the colours come from the page, so that the card is readable on a light and on a dark one
    "<section style='border:1px solid currentColor;border-left:6px solid {};border-radius:4px;padding:.6em 1em;"
    "max-width:60em;color:inherit;background:transparent'><h4 style='margin:0'>{}</h4>"
    "<dl style='margin:0;overflow-wrap:anywhere'>{}</dl></section>"
)
ITEM = "<dt style='font-weight:600;margin-top:.5em'>{}</dt><dd style='margin:0 0 0 1em'>{}</dd>"
NOTHING = "No non-finite number reached the result, the gradients, the parameters or the optimizer state."


@dataclass(eq=False, repr=False)
class Report:
    """The first non-finite number that reached something that matters, or ``found = False``.

    ``cause``: one of the closed list ``nanlab.tracing.causes.CAUSES``. ``kind``: "nan" or "inf", as it was born.
    ``phase``: "data", "state", "forward", "backward" or "optimizer". ``op``: the operation, or the name of the tensor
    that was bad on arrival. ``module``: qualified name; for a gradient, of the forward operation. ``source``:
    "file.py:12", the innermost line of the user's own code; ``library``: the innermost line of a library, when the
    fault is in there, else ""; ``code``: function and text of the two. ``rows``: indices into the first dimension of
    the bad tensor (the batch, for data and activations), which is ``length`` long. ``others``: further independent
    births, earliest first. ``exception``: what the step raised, if it did. ``growth``: the largest |parameter| before
    each optimizer step up to the birth, and at it. From a trainer: ``batch`` (from 0), ``examples``: the rows of its
    dataset, where known, and ``texts`` of the bad rows.
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
    others: list[Report] = field(default_factory=list)
    exception: BaseException | None = None
    growth: list[float] = field(default_factory=list)
    batch: int | None = None
    examples: list[int] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        where = f"{self.op} in {self.module}" if self.module else self.op
        line = self.source or self.library or "an unknown line"
        return f"{self.cause}: {self.kind} in {self.phase}, {where}, at {line}" if self.found else "nothing found"

    def items(self) -> list[tuple[str, list[str]]]:
        """(title, paragraphs): the one content behind text and card."""
        growth, others = " → ".join(f"{g:.3g}" for g in self.growth[-6:]), [o.headline for o in self.others]
        listed = lambda rows: ", ".join(map(str, rows[:8])) + ", …" * (len(rows) > 8)
        rows = f"rows {listed(self.rows)} (from 0; there are {self.length})" if self.rows else ""
        examples = f"which are rows {listed(self.examples)} of the dataset" if self.examples else ""
        batch = f"batch {self.batch} (from 0)" if self.batch is not None else ""
        texts = [f"row {row}: {text}" for row, text in self.texts.items()]
        items = {
            "Line": [f"{self.source}  {self.code[0]}" if self.source and self.code[0] else ""],
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
        return CARD.format("#c0392b" if self.found else "#2e8b57", escape(f"locate: {self.headline}"), "".join(items))


def verdict(tracer, exception: BaseException | None = None) -> Report:
    """The earliest root among everything that reached a sink of the ``Tracer``; the other independent ones beside
    it."""
    reached = [(name, e) for name, events in tracer.sinks.items() for e in events if not excused(name, e, tracer)]
    roots = sorted(dict.fromkeys(e.root() for _, e in reached), key=lambda e: e.n)  # a set would order ties by chance
    births: dict = {}  # what comes from an earlier one, or from the same line, is no further birth
    for root in [e for e in roots if not e.deliberate] or roots:
        places = {place(e) for e in root.lineage()}
        birth = next((b for b in births if place(b) in places), root)
        births.setdefault(birth, []).extend(name for name, e in reached if e.root() is root)
    reports = [about(root, names, [e for _, e in reached if e.root() is root]) for root, names in births.items()]
    report = reports[0] if reports else Report()
    report.others, report.exception = reports[1:], exception
    if reports and tracer.growth:
        growth = [*tracer.growth, (tracer.n, tracer.largest())]
        before = sum(n <= roots[0].n for n, _ in growth)  # the next one is what the parameters were at the birth
        report.growth = [value for _, value in growth[: before + 1] if value == value]
    return report


def about(root, names: list[str], ends: list) -> Report:
    """What one birth looks like: from it to the NaN it became, to the sinks that it reached."""
    names, steps = list(dict.fromkeys(names)), [max(ends, key=lambda e: e.n)]
    while steps[0] is not root:
        steps.insert(0, next(p for p in steps[0].parents if p.root() is root))
    surfaced = f"It surfaced in {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}."
    report, row = Report(**{f.name: getattr(root, f.name) for f in fields(Report)}), CAUSES[root.cause]
    report.found, report.advice, report.lesson = True, row.advice, row.lesson
    report.explanation = f"{row.explain} {root.explanation}".strip()
    report.story = [*map(sentence, [*root.parents[:1], *steps]), surfaced]
    return report


def excused(name: str, event, tracer) -> bool:
    """Values that somebody means to be there, or that something already takes care of."""
    root = event.root()
    if tracer.scaler_skips and root.cause == "overflow" and root.phase == "backward":
        return not name.startswith(("parameter", "optimizer", "buffer"))  # GradScaler skips it and lowers its scale
    if name.startswith(("values", "masked values")):  # a mask or a sentinel handed back
        given = bool(root.name) and (tracer.went_backward or name.startswith("masked"))
        return root.deliberate or root.name.startswith(CONSTANT) or given
    if name.startswith(("variable", "the number")) and root.phase in ("data", "state") and not tracer.raised_about_nan:
        return True  # the step raised for a reason of its own
    return name.startswith(("parameter", "variable", "the number")) and root.deliberate  # a mask kept there


def place(e) -> tuple:
    return e.source, e.library, e.module, e.name


def sentence(e) -> str:
    where = " ".join(filter(None, [e.module and f"in {e.module}", e.source and f"at {e.source}"]))
    if e.phase in ("data", "state"):
        return f"{e.name} was already {e.kind} ({e.amount or 'a number'}) when it was used {where}."
    note, made = f" ({e.note})" if e.note else "", "passed on a deliberate" if e.deliberate else "made"
    return f"{e.phase}: {e.op}{note} {made} {e.kind} ({e.amount}) {where}."
