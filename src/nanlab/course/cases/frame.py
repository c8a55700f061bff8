"""What a case is: a public report in miniature, with what its reader sees first and what is true."""

from __future__ import annotations

import contextlib
import inspect
import io
import random
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanlab.history import autopsy
from nanlab.tracing import locate
from nanlab.tracing.causes import CAUSES

TRAPS = ("finite and wrong", "NaN and harmless")
TOOLS = ("locate", "autopsy", "preflight", "none: compare with a reference")
PHASES = ("data", "state", "forward", "backward", "optimizer")


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """One public report in miniature.

    Seen at once: ``title``, ``symptom`` (as a user would post it), ``code`` and ``log()``. True, and kept back: the
    rest. ``broken``, ``fixed``: factories; each call gives a fresh ``step()`` without arguments, which returns a
    number, a tensor or a dict of them; under "log" a trainer's log_history. ``reference``: what it should return,
    computed another way (float64, by hand), met within ``tolerance`` (relative, and absolute below 1). It may hold
    some of the entries only. ``parts``: further functions or classes that ``code`` shows.

    ``cause``: one of the closed list ``nanlab.tracing.causes.CAUSES``, or "" where nothing non-finite matters.
    ``line``: the text of the guilty line in ``code``. ``op``, ``module``: as ``locate`` names them, if it matters.
    ``also``: further answers that a reader can defend, each a cause, a phase and the text of a line.
    ``trap``: "", "finite and wrong" or "NaN and harmless". ``tool``: which one sees it; ``look``: how, if it is not
    ``locate(step)`` or, of its "log", ``autopsy(log)``; ``finding``: the code that autopsy or preflight gives.
    ``family``: its class in the casebook file. ``link``: the public report. ``lesson``: stem of a notebook, by default
    that of the cause. ``story``: what happened there and what to take home. ``difficulty``: 1 to 3.
    """

    id: str
    title: str
    symptom: str
    broken: Callable[[], Callable[[], Any]]
    fixed: Callable[[], Callable[[], Any]]
    reference: Callable[[], Any]
    line: str
    link: str
    family: str
    story: str
    cause: str = ""
    phase: str = ""
    op: str = ""
    module: str = ""
    trap: str = ""
    tool: str = "locate"
    look: Callable[[], Any] | None = None
    finding: str = ""
    lesson: str = ""
    difficulty: int = 1
    tolerance: float = 1e-5
    parts: tuple[Any, ...] = ()
    also: tuple[tuple[str, str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.lesson:
            object.__setattr__(self, "lesson", CAUSES[self.cause].lesson)

    def __repr__(self) -> str:
        return f"Case({self.id}: {self.title})"

    # -- what the reader sees ----------------------------------------------------------------------------------------
    @property
    def code(self) -> str:
        """The source of the failing step, with what it needs."""
        return source(*self.parts, self.broken)

    @property
    def fix_code(self) -> str:
        """The source of the repaired step."""
        return source(self.fixed)

    def log(self) -> str:
        """Run the failing step once: what it printed, then what it returned or raised."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), quiet():
            try:
                print(line_of(self.fresh()()))
            except Exception as error:  # it is part of the log
                print(f"{type(error).__name__}: {error}")
        return out.getvalue().strip()

    # -- what is true ------------------------------------------------------------------------------------------------
    def fresh(self, fixed: bool = False) -> Callable[[], Any]:
        """A fresh step, the failing one or the fixed one. Seeds the global random state with 0, for the step too."""
        seed()
        return (self.fixed if fixed else self.broken)()

    def value(self, fixed: bool = False) -> Any:
        """What a fresh step returns, without its print-out."""
        with contextlib.redirect_stdout(io.StringIO()), quiet():
            return self.fresh(fixed)()

    def right(self, value: Any) -> bool:
        """Is ``value`` the reference, entry by entry, within the tolerance? NaN never is."""
        expected = self.reference()
        if not isinstance(expected, Mapping):
            value, expected = {"": value}, {"": expected}
        return all(close(value[name], expected[name], self.tolerance) for name in expected)

    @property
    def number(self) -> int:
        """The guilty line's number in ``code``, from 1."""
        return self.number_of(self.line)

    def number_of(self, line: str) -> int:
        """The number in ``code`` of the one line with this text."""
        found = [i for i, text in enumerate(self.code.splitlines(), 1) if text.strip() == line.strip()]
        if len(found) != 1:
            raise ValueError(f"case {self.id}: its code has {len(found)} lines {line!r}; it needs one")
        return found[0]

    @property
    def source(self) -> str:
        """The guilty line as ``locate`` names it: "masks.py:57"."""
        for part in (*self.parts, self.broken):
            lines, first = inspect.getsourcelines(part)
            for number, text in enumerate(lines, max(first, 1)):
                if text.strip() == self.line.strip():
                    return f"{Path(inspect.getsourcefile(part)).name}:{number}"
        raise ValueError(f"case {self.id}: no line {self.line!r} in its code")

    # -- what the tools say ------------------------------------------------------------------------------------------
    def see(self) -> Any:
        """What the tool that sees it says: a ``Report``, ``Findings``, or the value beside its reference as text."""
        with contextlib.redirect_stdout(io.StringIO()), quiet():
            seed()
            if self.look is not None:
                return self.look()
            if self.tool == "locate":
                return locate(self.fresh())
            if self.tool == "autopsy":
                return autopsy(self.fresh()()["log"])
        return f"returned:  {line_of(self.value())}\nreference: {line_of(self.reference())}"

    def exact(self, said: Any) -> bool:
        """Is what the tool said the whole truth? locate: cause, phase and line; nothing for a harmless NaN."""
        if self.tool == "locate" and self.trap == "NaN and harmless":
            return not said.found
        if self.tool == "locate":
            return (said.cause, said.phase, said.source) == (self.cause, self.phase, self.source)
        if self.finding:
            return self.finding in said.codes
        return not self.right(self.value())

    def grade(self, cause: str = "", phase: str = "", line: int = 0) -> dict[str, bool]:
        """Which parts of an answer are right. ``cause`` may be the kind of a trap; ``line`` is a number in ``code``.

        It is compared with the truth and with each of ``also``; the one that it agrees with most counts.
        """
        marks = [
            {
                "cause": bool(cause) and cause in (self.trap, true_cause),
                "phase": phase == true_phase,
                "line": line == self.number_of(text),
            }
            for true_cause, true_phase, text in ((self.cause, self.phase, self.line), *self.also)
        ]
        return max(marks, key=lambda parts: sum(parts.values()))


# -- small helpers ---------------------------------------------------------------------------------------------------
def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


@contextlib.contextmanager
def quiet():
    """No warnings and no progress bars: only what the case itself prints."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def source(*parts: Any) -> str:
    return "\n\n".join(textwrap.dedent(inspect.getsource(part)).rstrip() for part in parts)


def close(value: Any, expected: Any, tolerance: float) -> bool:
    value, expected = (torch.as_tensor(v).detach().double() for v in (value, expected))
    return value.shape == expected.shape and torch.allclose(value, expected, rtol=tolerance, atol=tolerance)


def line_of(value: Any) -> str:
    """A result as a line of a log: "loss 0.6931, grad_norm nan"."""
    entries, log = dict(value) if isinstance(value, Mapping) else {"result": value}, ""
    for entry in entries.pop("log", []):  # as a trainer prints it, without the times, which differ from run to run
        shown = {k: short(v) for k, v in entry.items() if not k.endswith(("_runtime", "_time", "_per_second", "_flos"))}
        log += f"{{{', '.join(f'{k!r}: {v}' for k, v in shown.items())}}}\n"
    return log + ", ".join(f"{name} {short(v)}" for name, v in entries.items())


def short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.detach().tolist()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(short, value))}]"
    return str(float(f"{value:.4g}")) if isinstance(value, float) else str(value)
