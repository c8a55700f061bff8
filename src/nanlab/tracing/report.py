"""What a trace means for a person: one verdict, its story, and what to do. Prints as text, shows as a card in Jupyter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape

from nanlab.tracing.causes import CAUSES
from nanlab.tracing.tracer import Event, Tracer


@dataclass
class Report:
    """The first non-finite number that reached something that matters, or ``found = False``.

    ``cause``: one of the closed list in ``nanlab.tracing.causes.CAUSES``. ``kind``: "nan" or "inf", as it was born.
    ``phase``: "data", "state", "forward", "backward" or "optimizer". ``op``: the operation, or the name of the tensor that
    was bad on arrival. ``source``: "file.py:12", the innermost line of the user's own code; ``library``: the innermost line
    of a library, when the fault is in there. ``rows``: rows of the tensor's first dimension, which is the batch for data
    and activations. ``others``: further independent births, earliest first. ``exception``: what the step raised, if it did.
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
    explanation: str = ""
    story: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    advice: str = ""
    lesson: str = ""
    others: list[Report] = field(default_factory=list)
    exception: BaseException | None = None
    growth: list[float] = field(default_factory=list)  # largest |parameter| before each optimizer step, and at the end
    batch: int | None = None  # of a trainer's run, from 0
    texts: dict[int, str] = field(default_factory=dict)  # row of the batch → its decoded text
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, tracer: Tracer, exception: BaseException | None = None) -> Report:
        """The verdict: the earliest root among everything that reached a sink."""
        reached = [
            (name, event)
            for name, events in tracer.sinks.items()
            for event in events
            if not excused(name, event, tracer)
        ]
        notes = ["Compiled regions ran eagerly; what only a fused kernel does is not seen."] * tracer.compiled
        if not reached:
            return cls(exception=exception, notes=notes)
        roots = sorted({id(e.root()): e.root() for _, e in reached}.values(), key=lambda e: e.n)
        first, seen = roots[0], {place(roots[0])}
        others = [e for e in roots[1:] if not (place(e) in seen or seen.add(place(e)))]
        report = cls.from_event(first, [(name, e) for name, e in reached if e.root() is first])
        report.others = [cls.from_event(e, [(name, x) for name, x in reached if x.root() is e]) for e in others]
        report.exception, report.notes = exception, notes
        report.growth = [*tracer.growth, tracer.largest()] if tracer.growth else []
        return report

    @classmethod
    def from_event(cls, e: Event, reached: list[tuple[str, Event]]) -> Report:
        row, site = CAUSES[e.cause], e.site
        names = [name for name, _ in reached]
        tail = f" and {len(names) - 3} more" if len(names) > 3 else ""
        story = [sentence(step) for step in path(e, reached[0][1])] + [f"It surfaced in {', '.join(names[:3])}{tail}."]
        return cls(
            found=True, cause=e.cause, kind=e.kind, phase=site.phase, op=site.op, module=site.module, source=site.source,
            library=site.library, rows=e.rows, explanation=f"{row.explain} {e.detail}".strip(), story=story, inputs=e.inputs,
            advice=row.advice, lesson=row.lesson,
        )  # fmt: skip

    @property
    def headline(self) -> str:
        where = f"{self.op} in {self.module}" if self.module else self.op
        return f"{self.cause}: {self.kind} born in {self.phase}, {where}, at {self.source or self.library or 'an unknown line'}"

    def lines(self) -> list[tuple[str, list[str]]]:
        """(title, paragraphs): the one content behind text and card."""
        if not self.found:
            body = [
                ("", ["No non-finite number reached the result, the gradients, the parameters or the optimizer state."])
            ]
        else:
            steps = max(len(self.growth) - 1, 0)
            grew = steps and self.growth[-1] > 10 * self.growth[0]
            growth = [
                f"{' → '.join(f'{g:.3g}' for g in self.growth[-6:])} (largest |parameter|, {steps} steps)"
            ] * bool(grew)
            rows = f"{self.rows[:8]}{'…' if len(self.rows) > 8 else ''}" if self.rows else ""
            batch = f"batch {self.batch}" if self.batch is not None else ""
            found_in = [", ".join(filter(None, [batch, rows and f"rows {rows}"]))] * bool(rows or batch)
            others = (
                [f"{len(self.others)} further, independent:", *(o.headline for o in self.others)] if self.others else []
            )
            body = [
                ("What", [self.explanation]),
                ("Library", [self.library] * bool(self.library)),
                ("Where in the data", found_in + [f"row {r}: {t}" for r, t in self.texts.items()]),
                ("Story", self.story),
                ("Inputs", self.inputs),
                ("Growth", growth),
                ("Advice", [self.advice]),
                ("Lesson", [f"notebooks/{self.lesson}.ipynb"]),
                ("Others", others),
            ]
        raised = [f"{type(self.exception).__name__}: {self.exception}"] if self.exception is not None else []
        return [(t, p) for t, p in [*body, ("The step raised", raised), ("Note", self.notes)] if p]

    def __str__(self) -> str:
        out = [self.headline if self.found else "locate: nothing found"]
        for title, paragraphs in self.lines():
            pad = f"  {title}: " if title else "  "
            out += [(pad if i == 0 else " " * len(pad)) + p for i, p in enumerate(paragraphs)]
        return "\n".join(out)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        color = "#c0392b" if self.found else "#2e8b57"
        head = self.headline if self.found else "Nothing found"
        rows = "".join(
            f"<dt style='font-weight:600;margin-top:.5em'>{escape(title)}</dt>"
            f"<dd style='margin:0 0 0 1em'>{'<br>'.join(map(escape, paragraphs))}</dd>"
            for title, paragraphs in self.lines()
        )
        return (  # colours come from the page, so the card is readable on a light and on a dark one
            f"<section style='border:1px solid currentColor;border-left:6px solid {color};border-radius:4px;padding:.6em 1em;"
            f"max-width:60em;color:inherit;background:transparent'><h4 style='margin:0'>{escape(head)}</h4>"
            f"<dl style='margin:.3em 0 0 0;overflow-wrap:anywhere'>{rows}</dl></section>"
        )


def excused(name: str, event: Event, tracer: Tracer) -> bool:
    """Values that somebody means to be there, or that something already takes care of."""
    root = event.root()
    if tracer.scaler_skips and root.cause == "overflow" and (root.site.phase == "backward" or root.scaled):
        return name.startswith(("gradient", "the loss"))  # GradScaler skips this step and lowers its scale
    if not name.startswith("values"):
        return False
    return root.deliberate or (bool(root.name) and tracer.went_backward)  # a mask, or a sentinel, handed back


def place(e: Event) -> tuple:
    return (e.site.source, e.site.library, e.site.module, e.name if e.site.phase in ("data", "state") else "")


def path(root: Event, last: Event) -> list[Event]:
    """From the birth to the event that reached the sink."""
    steps = [last]
    while steps[0] is not root and steps[0].parents:
        steps.insert(0, next((p for p in steps[0].parents if p.root() is root), steps[0].parents[0]))
    masks = [p for p in steps[0].parents if p not in steps][:1]
    return masks + steps


def sentence(e: Event) -> str:
    where = " ".join(filter(None, [e.site.module and f"in {e.site.module}", e.site.source and f"at {e.site.source}"]))
    amount = f"{e.count} of {math.prod(e.shape)} in {e.shape} {e.dtype}" if e.count else ""
    if e.site.phase in ("data", "state"):
        return f"{e.name or e.site.op} was already {e.kind} ({amount or 'a number'}) when it was used {where}."
    node = f" ({', '.join(filter(None, [e.site.node, e.site.note]))})" if e.site.node or e.site.note else ""
    verb = "put a deliberate" if e.deliberate else "made"
    return f"{e.site.phase}: {e.site.op}{node} {verb} {e.kind} ({amount}) {where}."
