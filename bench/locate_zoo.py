"""Which tool names a planted fault? The matrix fault × tool, printed by running it. ``python -m bench.locate_zoo``

A tool is *exact* if it gives the phase and the line (for bad data and state: the tensor's name), *near* if it gives
the module only, *wrong* if it points elsewhere, *detects* if it only says that something is not finite, *silent* if
it says nothing. On a healthy step everything but silence is a false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanlab.tracing import locate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from zoo import ZOO, Case, Truth

Verdict = dict[str, object]  # phase, lines, module, name, or only {"detected": True}
LINE = re.compile(r'zoo\.py", line (\d+)')


def is_bad(t: object, test: Callable = lambda t: ~torch.isfinite(t)) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point() and bool(test(t.detach()).any())


def use_locate(case: Case) -> Verdict:
    report = locate(case.step, model=case.model, optimizer=case.optimizer, **case.batch)
    if not report.found:
        return {}
    return {"phase": report.phase, "lines": [report.source], "module": report.module, "name": report.op}


def use_detect_anomaly(case: Case) -> Verdict:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                case.step()
        except RuntimeError as error:
            if "returned nan" not in str(error):
                return {}
            text = "".join(str(w.message) for w in said if "Traceback of forward" in str(w.message))
            return {"phase": "backward", "lines": [f"zoo.py:{n}" for n in LINE.findall(text)[-1:]]}
    return {}


def use_debug_underflow_overflow(case: Case) -> Verdict:
    from transformers.debug_utils import DebugUnderflowOverflow

    if case.model is None:
        return {}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        DebugUnderflowOverflow(case.model)
        try:
            case.step()
        except ValueError:
            frames = re.findall(r"^ {17}(\S+) (\S+)$", out.getvalue(), re.M)
            return {"phase": "forward", "module": frames[-1][0] if frames else ""}
    return {}


def use_hooks(case: Case, test: Callable = torch.isnan) -> Verdict:
    """Forward hooks with isnan, as the tutorials have them, but with the qualified name."""
    hits: list[str] = []
    for name, module in (case.model or nn.Module()).named_modules():
        look = lambda m, a, out, n=name: hits.append(n) if any(is_bad(t, test) for t in tree_leaves(out)) else None
        module.register_forward_hook(look)
    with contextlib.suppress(Exception):
        case.step()
    return {"phase": "forward", "module": hits[0]} if hits else {}


def use_loss_check(case: Case) -> Verdict:
    with contextlib.suppress(Exception):
        return {"detected": True} if any(map(is_bad, tree_leaves(case.step()))) else {}
    return {}


class Raise(TorchDispatchMode):
    """The obvious dispatch mode: stop at the first operation with a non-finite output."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "empty" not in func.__name__ and any(map(is_bad, tree_leaves(out))):
            raise FloatingPointError("backward" if torch._C._current_graph_task_id() != -1 else "forward")
        return out


def use_first_bad_operation(case: Case) -> Verdict:
    try:
        with Raise():
            case.step()
    except FloatingPointError as error:
        lines = [f"zoo.py:{n}" for n in LINE.findall(traceback.format_exc())[-1:]]
        return {"phase": str(error), "lines": lines}
    except Exception:
        return {}
    return {}


KINDS = ("exact", "near", "wrong", "detects", "silent", "crash", "false alarm")
TOOLS = {
    "locate": use_locate,
    "detect_anomaly": use_detect_anomaly,
    "DebugUnderflowOverflow": use_debug_underflow_overflow,
    "forward hooks, isnan": use_hooks,
    "first bad operation": use_first_bad_operation,
    "loss check": use_loss_check,
}


def judge(truth: Truth, verdict: Verdict) -> str:
    if truth.healthy:
        return "false alarm" if verdict else "quiet"
    if not verdict:
        return "silent"
    if verdict.get("detected"):
        return "detects"
    named = bool(truth.op) and verdict.get("name") in truth.op
    phase = verdict.get("phase") == truth.phase
    if phase and (named or not truth.op) and (not truth.line or truth.line in verdict.get("lines", [])):
        return "exact"
    if phase and truth.line and truth.line in verdict.get("lines", []):
        return "exact"
    return "near" if truth.module and verdict.get("module") == truth.module else "wrong"


def matrix(truths: list[Truth]) -> Iterator[tuple[Truth, dict[str, str]]]:
    for truth in truths:
        row = {}
        for name, tool in TOOLS.items():
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    row[name] = judge(truth, tool(truth.make()))
                except Exception:  # a tool that falls over has said nothing
                    row[name] = "crash"
        yield truth, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="one line for each fault, not only the sums")
    options = parser.parse_args()
    rows = list(matrix(list(ZOO.values())))
    if options.all:
        print(f"| fault | {' | '.join(TOOLS)} |\n|---|{'---|' * len(TOOLS)}")
        for truth, row in rows:
            print(f"| {truth.name} | {' | '.join(row.values())} |")
        print()
    faults = sum(not truth.healthy for truth, _ in rows)
    rest = "near | wrong | detects | silent | crash"
    print(f"| tool | exact, of {faults} | {rest} | false alarms, of {len(rows) - faults} |")
    print("|---|---|---|---|---|---|---|---|")
    for name in TOOLS:
        count = Counter(row[name] for _, row in rows)
        print(f"| {name} | {' | '.join(str(count[kind]) for kind in KINDS)} |")


if __name__ == "__main__":
    main()
