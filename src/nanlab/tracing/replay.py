"""Run a step under the tracer; run a trainer until a batch fails, and put everything back as it was.

``trainer.train()`` or ``trainer.evaluate()`` itself runs, so that accumulation, clipping, schedules and collators are
the real ones; only the library's own callbacks (logging, saving, progress) are left out. Each batch first runs
untraced. If its loss or a gradient is not finite, or if it raises, random state, gradients and buffers go back and
the same batch runs once more under the tracer; optimizer steps always run under it. Afterwards parameters, gradients,
optimizer state, random state (Python, NumPy, torch) and the trainer's own state are what they were, bit for bit. This
needs memory for one copy of them.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from nanlab.errors import InputError
from nanlab.tracing.causes import bad, is_float
from nanlab.tracing.report import Report, verdict
from nanlab.tracing.tracer import RAISED, Tracer, run

METHODS = {"train": "training_step", "eval": "prediction_step"}
OWNERS = ("state", "control", "callback_handler", "lr_scheduler", "accelerator")

PARTS = ("chosen", "rejected", "reference")  # TRL puts them one below the other in one batch
UNSELECTED = (("labels", -100), ("completion_mask", 0))  # what stands where a token does not count


def is_trainer(thing: object) -> bool:
    return all(hasattr(thing, name) for name in (*METHODS.values(), "train", "evaluate", "callback_handler"))


class Found(Exception):
    """Stops the trainer's loop. Private: nobody outside sees it."""


class Hunt:
    """One run of a trainer, up to the first batch that fails or to ``limit`` batches."""

    def __init__(self, trainer: Any, mode: str, limit: int | None) -> None:
        self.trainer, self.mode, self.limit, self.batch = trainer, mode, limit, -1
        self.original, self.report, self.tracer = getattr(trainer, METHODS[mode]), Report(), Tracer()
        self.tracer.adopt(trainer.model)
        self.fetched: deque = deque(maxlen=8)  # (rows of the dataset, the batch made of them), the last ones

    def step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of training_step or prediction_step."""
        self.batch += 1
        if self.batch == self.limit:
            raise Found
        given = dict(inputs) if isinstance(inputs, Mapping) else {}  # as it came: a step may take entries out
        undo, result, raised = freeze_all(self.trainer, [model], weights=False), None, True
        with contextlib.suppress(*RAISED):  # it will raise again under the tracer
            result, raised = self.original(model, copy.copy(inputs), *args, **kwargs), False
        grads = (p.grad for p in model.parameters()) if self.mode == "train" else ()
        if not (raised or any(map(troubled, tree_leaves(result))) or any(is_float(g) and bad(g) for g in grads)):
            return result
        undo()
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        self.tracer.scaler_skips = scaler is not None and scaler.get_scale() > 1
        for name, value in given.items():
            self.tracer.name(value, f"batch {name}")
        report, result = run(self.tracer, lambda: self.original(model, inputs, *args, **kwargs))
        if report.found or report.exception:
            self.stop(report, given)
        return result

    def before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        super(Tracer, self.tracer).__enter__()
        self.tracer.before_step(optimizer)

    def after_optimizer(self, *_: Any) -> None:
        super(Tracer, self.tracer).__exit__(None, None, None)
        self.tracer.after_step()
        self.tracer.sink_state()
        if (report := verdict(self.tracer)).found:
            self.stop(report, {})

    def stop(self, report: Report, inputs: dict[str, Any]) -> None:
        """Add the batch, the rows without any label if the mean was empty, their dataset rows and their text."""
        self.report, report.batch = report, self.batch
        tokens = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.dim() == 2}
        if report.cause == "empty_mean" and not report.rows:
            off = [t == unselected for k, t in tokens.items() for end, unselected in UNSELECTED if k.endswith(end)]
            report.rows = sorted({row for mask in off for row in mask.all(1).nonzero().flatten().tolist()})
            report.length = max(map(len, off), default=0)
        index = next((i for i, batch in reversed(self.fetched) if alike(batch, inputs)), [])
        size = len(index) or max(map(len, tokens.values()), default=0)
        blocks = len(PARTS) if any(c.__module__.startswith("trl.") for c in type(self.trainer).__mro__) else 1
        if report.length in [size * n for n in range(1, blocks + 1)] and (
            report.phase in ("data", "forward") or report.cause == "gradient_at_edge"
        ):
            report.examples = sorted({index[row % size] for row in report.rows}) if index else []
            for row in report.rows[:4] if hasattr(getattr(self.trainer, "processing_class", None), "decode") else ():
                part = PARTS[row // size] if report.length > size else ""
                report.texts[row] = " | ".join(self.texts(tokens, row, row % size, part))
        raise Found

    def texts(self, tokens: dict[str, Tensor], row: int, example: int, part: str) -> Iterator[str]:
        """What a row says, without padding. TRL has its parts one below the other, or each under a name of its own."""
        names = {k: k.removesuffix("input_ids").strip("_") for k in tokens if k.endswith("input_ids")}
        for key, name in names.items():
            ids, mask = tokens[key], tokens.get(key.replace("input_ids", "attention_mask"))
            row_here = row if row < len(ids) else example
            if row_here < len(ids) and (part in ("", name) or not name) and (name != "prompt" or len(names) == 1):
                kept = ids[row_here] if mask is None else ids[row_here][mask[row_here].bool()]
                words, label = self.trainer.processing_class.decode(kept), name or part
                yield (f"{label}: " if label else "") + (words if len(words) < 90 else f"{words[:40]} … {words[-40:]}")


def troubled(value: object) -> bool:
    """A loss that is not finite, or NaN or inf among the logits (−inf is how logits are masked)."""
    return is_float(value) and bad(value) not in (("",) if value.numel() == 1 else ("", "-inf"))


def alike(batch: Any, inputs: dict[str, Any]) -> bool:
    """Do two batches hold the same numbers, wherever they lie?"""
    old, new = ([t.cpu() for t in tree_leaves(b) if isinstance(t, Tensor)] for b in (dict(batch), inputs))
    same = lambda a, b: torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    return bool(old) and len(old) == len(new) and all(map(same, old, new))


@contextlib.contextmanager
def watch_fetches(fetched: deque) -> Iterator[None]:
    """Note which rows of a dataset make up each batch. Loaders in other processes are not seen."""
    original = _MapDatasetFetcher.fetch

    def fetch(fetcher: Any, index: Any) -> Any:
        batch = original(fetcher, index)
        if isinstance(index, list) and isinstance(batch, Mapping):
            fetched.append((index, batch))
        return batch

    _MapDatasetFetcher.fetch = fetch
    try:
        yield
    finally:
        _MapDatasetFetcher.fetch = original


def locate_in_trainer(trainer: Any, mode: str, max_batches: int | None) -> Report:
    """See ``locate``. ``max_batches``: give up after so many healthy ones."""
    if mode not in METHODS:
        raise InputError(f"locate(): mode is {mode!r}; it is 'train' or 'eval'")
    if getattr(trainer, f"{mode}_dataset", None) is None:
        raise InputError(f"locate(): the trainer has no {mode}_dataset; give it one, or locate() a step of your own")
    hunt, handler = Hunt(trainer, mode, max_batches), trainer.callback_handler
    undo = freeze_all(trainer, [m for m in vars(trainer).values() if isinstance(m, nn.Module)])
    setattr(trainer, METHODS[mode], hunt.step)
    handler.callbacks = [c for c in handler.callbacks if not type(c).__module__.startswith(("transformers.", "trl."))]
    hooks = [
        register_optimizer_step_pre_hook(hunt.before_optimizer),
        register_optimizer_step_post_hook(hunt.after_optimizer),
    ]
    try:
        with contextlib.suppress(Found), watch_fetches(hunt.fetched):
            trainer.train() if mode == "train" else trainer.evaluate()
    finally:
        for hook in hooks:
            hook.remove()
        undo()
    if hunt.batch < 0 and not hunt.report.found:
        hunt.report.explanation = f"Not one batch was run: the {mode}_dataset is empty, or too small for a batch."
    return hunt.report


# -- put it back -----------------------------------------------------------------------------------------------------
def freeze_all(trainer: Any, models: list[nn.Module], weights: bool = True) -> Callable[[], None]:
    """A function that restores, in place, the random state and what the trainer, its helpers and its models hold."""
    names = [*OWNERS, "optimizer"] if weights else OWNERS  # a batch alone does not change the optimizer
    owners = [trainer, *(getattr(trainer, name, None) for name in names), *trainer.callback_handler.callbacks]
    owners += [getattr(o, name, None) for o in owners for name in ("gradient_state", "scaler", *names[len(OWNERS) :])]
    parameters, modules = [p for m in models for p in m.parameters()], [m for top in models for m in top.modules()]
    gradients, modes = [(p, p.grad) for p in parameters], [(m, m.training) for m in modules]
    tensors = [b for m in models for b in m.buffers()] + [g for _, g in gradients] + (parameters if weights else [])
    undo = freeze([tensors, *(vars(o) for o in [*owners, *models] if hasattr(o, "__dict__"))], set())
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def put_back() -> None:
        for p, gradient in gradients:
            p.grad = gradient
        for m, training in modes:
            m.training = training
        undo()
        for restore, value in zip((random.setstate, np.random.set_state, torch.set_rng_state), state, strict=True):
            restore(value)
        torch.cuda.set_rng_state_all(devices) if devices else None

    return put_back


def freeze(value: Any, seen: set[int]) -> Callable[[], None]:
    """A function that gives a container or a tensor its contents back, whoever else holds it."""
    if id(value) in seen or not isinstance(value, (Tensor, dict, list, deque, set)):
        return lambda: None
    seen.add(id(value))
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return lambda: value.detach().copy_(copy)
    old, named = value.copy(), isinstance(value, dict)
    inner = [freeze(v, seen) for v in ([v for k, v in old.items() if "dataset" not in str(k)] if named else old)]

    def put_back() -> None:
        value.clear()
        value.update(old) if isinstance(value, (dict, set)) else value.extend(old)
        for undo in inner:
            undo()

    return put_back
