"""What should be finite after a step, what of it matters, and the one verdict with its story."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nanlab.tracing.causes import CAUSES, CONSTANT
from nanlab.tracing.events import Event, merge
from nanlab.tracing.names import parts_of
from nanlab.tracing.report import NOTHING, Report
from nanlab.tracing.tracer import Tracer
from nanlab.tracing.values import bad, is_float, key_of
from nanlab.tracing.where import USER, line_of, whose

SUMS = ("mean", "sum")  # a −inf that is one of these is no mask
# On a GPU TRL launches kernels (Triton) that are no operations of torch: it shall take what it has for other devices.
KERNELS = (("trl.kernels.chunked_logprob", "_TRITON_AVAILABLE"), ("trl.trainer.utils", "is_triton_available"))
LOOKED_AT = "But the code looked at such a number, which it may have left out:"
ABOUT_NAN = re.compile(r"NaN|(?i:(?<![a-z])nans?(?![a-z])|isnan|\binf(s|inity)?\b|(?<!de)finite|diverge)").search
RAISED = (Exception, SystemExit)  # some loops leave with sys.exit() when the loss is NaN


def run(tracer: Tracer, step: Callable[[], Any]) -> tuple[Report, Any]:
    """Run ``step`` once; report on everything that should be finite afterwards. Compiled regions run eagerly."""
    result = exception = None
    try:
        with torch.compiler.set_stance("force_eager"), without_kernels(), tracer:
            result = step()
    except RAISED as error:  # it is part of the report
        exception = error
        abandoned(tracer, error)
    # Single numbers are losses and metrics; larger tensors are 'values', among which a mask may be handed back.
    named = {f"result[{k!r}]": v for k, v in result.items()} if isinstance(result, Mapping) else {"the result": result}
    for name, part in named.items():
        for value in (leaf for v in tree_leaves(part) for leaf in tree_leaves(fields_of(v))):
            if is_float(value) and (key_of(value) in tracer.came or key_of(value) not in tracer.taint):
                continue  # handed back as it came in
            several = isinstance(value, Tensor) and value.numel() > 1
            below = is_float(value) and bad(value) == "-inf" and (several or tracer.counts.made(value) not in SUMS)
            role = "masked" if several and below else "values" if several or below else ""
            what = "values in " if role else "" if isinstance(value, Tensor) or value is part else "a number in "
            tracer.sink(what + name, value, role)
    sink_state(tracer)
    return verdict(tracer, exception), result


def without_kernels() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for name, switch in KERNELS:
        if hasattr(module := sys.modules.get(name), switch):
            off = (lambda *_: False) if callable(getattr(module, switch)) else False
            stack.enter_context(mock.patch.object(module, switch, off))
    return stack


def fields_of(value: object) -> object:
    """What an object holds; other values as they are."""
    if isinstance(value, (Tensor, ModuleType)) or callable(value):
        return value
    slots = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else value
    return getattr(value, "__dict__", slots)


def sink_state(tracer: Tracer) -> None:
    """Parameters, gradients, optimizer state; buffers only if this step made them NaN."""
    states = [(p, k, v) for o in tracer.optimizers for p, state in o.state.items() for k, v in state.items()]
    held = [(f"gradient of {name}", p.grad, "") for name, p in tracer.names.parameters.values()]
    held += [(f"parameter {name}", p, "parameter") for name, p in tracer.names.parameters.values()]
    held += [(f"optimizer state {k} of {tracer.names.of(p)}", v, "state") for p, k, v in states]
    for name, value, role in held:  # what no operation has met does not matter in this step
        if is_float(value) and key_of(value) in tracer.taint:
            tracer.sink(name, value, role)
    for name, buffer in tracer.names.buffers.values() if tracer.taint else ():
        events = tracer.guilty(buffer) if is_float(buffer) and bad(buffer) == "nan" else ()
        if any(e.root().name != tracer.names.find(buffer)[0] for e in events):
            tracer.sink(f"buffer {name}", buffer, "state")


def abandoned(tracer: Tracer, error: BaseException, role: str = "") -> None:
    """The step raised: what its frames held, and what it says, is all there is to judge by.

    ``role``: of what was only looked at. Between a trainer's batches it is "held": much is looked at there.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        seen = whose(frame.f_code) == USER and not tracer.refused
        for name, value in list(frame.f_locals.items()) if seen else ():
            tracer.sink(f"variable {name} when the step raised", value, "held")
            for label, part in parts_of(name, value, 1) if not isinstance(value, (Tensor, nn.Module)) else ():
                tracer.sink(f"variable {label} when the step raised", part, "held")
    about_nan = tracer.raised_about_nan = bool(ABOUT_NAN(str(error)))
    tracer.sinks["", "what the operation refused"] = tracer.refused
    tracer.sinks["held", "the number at which the step raised"] = tracer.last if about_nan else ()
    tracer.sinks[role, "the whole number by which the step raised"] = () if about_nan else tracer.chosen
    if tracer.looked >= tracer.engine:  # else the step has gone on since, and raised for a reason of its own
        tracer.sinks[role, "a number that was looked at before the step raised"] = looked_at(tracer)


def looked_at(tracer: Tracer) -> list[Event]:
    """What is behind the bad numbers that Python has read, or asked whether they are; not those that are meant."""
    # An inf that came in is where the best so far starts.
    meant = lambda r: r.deliberate or r.name.startswith(CONSTANT) or (r.kind == "inf" and r.phase in ("data", "state"))
    seen = merge([tracer.answer, *tracer.reads.values()])
    return [e for e in seen if not meant(e.root()) and not excused("", e, tracer)]


def verdict(tracer: Tracer, exception: BaseException | None = None) -> Report:
    """The earliest root among everything that reached a sink of the ``Tracer``; the other independent ones beside
    it."""
    reached = [(name, e) for (role, name), ends in tracer.sinks.items() for e in ends if not excused(role, e, tracer)]
    # Bad before the step, and seen nowhere but where it was: it comes after what broke something.
    unused = lambda root: all(root.name.startswith(name) for name, e in reached if e.root() is root)
    # dict.fromkeys(), since a set would order ties by chance
    roots = sorted(dict.fromkeys(e.root() for _, e in reached), key=lambda e: (unused(e), e.n))
    place = lambda e: (e.source, e.library, e.module, e.name)
    births: dict = {}  # what comes from an earlier one, or from the same line, is no further birth
    passed = {line_of(at)[0] for at in tracer.passed}  # nor is the gradient of what was bad
    for root in [e for e in roots if not e.deliberate] or roots:
        follows = root.phase == "backward" and root.source in passed
        places = set(map(place, root.lineage()))
        birth = next((b for b in births if follows or place(b) in places), root)
        births.setdefault(birth, []).extend(name for name, e in reached if e.root() is root)
    reports = [about(root, names, [e for _, e in reached if e.root() is root]) for root, names in births.items()]
    report = reports[0] if reports else Report()
    if not reports and (read := looked_at(tracer)):
        report.explanation = f"{NOTHING} {LOOKED_AT} {about(read[0].root(), [], read[:1]).headline}."
    report.others, report.exception = reports[1:], exception
    if reports:
        growth = [*tracer.growth, (tracer.n, tracer.ranges()[0])]
        before = sum(n <= roots[0].n for n, _ in growth)  # the next one is what the parameters were at the birth
        report.growth = [value for _, value in growth[: before + 1] if value == value]
    return report


def about(root: Event, names: list[str], ends: list[Event]) -> Report:
    """What one birth looks like: from it to the NaN it became, to the sinks that it reached."""
    later = lambda e: e.phase != root.phase and root.phase not in ("data", "state")
    names, steps = list(dict.fromkeys(names)), [min(ends, key=lambda e: (later(e), e.kind != "nan", e.n))]
    while steps[0] is not root:
        steps.insert(0, next(p for p in steps[0].parents if p.root() is root))
    origin = root
    while origin.parents:
        origin = origin.parents[0]
    surfaced = f"It surfaced in {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}."
    report, row = Report(**{f.name: getattr(root, f.name) for f in fields(Report)}), CAUSES[root.cause]
    report.found, report.advice, report.lesson = True, row.advice, row.lesson
    report.explanation = f"{row.explain} {root.explanation}".strip()
    report.story = [*map(sentence, [*[origin] * (origin is not root), *steps]), surfaced]
    return report


def excused(role: str, event: Event, tracer: Tracer) -> bool:
    """Values that somebody means to be there, or that something already takes care of.

    ``role``: of a sink: a "parameter", other "state" of model and optimizer, "values" that the step returned, such that
    are "masked" by −inf, what was "held" when the step raised; "" for losses, gradients, metrics.
    """
    root = event.root()
    if tracer.scaler_skips and root.cause == "overflow" and root.phase == "backward":
        return role not in ("parameter", "state")  # GradScaler skips it and lowers its scale
    if role in ("values", "masked"):  # a mask or a sentinel handed back
        given = bool(root.name) and (tracer.went_backward >= 0 or role == "masked")
        return root.deliberate or root.name.startswith(CONSTANT) or given
    masked = role in ("parameter", "held") and root.deliberate  # a mask kept there
    # Or the step raised for a reason of its own.
    return masked or (role == "held" and root.phase in ("data", "state") and not tracer.raised_about_nan)


def sentence(e: Event) -> str:
    where = " ".join(filter(None, [e.module and f"in {e.module}", e.line and f"at {e.line}"]))
    if e.phase in ("data", "state"):
        return f"{e.name} was already {e.kind} ({e.amount or 'a number'}) when it was used {where}."
    note, made = f" ({e.note})" if e.note else "", "passed on a deliberate" if e.deliberate else "made"
    return f"{e.phase}: {e.op}{note} {made} {e.kind} ({e.amount}) {where}."
