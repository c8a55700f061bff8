"""``locate``: which operation made the first non-finite number that mattered, why, and on which line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nanlab.errors import refuse
from nanlab.tracing.judge import run
from nanlab.tracing.names import with_entries
from nanlab.tracing.replay import METHODS, is_trainer, locate_in_trainer
from nanlab.tracing.report import Report
from nanlab.tracing.tracer import Tracer
from nanlab.tracing.values import as_list

__all__ = ["Report", "locate"]


def locate(
    step: Any,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    mode: str = "train",
    max_batches: int | None = None,
    **named_tensors: Any,
) -> Report:
    """Explain the first non-finite number that reached a step's result, gradients, parameters or optimizer state.

    step: a callable without arguments: forward, backward, optimizer step, or a loop of them. It is run **once** and
        does what it does: nothing is undone afterwards. Or a transformers/TRL trainer: its batches are run until one
        fails, that one is replayed, and everything is put back, bit for bit (how: ``nanlab.tracing.replay``; what:
        ``nanlab.tracing.undo``).
    model, optimizer: for names. Without them, what ``step`` refers to is used.
    mode: "train" or "eval"; for a trainer.
    max_batches: give up after so many healthy batches; for a trainer.
    named_tensors: tensors, or dicts or lists of tensors, to be called by name if they are bad: ``locate(step,
        batch=batch)``, ``locate(step, **batch)``.

    A step that raises gives a report too: up to there, with ``report.exception``. Compiled models run eagerly here,
    and the inside of one fused kernel (flex_attention) is one operation. What is no operation of torch is not seen:
    Triton kernels that are launched by hand (TRL's are switched off meanwhile), and what other threads do. Each process
    of a distributed run reports its own; a trainer's stop at the same batch, so call it on all of them. While anything
    watches its operations, torch takes another way for a few, and rounds otherwise: the gradients of prod() and
    cumprod(), pinv(), lstsq(). On a GPU every check waits for the device; the cost was measured on CPU only.
    Raises `InputError`, in one line, where ``step`` is neither a function without arguments nor a trainer, or another
    argument is not what it should be.
    """
    check(step, model, optimizer, mode, max_batches, named_tensors)
    if is_trainer(step):
        return locate_in_trainer(step, mode, max_batches)
    tracer = Tracer()
    for name, value in named_tensors.items():
        tracer.names.add(value, f"batch {name}")
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(as_list(value)):
            tracer.names.add(entry, f"{name} {key}")
    held = dict(with_entries(surroundings(step)))
    models = {"": model} if model is not None else {k: v for k, v in held.items() if isinstance(v, nn.Module)}
    for name, m in models.items():
        tracer.names.adopt(m, f"{name}." if len(models) > 1 else "")
    for name, value in held.items():
        if isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
            tracer.names.adopt_parameter(name, value)
    for o in [optimizer] if optimizer is not None else held.values():
        if isinstance(o, Optimizer):
            tracer.names.adopt_optimizer(o)
    return run(tracer, step)[0]


def check(step: Any, model: Any, optimizer: Any, mode: str, max_batches: int | None, named: dict[str, Any]) -> None:
    """Raises `InputError`, with one line that says what is wrong and what to give instead."""
    name, give = getattr(step, "__name__", type(step).__name__), "give a function without arguments, or a trainer"
    kind, is_a = lambda value: type(value).__name__, lambda value, kind: value is None or isinstance(value, kind)
    wrong = {
        f"model is a {kind(model)}; give a torch Module, or leave it out": not is_a(model, nn.Module),
        f"optimizer is a {kind(optimizer)}; give a torch Optimizer, or leave it out": not is_a(optimizer, Optimizer),
        f"mode is {mode!r}; it is 'train' or 'eval'": mode not in METHODS,
        f"max_batches is {max_batches!r}; give a whole number from 1, or leave it out": max_batches is not None
        and (type(max_batches) is not int or max_batches < 1),
        f"step is the class {name}; {give}": isinstance(step, type),
        f"step is a {name}; {give}": not callable(step) and not is_trainer(step),
        f"step is the generator {name}; {give}": inspect.isgeneratorfunction(step),
        f"step wants arguments: {name}; {give}": callable(step) and wants_arguments(step),
    }
    for key, value in named.items():
        fits = is_a(value, (Tensor, Mapping, list, tuple))  # a field of a batch may be None
        wrong[f"{key} is a {kind(value)}; give a tensor or a dict of tensors, or leave it out"] = not fits
    refuse("locate()", wrong)


def wants_arguments(step: Callable) -> bool:
    try:
        inspect.signature(step.forward if isinstance(step, nn.Module) else step).bind()
    except (TypeError, ValueError) as error:  # a ValueError: a builtin that does not say
        return isinstance(error, TypeError)
    return False


def surroundings(step: Callable) -> dict[str, Any]:
    """What a function refers to: its closure, its globals, the object it is bound to, partial arguments."""
    if isinstance(step, functools.partial):
        return {**surroundings(step.func), **{f"argument{i}": a for i, a in enumerate(step.args)}, **step.keywords}
    function = inspect.unwrap(getattr(step, "__func__", step))
    scope = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    owner = dict(getattr(getattr(step, "__self__", step), "__dict__", {}))
    return {**owner, **scope.globals, **scope.nonlocals} if scope else owner
