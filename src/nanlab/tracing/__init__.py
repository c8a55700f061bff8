"""``locate``: which operation made the first non-finite number that mattered, why, and on which line."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nanlab.errors import InputError
from nanlab.tracing.report import Report
from nanlab.tracing.tracer import Tracer

__all__ = ["Report", "locate"]


def locate(
    step: Callable[[], Any] | Any,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    mode: str = "train",
    max_batches: int | None = None,
    **named_tensors: Any,
) -> Report:
    """Explain the first non-finite number that reached a step's result, gradients, parameters or optimizer state.

    Args:
        step: a callable without arguments: forward, backward, optimizer step, or a loop of them. It is run **once** and does
            what it does: nothing is undone afterwards. Or a transformers/TRL trainer: its batches are run until one fails,
            that one is replayed, and everything is put back, bit for bit (see ``nanlab.tracing.replay``).
        model, optimizer: for names. Without them, what ``step`` refers to is used.
        mode: "train" or "eval"; trainers only.
        max_batches: stop after so many healthy batches; trainers only.
        named_tensors: tensors, or dicts of tensors, to be called by name if they are bad: ``locate(step, batch=batch)``.

    Raises:
        InputError: ``step`` is neither a callable nor a trainer, or ``mode`` is unknown.

    A step that raises gives a report too: up to there, with ``report.exception``. Compiled models run eagerly here. What is
    inside one fused kernel (flex_attention, a Triton kernel) is seen as one operation. On a GPU every check waits for the
    device; only the CPU cost was measured.
    """
    if all(hasattr(step, name) for name in ("training_step", "prediction_step", "train", "evaluate")):
        from nanlab.tracing.replay import locate_in_trainer

        return locate_in_trainer(step, mode, max_batches)
    if not callable(step):
        raise InputError(f"locate(): step is a {type(step).__name__}; give a function without arguments, or a trainer")
    tracer = Tracer()
    with torch.no_grad():
        introduce(tracer, step, model, optimizer, named_tensors)
    return trace(tracer, step)[0]


def introduce(tracer: Tracer, step: Callable, model, optimizer, named: Mapping[str, Any]) -> None:
    """Tell the tracer what things are called: what was given, else what the step refers to."""
    for name, value in named.items():
        entries = (
            {f"{name} {k}": v for k, v in value.items()} if isinstance(value, Mapping) else {f"batch {name}": value}
        )
        for label, v in entries.items():
            tracer.name(v, label)
    around = surroundings(step)
    models = {"": model} if model is not None else {k: v for k, v in around.items() if isinstance(v, nn.Module)}
    for name, m in models.items():
        tracer.adopt(m, f"{name}." if len(models) > 1 else "")
    optimizers = (
        [optimizer] if optimizer is not None else [v for v in around.values() if isinstance(v, torch.optim.Optimizer)]
    )
    for o in optimizers:
        tracer.adopt_optimizer(o)


def surroundings(step: Callable) -> dict[str, Any]:
    """What a function refers to: closure, globals, bound self, partial arguments."""
    if isinstance(step, functools.partial):
        return {**{f"argument{i}": a for i, a in enumerate(step.args)}, **step.keywords, **surroundings(step.func)}
    owner = getattr(step, "__self__", None)
    found = dict(getattr(owner, "__dict__", {}))
    function = inspect.unwrap(getattr(step, "__func__", step))
    if inspect.isfunction(function):
        scope = inspect.getclosurevars(function)
        found |= {**scope.globals, **scope.nonlocals}
    return found


def trace(tracer: Tracer, step: Callable[[], Any]) -> tuple[Report, Any]:
    """Run ``step`` once under ``tracer`` and report on everything that should be finite afterwards."""
    result, exception = None, None
    with torch.compiler.set_stance("force_eager"):
        try:
            with tracer:
                result = step()
        except Exception as error:
            exception = error
            tracer.abandoned(error)
    for name, value in numbered(result):
        tracer.sink(name, value) if isinstance(value, Tensor) else tracer.sink_number(name, value)
    tracer.sink_state()
    return Report.of(tracer, exception), result


def numbered(result: Any) -> list[tuple[str, Any]]:
    """The leaves of what the step returned: scalars are losses and metrics, larger tensors are 'values'."""
    if isinstance(result, Mapping):
        pairs = [(f"result[{k!r}]", leaf) for k, v in result.items() for leaf in tree_leaves(v)]
    else:
        pairs = [("the result", leaf) for leaf in tree_leaves(result)]
    large = lambda v: isinstance(v, Tensor) and v.numel() > 1
    return [
        (f"values in {n}" if large(v) else n, v) for n, v in pairs if isinstance(v, (Tensor, float)) and not is_fine(v)
    ]


def is_fine(value: Tensor | float) -> bool:
    return isinstance(value, float) and math.isfinite(value)
