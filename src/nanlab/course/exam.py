"""An exam paper made of cases: show a post, take an answer, say which parts are right, reveal, and draw the score.

    from nanlab.course.cases import exam
    paper = Paper(exam(0))
    paper.post(1)
    paper.check(1, {"cause": "overflow", "phase": "forward", "line": 7})
    paper.reveal(1)
    paper.score()

A reveal comes only after an answer, so that a notebook run with open answers gives nothing away.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import html
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanlab.course import plots
from nanlab.course.cases.frame import PHASES, TRAPS, Case, line_of
from nanlab.errors import InputError
from nanlab.tracing.causes import CAUSES
from nanlab.tracing.report import Report

PARTS = {"cause": "", "phase": "", "line": 0}  # of an answer, each with its open value
CHOICES = {"cause": (*(c for c in CAUSES if c != "unknown"), *TRAPS), "phase": PHASES}
LATER = {"overflow", "log_of_zero", "division_by_zero"}  # where an inf is born that becomes NaN later
HINTS = (  # answers given, true causes, what to think about
    ({"zero_over_zero", "division_by_zero"}, {"empty_mean"}, "Does the denominator count something?"),
    ({"empty_mean"}, {"zero_over_zero"}, "0/0 it is, but no mean runs over nothing."),
    ({"zero_times_inf", "inf_minus_inf"}, LATER, "That may come later; where does the inf come from?"),
    (set(CAUSES), {"bad_state", "bad_input"}, "Was it there before step() ran?"),
    (set(CAUSES), {"gradient_at_edge"}, "What is the last number that is still right?"),
    (set(CAUSES), {"NaN and harmless"}, "Who reads that number afterwards?"),
    (set(CAUSES), {"finite and wrong"}, "What should this number be?"),
)
STATES = {"right at once": "#10202f", "right later": "#8a97a5", "missed": "white", "open": "#e3e6ea"}
HATCHES = {"right later": "//", "missed": "xx"}
SAID = {
    "locate": "What locate(step) says",
    "autopsy": "What autopsy(log) says",
    "preflight": "What preflight says",
    "none: compare with a reference": "No tool sees it: compare with a reference",
}


# -- what is shown ---------------------------------------------------------------------------------------------------
PRE = (  # bold and italic instead of colours, which a dark page would hide; numbers are left out when code is copied
    "<pre style='font-family:var(--jp-code-font-family,monospace);white-space:pre;overflow-x:auto;line-height:1.4;"
    "margin:.3em 0 1em'>{}</pre>"
)
NUMBER = "<span style='opacity:.75;user-select:none'>{}</span>"
TITLE = "<p style='font-weight:600;margin:.8em 0 0'>{}</p>"


@dataclass(frozen=True, repr=False)
class Note:
    """Blocks of (title, kind, text), for Jupyter and as plain text. Kinds: "prose", "text", "python", "numbered"."""

    blocks: tuple[tuple[str, str, str], ...]

    def _repr_html_(self) -> str:
        heading = lambda title: TITLE.format(html.escape(title)) if title else ""
        return "\n".join(heading(title) + SHOWN[kind](text) for title, kind, text in self.blocks)

    def __repr__(self) -> str:
        said = []
        for title, kind, text in self.blocks:
            lines = counted(text) if kind == "numbered" else text.splitlines()
            prose = textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
            body = prose if kind == "prose" else textwrap.indent("\n".join(lines), "    ")
            said.append(f"{title}\n{body}" if title else body)
        return "\n\n".join(said)


def linked(text: str) -> str:
    """A paragraph; addresses and names of notebooks become links."""
    text = re.sub(r"https?://\S+", r"<a href='\g<0>'>\g<0></a>", html.escape(text))
    return "<p>" + re.sub(r"notebooks/(\w+)\.ipynb", r"<a href='\1.ipynb'>\1</a>", text) + "</p>"


def coded(code: str, number: str = "") -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    look = HtmlFormatter(style="bw", noclasses=True, nobackground=True, nowrap=True)
    lines = highlight(code, PythonLexer(), look).rstrip().splitlines()
    return PRE.format("\n".join(number.format(f"{n:3}  ") + line for n, line in enumerate(lines, 1)))


def counted(code: str) -> list[str]:
    return [f"{n:3}  {line}".rstrip() for n, line in enumerate(code.splitlines(), 1)]


SHOWN = {
    "prose": linked,
    "text": lambda text: PRE.format(html.escape(text)),
    "python": coded,
    "numbered": lambda code: coded(code, NUMBER),
}


# -- one answer ------------------------------------------------------------------------------------------------------
def problem(case: Case, answer: Any) -> str:
    """Why ``answer`` cannot be graded yet, in one sentence, or "". Spelling is taken kindly, see ``tidy``."""
    if not isinstance(answer, Mapping):
        return f"an answer looks like {PARTS}, not like {answer!r}."
    if unknown := [key for key in answer if key not in PARTS]:
        return f"an answer has a cause, a phase and a line; {unknown[0]!r} is none of them."
    given = tidy(answer)
    for part, choices in CHOICES.items():
        if given[part] and given[part] not in choices:
            near = difflib.get_close_matches(str(given[part]), choices, 1, 0.7)
            mean = f" Did you mean {near[0]!r}?" if near else ""
            return f"{answer[part]!r} is not on the list of {part}s.{mean} The list: {', '.join(choices)}."
    if not isinstance(given["line"], int) or not 0 <= given["line"] <= len(case.code.splitlines()):
        return f"line is a number from 1 to {len(case.code.splitlines())}, not {answer['line']!r}."
    still = [part for part in PARTS if not given[part] and not (part == "phase" and given["cause"] in TRAPS)]
    if len(still) == len(PARTS):
        return "not answered yet."
    return f"still open: {' and '.join(still)}." if still else ""


def tidy(answer: Mapping) -> dict[str, Any]:
    """The three parts; "Zero over-zero " is zero_over_zero, "nan and harmless" is the trap, and "7" is 7."""
    given = {**PARTS, **answer}
    for part, choices in CHOICES.items():
        plain = lambda text: re.sub(r"[\s_-]+", "_", str(text).strip().lower())
        given[part] = next((c for c in choices if plain(c) == plain(given[part])), given[part])
    if isinstance(given["line"], str) and given["line"].strip().isdecimal():
        given["line"] = int(given["line"])
    return given


def truths(case: Case) -> list[tuple[str, str, int]]:
    """(cause, phase, line number) of the truth, then of what else can be defended."""
    others = [(cause, phase, case.number_of(text)) for cause, phase, text in case.also]
    return [(case.cause, case.phase, case.number), *others]


def closest(case: Case, given: Mapping) -> int:
    """The line number of the truth that the answer agrees with most; any line of its statement is that line."""
    span = statement(case.code, given["line"])
    agreement = lambda t: (given["cause"] in (case.trap, t[0])) + (given["phase"] == t[1]) + (t[2] in span)
    return max(truths(case), key=agreement)[2]


def grade(case: Case, answer: Mapping) -> dict[str, bool]:
    """Which parts are right. A trap called by its name is not asked for a phase; any line of the statement counts."""
    given = tidy(answer)
    number = closest(case, given)
    line = number if number in statement(case.code, given["line"]) else given["line"]
    marks = case.grade(given["cause"], given["phase"], line)
    unasked = not given["phase"] and given["cause"] == case.trap
    return {**marks, "phase": marks["phase"] or unasked or (not case.phase and marks["cause"])}


def statement(code: str, line: int) -> range:
    """The lines of the innermost statement at ``line`` that holds no other statement, or only that line."""
    simple = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.stmt) and not hasattr(n, "body")]
    spans = (range(n.lineno, n.end_lineno + 1) for n in simple)
    return next((span for span in spans if line in span), range(line, line + 1))


def sentence(case: Case, answer: Mapping) -> str:
    """What is right and, of the rest, where to look; never the answer itself."""
    given, marks = tidy(answer), grade(case, answer)
    right = [part for part in PARTS if marks[part]]
    if len(right) == len(PARTS):
        return f"Right: {', '.join(filter(None, [given['cause'], given['phase'], 'line ' + str(given['line'])]))}."
    praise = f"The {' and the '.join(right)} {'is' if len(right) == 1 else 'are'} right."
    said = [praise if right else "No part is right."]
    if right and not marks["cause"]:
        said.append("The cause is another one.")
    if not marks["cause"]:
        said.append(hint(given["cause"], of(case)))
    if right and not marks["phase"]:
        said.append("The phase is another one.")
    if not marks["line"]:
        said.append(
            f"Not line {given['line']}: look further {'up' if given['line'] > closest(case, given) else 'down'}."
        )
    return "Not yet. " + " ".join(filter(None, said))


def of(case: Case) -> str:
    """What the case is a case of: its trap, or its cause."""
    return case.trap or case.cause


def hint(given: str, true: str) -> str:
    return next((text for answers, causes, text in HINTS if given in answers and true in causes), "")


# -- the paper -------------------------------------------------------------------------------------------------------
class Paper:
    """An exam over ``cases``, numbered from 1. It remembers the first and the last full answer before a reveal."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = list(cases)
        self.first: dict[int, dict[str, bool]] = {}
        self.last: dict[int, dict[str, bool]] = {}
        self.revealed: set[int] = set()

    def __repr__(self) -> str:
        return "\n".join(f"{n:3}  {c.title} (difficulty {c.difficulty} of 3)" for n, c in enumerate(self.cases, 1))

    def case(self, number: int) -> Case:
        if number not in range(1, len(self.cases) + 1):
            raise InputError(f"no case {number!r}: this paper has cases 1 to {len(self.cases)}")
        return self.cases[int(number) - 1]

    def post(self, number: int) -> Note:
        """What the user wrote, the log of running the code, and the code with its line numbers."""
        case = self.case(number)
        return Note((("", "prose", case.symptom), ("Log", "text", case.log()), ("Code", "numbered", case.code)))

    def check(self, number: int, answer: Mapping) -> bool:
        """Print which parts of the answer are right, and keep it for the score. True if all are."""
        case = self.case(number)
        if trouble := problem(case, answer):
            print(f"Case {number}: {trouble}")
            return False
        marks = grade(case, answer)
        if number not in self.revealed:
            self.first.setdefault(number, marks)
            self.last[number] = marks
        late = " (Revealed before: the score keeps the answer you had.)" if number in self.revealed else ""
        print(f"Case {number}: {sentence(case, answer)}{late}")
        return all(marks.values())

    def reveal(self, number: int, give_up: bool = False) -> None:
        """Show the truth, what the tool says, the story and the fix; only after an answer, or if you give up."""
        from IPython.display import display

        case = self.case(number)
        if number not in self.last and not give_up:
            print(f"Case {number}: answer first. Stuck? Add give_up=True to this call; it counts as no answer.")
            return
        for marks in (self.first, self.last):
            marks.setdefault(number, dict.fromkeys(PARTS, False))
        self.revealed.add(number)
        said = localised(case, case.see())
        display(Note((*truth(case), (SAID[case.tool], "prose", ""))))
        display(Note((("", "text", said),)) if isinstance(said, str) else said)
        display(Note(ending(case)))

    # -- the score -----------------------------------------------------------------------------------------------------
    def states(self) -> Iterator[tuple[str, str]]:
        """(topic, state) of each part of each case: its cause or trap once it is known, its difficulty before."""
        for number, case in enumerate(self.cases, 1):
            first, last = self.first.get(number, {}), self.last.get(number, {})
            known = number in self.revealed or (last and all(last.values()))
            topic = of(case) if known else f"open, difficulty {case.difficulty}"
            for part in PARTS:
                right = "right at once" if first.get(part) else "right later" if last.get(part) else "missed"
                yield topic, right if known else "open"

    def score(self) -> None:
        """Print the points and what to read again, and draw strong and weak causes."""
        counts = Counter(state for _, state in self.states())
        bars = self.bars()
        total, once, later = counts.total(), counts["right at once"], counts["right later"]
        missed, still = counts["missed"], counts["open"]
        print(f"{once} of {total} parts right at once, {later} later, {missed} missed, {still} open.")
        for topic, bar in bars.items():
            if not bar["open"] and bar["right at once"] < bar.total():
                lessons = dict.fromkeys(f"notebooks/{c.lesson}.ipynb" for c in self.cases if topic == of(c))
                print(f"  {topic}: {bar['right at once']} of {bar.total()} at once; read {', '.join(lessons)}")
        self.draw()

    def bars(self) -> dict[str, Counter]:
        """Topic: how many parts are in which state; the weakest first, the open ones last."""
        bars: dict[str, Counter] = {}
        for topic, state in self.states():
            bars.setdefault(topic, Counter())[state] += 1
        weak = lambda topic: (bars[topic]["open"] > 0, bars[topic]["right at once"] / bars[topic].total(), topic)
        return {topic: bars[topic] for topic in sorted(bars, key=weak)}

    def draw(self) -> None:
        """Stacked bars, a row for each cause: what was right at once, right later, missed; and what is open."""
        from matplotlib.ticker import MultipleLocator

        bars = self.bars()
        fig, ax = plots.figure(figsize=(7.5, 1.4 + 0.32 * len(bars)))
        start = dict.fromkeys(bars, 0)
        for state in [state for state in STATES if any(bar[state] for bar in bars.values())]:
            widths = [bar[state] for bar in bars.values()]
            style = {"color": STATES[state], "hatch": HATCHES.get(state), "edgecolor": "#5a6570"}
            ax.barh(list(bars), widths, left=list(start.values()), label=state, **style)
            start = {topic: start[topic] + bars[topic][state] for topic in bars}
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set(
            xlabel="parts of answers (three a case: cause, phase, line)",
            ylabel="true cause,\nwhere known",
            axisbelow=True,
        )
        ax.xaxis.set_major_locator(MultipleLocator(len(PARTS)))
        fig.legend(frameon=False, loc="outside upper center", ncols=4, fontsize=9)
        told = lambda bar: ", ".join(f"{bar[state]} {state}" for state in STATES if bar[state])
        each = [f"{topic}: {told(bar)}" for topic, bar in bars.items()]
        plots.show(fig, alt=f"Stacked bars of parts of answers by cause, the weakest first: {'; '.join(each)}.")


# -- what a reveal says ----------------------------------------------------------------------------------------------
def truth(case: Case) -> tuple[tuple[str, str, str], ...]:
    """Lines such as "finite and wrong: empty_mean in forward, line 7", the code of that line, what else is accepted."""
    said = []
    for cause, phase, number in truths(case):
        where = " in ".join(filter(None, [cause, phase]))
        said.append(", ".join(filter(None, [where, f"line {number}"])))
    others = (("", "prose", f"Accepted too: {'; '.join(said[1:])}"),) if said[1:] else ()
    head = ": ".join(filter(None, [case.trap, said[0]]))
    return ("", "prose", head), ("", "python", case.line.strip()), *others


def ending(case: Case) -> tuple[tuple[str, str, str], ...]:
    """The story, the fix with its value beside the reference, where it comes from and where to read on."""
    value, expected = case.value(True), case.reference()
    if isinstance(expected, Mapping):
        value = {name: value[name] for name in expected}
    verdict = f"the same within {case.tolerance:g}" if case.right(value) else "NOT the same"
    return (
        ("The story", "prose", case.story),
        ("The fix", "python", case.fix_code),
        ("Its value", "text", f"fixed:     {line_of(value)}\nreference: {line_of(expected)}\n→ {verdict}"),
        ("", "prose", f"Report: {case.link}"),
        ("", "prose", f"Lesson: notebooks/{case.lesson}.ipynb"),
    )


def localised(case: Case, said: Any) -> Any:
    """A report that names the lines as the reader sees them: "line 7" for "logs.py:208"."""
    if not isinstance(said, Report):
        return said
    numbers, shown = {}, 0
    for part in (*case.parts, case.broken):
        lines, first = inspect.getsourcelines(part)
        name = Path(inspect.getsourcefile(part)).name
        numbers |= {f"{name}:{first + i}": f"line {shown + i + 1}" for i in range(len(lines))}
        shown += len(lines) + 1  # an empty line between the parts
    swap = lambda text: re.sub(r"\b\w+\.py:\d+", lambda m: numbers.get(m[0], m[0]), text)
    others = [localised(case, other) for other in said.others]
    return dataclasses.replace(said, source=swap(said.source), story=[*map(swap, said.story)], others=others)
