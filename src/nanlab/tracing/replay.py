"""Run a step under the tracer; run a trainer until a batch fails, and put everything back as it was.

``trainer.train()`` or ``trainer.evaluate()`` itself runs, so that accumulation, clipping, schedules and collators are the real
ones; only the library's own callbacks (logging, saving, progress, evaluation) are left out. Each batch first runs untraced.
If its loss or a gradient is not finite, random state, gradients and buffers go back and the same batch runs once more under
the tracer; optimizer steps always run under it. Afterwards parameters, gradients, optimizer state, random state (Python, NumPy,
torch) and the trainer's own state are what they were, bit for bit. This needs memory for one copy of them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from nanlab.errors import InputError
from nanlab.tracing.causes import bad, is_float
from nanlab.tracing.report import Report
from nanlab.tracing.tracer import Tracer

METHODS = {"train": "training_step", "eval": "prediction_step"}
OWNERS = ("state", "control", "callback_handler", "lr_scheduler", "accelerator", "optimizer")


def run(tracer: Tracer, step: Callable[[], Any]) -> tuple[Report, Any]:
    """Run ``step`` once; report on everything that should be finite afterwards. Compiled regions run eagerly."""
    result = exception = None
    try:
        with torch.compiler.set_stance("force_eager"), tracer:
            result = step()
    except Exception as error:  # it is part of the report
        exception = error
        tracer.abandoned(error)
    for name, value in outcomes(result):
        tracer.sink(name, value)
    tracer.sink_state()
    return Report.of(tracer, exception), result


def outcomes(result: Any) -> Iterator[tuple[str, Tensor | float]]:
    """What the step returned, by name: single numbers are losses and metrics, larger tensors are 'values'."""
    parts = {f"result[{k!r}]": v for k, v in result.items()} if isinstance(result, Mapping) else {"the result": result}
    for name, part in parts.items():
        for value in tree_leaves(part):
            if isinstance(value, (Tensor, float)):
                yield (f"values in {name}" if isinstance(value, Tensor) and value.numel() > 1 else name), value


def is_trainer(thing: object) -> bool:
    return all(hasattr(thing, name) for name in (*METHODS.values(), "train", "evaluate", "callback_handler"))


class Found(Exception):
    """Stops the trainer's loop. Private: nobody outside sees it."""


class Hunt:
    """One run of a trainer, up to the first batch that fails."""

    def __init__(self, trainer: Any, mode: str, limit: int | None) -> None:
        self.trainer, self.limit, self.training = trainer, limit, mode == "train"
        self.original, self.batch, self.report, self.tracer = getattr(trainer, METHODS[mode]), -1, Report(), Tracer()
        self.tracer.adopt(trainer.model)

    def step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of training_step or prediction_step."""
        self.batch += 1
        if self.batch == self.limit:
            raise Found
        undo = freeze_all(self.trainer, [b for b in model.buffers()], [p.grad for p in model.parameters()])
        gradients = [(p, p.grad) for p in model.parameters()]
        try:
            result = self.original(model, inputs, *args, **kwargs)
            healthy = not any(map(troubled, tree_leaves(result) if isinstance(result, tuple) else [result]))
        except Exception:  # it will raise again under the tracer
            result, healthy = None, False
        if healthy and not (self.training and any(is_float(p.grad) and bad(p.grad) for p, _ in gradients)):
            return result
        for p, gradient in gradients:
            p.grad = gradient
        undo()
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        self.tracer.scaler_skips = scaler is not None and scaler.get_scale() > 1
        report, result = run(self.tracer, lambda: self.original(model, inputs, *args, **kwargs))
        if report.found or report.exception:
            self.stop(report, inputs)
        return result

    def before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        super(Tracer, self.tracer).__enter__()
        self.tracer.before_step(optimizer)

    def after_optimizer(self, *_: Any) -> None:
        super(Tracer, self.tracer).__exit__(None, None, None)
        self.tracer.after_step()
        self.tracer.sink_state()
        if (report := Report.of(self.tracer)).found:
            self.stop(report, {})

    def stop(self, report: Report, inputs: Any) -> None:
        report.batch, self.report = self.batch, report
        tokens = (
            {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.dim() == 2}
            if hasattr(inputs, "items")
            else {}
        )
        if report.cause == "empty_mean" and not report.rows:
            report.rows = sorted({row for name, t in tokens.items() for row in unsupervised(name, t)})
        decode = getattr(getattr(self.trainer, "processing_class", None), "decode", None)
        for name, ids in tokens.items() if decode and report.phase in ("data", "forward", "backward") else ():
            for row in report.rows[:4] if name.endswith("input_ids") else ():
                if row < len(ids):
                    report.texts[row] = " | ".join(filter(None, [report.texts.get(row), decode(ids[row])[:200]]))
        raise Found


def troubled(value: object) -> bool:
    """A loss that is not finite, or NaN or inf among the logits (−inf is how logits are masked)."""
    return is_float(value) and bad(value) not in (("",) if value.numel() == 1 else ("", "-inf"))


def unsupervised(name: str, t: Tensor) -> list[int]:
    """Rows in which no token counts for the loss."""
    nothing = t == -100 if name.endswith("labels") else t == 0 if name.endswith("completion_mask") else None
    return [] if nothing is None else nothing.all(1).nonzero().flatten().tolist()


def locate_in_trainer(trainer: Any, mode: str, max_batches: int | None) -> Report:
    """See ``locate``. ``max_batches``: give up after so many healthy ones."""
    if mode not in METHODS:
        raise InputError(f"locate(): mode is {mode!r}; it is 'train' or 'eval'")
    if getattr(trainer, f"{mode}_dataset", None) is None:
        raise InputError(f"locate(): the trainer has no {mode}_dataset; give it one, or locate() a step of your own")
    modules = [m for m in vars(trainer).values() if isinstance(m, nn.Module)]
    parameters = list({id(p): p for m in modules for p in m.parameters()}.values())
    gradients, modes = [(p, p.grad) for p in parameters], [(m, m.training) for top in modules for m in top.modules()]
    tensors = [*parameters, *(b for m in modules for b in m.buffers()), *(g for _, g in gradients)]
    undo = freeze_all(trainer, tensors, [vars(m) for m in modules])
    hunt = Hunt(trainer, mode, max_batches)
    setattr(trainer, METHODS[mode], hunt.step)
    handler = trainer.callback_handler
    handler.callbacks = [c for c in handler.callbacks if not type(c).__module__.startswith(("transformers.", "trl."))]
    hooks = [
        register_optimizer_step_pre_hook(hunt.before_optimizer),
        register_optimizer_step_post_hook(hunt.after_optimizer),
    ]
    try:
        trainer.train() if mode == "train" else trainer.evaluate()
    except Found:
        pass
    finally:
        for hook in hooks:
            hook.remove()
        for p, gradient in gradients:
            p.grad = gradient
        for m, training in modes:
            m.training = training
        undo()
    return hunt.report


# -- put it back --------------------------------------------------------------------------------------------------------
def freeze_all(trainer: Any, *more: Any) -> Callable[[], None]:
    """A function that restores the random state, what the trainer and its helpers hold, and ``more``, all in place."""
    owners = [trainer, *(getattr(trainer, name, None) for name in OWNERS), *trainer.callback_handler.callbacks]
    owners += [getattr(o, name, None) for o in owners for name in ("gradient_state", "scaler", "optimizer")]
    undo = freeze([vars(o) for o in owners if hasattr(o, "__dict__")] + list(more), set())
    python, numpy, cpu, cuda = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.is_available(),
    )
    devices = torch.cuda.get_rng_state_all() if cuda else []

    def put_back() -> None:
        undo()
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(devices) if cuda else None

    return put_back


def freeze(value: Any, seen: set[int]) -> Callable[[], None]:
    """A function that gives a container or a tensor its contents back, whoever else holds it."""
    if id(value) in seen or not isinstance(value, (Tensor, dict, list, deque, set)):
        return lambda: None
    seen.add(id(value))
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return lambda: value.detach().copy_(copy)
    old = value.copy()
    entries = {k: v for k, v in value.items() if "dataset" not in str(k)}.values() if isinstance(value, dict) else old
    inner = [freeze(v, seen) for v in entries]

    def put_back() -> None:
        value.clear()
        value.extend(old) if isinstance(value, (list, deque)) else value.update(old)
        for undo in inner:
            undo()

    return put_back
