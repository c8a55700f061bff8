"""Which tool names what a public report was about? The matrix case × tool. ``python -m bench.casebook_matrix``

Judged as in ``bench.locate_zoo``: *exact* is phase and line, *near* the module only, *wrong* something else, *detects*
only that a number is not finite, *silent* nothing. ``locate`` must also name the cause. A case that is right (a NaN
that does no harm) is *quiet* or a *false alarm*. Where a number is finite and wrong, all of them are silent: the column
"seen by" has what does see it.
"""

from __future__ import annotations

import contextlib
import io
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import torch
from torch import nn

from bench.locate_zoo import Verdict, judge, use_debug_underflow_overflow, use_hooks
from nanlab.course.cases import CASES, Case
from nanlab.tracing import locate, surroundings

LINE = re.compile(r'nanlab/course/cases/(\w+\.py)", line (\d+)')


ROOT = "the model itself"  # what a hook on the outermost module names; near, if the fault is in its forward


def model_of(step: Callable) -> nn.Module | None:
    """The model that a step refers to, by itself or through its trainer."""
    around = surroundings(step).values()
    found = (v if isinstance(v, nn.Module) else getattr(v, "model", None) for v in around)
    return next((m for m in found if isinstance(m, nn.Module)), None)


def on_model(tool: Callable[[SimpleNamespace], Verdict]) -> Callable[[Case], Verdict]:
    """A tool of the zoo's bench, which takes an object with ``step`` and ``model``."""

    def use(case: Case) -> Verdict:
        step = case.fresh()
        verdict = tool(SimpleNamespace(step=step, model=model_of(step)))
        return {**verdict, "module": verdict["module"] or ROOT} if "module" in verdict else verdict

    return use


def use_locate(case: Case) -> Verdict:
    report = locate(case.fresh())
    named = [report.source] if report.cause == case.cause else []
    return {"phase": report.phase, "lines": named, "module": report.module} if report.found else {}


def use_detect_anomaly(case: Case) -> Verdict:
    step = case.fresh()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                step()
        except RuntimeError as error:
            if "returned nan" not in str(error):
                return {}
            text = "".join(str(w.message) for w in said if "Traceback of forward" in str(w.message))
            return {"phase": "backward", "lines": [f"{file}:{n}" for file, n in LINE.findall(text)[-1:]]}
        except Exception:  # the step's own, which names a line too
            places = LINE.findall(traceback.format_exc())
            return {"phase": "forward", "lines": [f"{file}:{n}" for file, n in places[-1:]]}
    return {}


def use_loss_check(case: Case) -> Verdict:
    """Losses and other single numbers that the step returns, except for gradients. A step that raises is noticed."""
    try:
        result = case.fresh()()
    except Exception:
        return {"detected": True}
    entries = result.items() if isinstance(result, Mapping) else [("result", result)]
    numbers = {k: torch.as_tensor(v).float() for k, v in entries if k != "log" and not k.startswith("grad")}
    watched = [v for k, v in numbers.items() if v.numel() == 1 or "loss" in k]
    return {"detected": True} if any(not v.isfinite().all() for v in watched) else {}


TOOLS = {
    "locate": use_locate,
    "detect_anomaly": use_detect_anomaly,
    "DebugUnderflowOverflow": on_model(use_debug_underflow_overflow),
    "forward hooks, isnan": on_model(use_hooks),
    "loss check": use_loss_check,
}


def matrix(cases: list[Case]) -> Iterator[tuple[Case, dict[str, str]]]:
    for case in cases:
        healthy = case.trap == "NaN and harmless"
        module = case.module or (ROOT if case.phase == "forward" else "")
        truth = SimpleNamespace(healthy=healthy, op=(), phase=case.phase, line=case.source, module=module)
        row = {}
        for name, tool in TOOLS.items():
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                try:
                    row[name] = judge(truth, tool(case))
                except Exception:  # a tool that falls over has said nothing
                    row[name] = "crash"
        yield case, row


def total(verdicts: list[str]) -> str:
    count = Counter(verdicts)
    return ", ".join(f"{n} {verdict}" for verdict, n in count.most_common())


def main() -> None:
    rows = list(matrix(CASES))
    print(f"| case | trap | seen by | {' | '.join(TOOLS)} |\n|---|---|---|{'---|' * len(TOOLS)}")
    for case, row in rows:
        tool = case.tool.removeprefix("none: compare with ")
        print(f"| [{case.id}]({case.link}) | {case.trap} | {tool} | {' | '.join(row.values())} |")
    totals = [total([row[name] for _, row in rows]) for name in TOOLS]
    traps = sum(bool(case.trap) for case in CASES)
    print(f"| **{len(CASES)} cases** | {traps} traps | | {' | '.join(totals)} |")


if __name__ == "__main__":
    main()
