"""Run a trainer until a batch fails, run that batch again under the tracer, and put everything back as it was.

``trainer.train()`` or ``trainer.evaluate()`` itself runs, so that accumulation, clipping, schedules, collators and
your own callbacks are the real ones, up to ``max_steps``. Nothing is saved, shown or (in training) evaluated, what is
logged goes into ``state.log_history`` and to nobody else, and a guard looks away. Each batch first runs untraced. If
its loss or a gradient is not finite, if a parameter or a buffer has become NaN, if a tensor that the trainer keeps is
no longer finite, or if it raises, all that it changed goes back, and the same batch runs once more under the tracer.
What runs between the batches always runs under it: collators, callbacks, clipping, optimizer steps.

Afterwards all that can be reached from the trainer holds what it held, bit for bit: parameters, gradients, optimizers,
schedulers, scaler, modules and their hooks, callbacks, collators, generators of random numbers, your own attributes.
This needs memory for two copies of the tensors. Out of reach are iterators and loaders in use, files, threads, tables
and clients of other packages, what a data set holds in lists and tensors, attributes of classes, and globals.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from nanlab.errors import InputError
from nanlab.tracing.causes import CONSTANT
from nanlab.tracing.events import Event
from nanlab.tracing.judge import RAISED, abandoned, run, sink_state, verdict
from nanlab.tracing.names import UNNAMED, parts_of, with_entries
from nanlab.tracing.report import Report, listed
from nanlab.tracing.tracer import Tracer
from nanlab.tracing.undo import freeze, global_state
from nanlab.tracing.values import as_list, bad, bad_mask, is_float
from nanlab.tracing.where import line_of

METHODS = {"train": "training_step", "eval": "prediction_step"}
LIBRARIES = ("transformers.", "trl.", "nanlab.guard")
# Their callbacks save, log and show, but for these, which end the run in time or change weights.
KEPT = {"DefaultFlowCallback", "SyncRefModelCallback", "PEFTAdapterEMACallback", "BEMACallback"}
SILENT = ("save_model", "_save_checkpoint", "_evaluate", "_determine_best_metric")

IRREGULAR = "Something in it changes from one run to the next: an iterator or a file cannot be wound back."
BETWEEN = "Look where they are computed: rewards, compute_metrics(), metrics of your own, the mean of all losses."

PARTS = ("chosen", "rejected", "reference")  # TRL puts them one below the other in one batch
UNSELECTED = (("labels", -100), ("completion_mask", 0))  # what stands where a token does not count


def is_trainer(thing: object) -> bool:
    return all(hasattr(thing, name) for name in (*METHODS.values(), "train", "evaluate", "callback_handler"))


class Found(BaseException):
    """Stops the trainer's loop, through anybody's ``except Exception``. Private: nobody outside sees it."""


class Hunt:
    """One run of a trainer, up to the first batch that fails or to ``limit`` batches.

    ``fetched``: (rows of the dataset, the batch made of them), the last ones. ``part``, ``first``: which of several
    evaluation sets, and its first batch. ``irregular``: batches that failed, but not again. ``logged``: name → value of
    metrics that are not finite.
    """

    def __init__(self, trainer: Any, mode: str, limit: int | None) -> None:
        self.trainer, self.mode, self.limit, self.batch = trainer, mode, limit, -1
        self.report, self.tracer = Report(), Tracer()
        self.trl = any(c.__module__.startswith("trl.") for c in type(trainer).__mro__)
        self.tracer.call = line_of(self.tracer.names.here().user)[0]
        self.fetched: deque = deque(maxlen=8 + trainer.args.gradient_accumulation_steps)
        self.part, self.first, self.irregular, self.logged = "", 0, [], {}

    def install(self) -> None:
        """Take part in the run. Nothing here is taken back one by one: the trainer is frozen."""
        trainer, handler = self.trainer, self.trainer.callback_handler
        for owner in filter(None, (trainer, trainer.optimizer, trainer.accelerator)):
            for name, own in list(vars(owner).items()):
                if type(own).__module__ == "nanlab.guard" and hasattr(own, "__wrapped__"):
                    setattr(owner, name, own.__wrapped__)
        kept = lambda kind: not kind.__module__.startswith(LIBRARIES) or KEPT & {c.__name__ for c in kind.__mro__}
        handler.callbacks = [c for c in handler.callbacks if kept(type(c))]
        for callback in (c for c in handler.callbacks if type(c).__module__.startswith(LIBRARIES)):
            callback.on_train_end = lambda *_, **__: None  # BEMA's saves a model
        handler.on_save = handler.on_log = lambda args, state, control, *_: control
        # Callbacks may read what was logged before; a log() that somebody has added would also show it.
        log = next(c.log for c in type(trainer).__mro__ if c.__module__.startswith("transformers."))
        vars(trainer).update(dict.fromkeys(SILENT, lambda *_, **__: None), log=functools.partial(log, trainer))
        self.original = getattr(trainer, METHODS[self.mode])
        setattr(trainer, METHODS[self.mode], self.step)
        trainer.get_eval_dataloader = functools.partial(self.open, trainer.get_eval_dataloader)
        self.tracer.names.adopt(trainer.model)
        for name, held in with_entries(vars(trainer)):
            if isinstance(held, nn.Module):
                self.tracer.names.adopt(held, f"{name}.")

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """In place of training_step or prediction_step."""
        self.look()
        self.batch += 1
        if self.batch == self.limit:
            raise Found
        if self.batch == 0:  # by now FSDP has given the model other parameters
            self.tracer.names.adopt(self.trainer.model)
        self.tracer.__exit__(None, None, None)
        try:
            return self.try_out(*args, **kwargs)
        finally:
            self.tracer.__enter__()

    @_disable_current_modes()
    def look(self) -> None:
        """Since the last batch: has anything spoilt gradients, parameters, optimizer state, or TRL's own metrics?"""
        sink_state(self.tracer)
        if self.agreed((report := verdict(self.tracer)).found):
            self.stop(report, {})
        self.tracer.sinks = {}
        metrics = vars(self.trainer).get("_metrics", {}).get(self.mode, {}) if self.trl else {}
        self.logged |= {k: v for k, vs in metrics.items() for v in as_list(vs) if isinstance(v, float) and v - v != 0}

    def try_out(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a batch untraced; if it fails, put back what it changed, and run it once more under the tracer."""
        given = dict(inputs) if isinstance(inputs, Mapping) else {"": inputs}  # a step may take entries out
        undo = freeze([self.trainer, model, inputs, *global_state()], (Hunt,))
        result, failed, before = None, True, self.spoilt()

        def call(traced: bool = True) -> Any:
            nonlocal result
            result = self.original(model, inputs, *args, **kwargs)
            if traced and self.mode == "eval":
                self.tracer.sink_loss("the loss of the evaluation", result[0])
            return result[:2] if isinstance(result, tuple) else result  # labels of an evaluation may be missing

        with contextlib.suppress(*RAISED):  # it will raise again under the tracer
            failed = self.failed(call(traced=False), before)
        if not self.agreed(failed):
            self.tracer.went_backward = self.tracer.n if self.mode == "train" else -1
            return result
        undo()
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        self.tracer.scaler_skips = scaler is not None and scaler.get_scale() > 1
        self.tracer.reads, self.tracer.answer = {}, ()  # what was logged before is not what this batch is made of
        for label, part in (part for item in given.items() for part in parts_of(*item)):
            self.tracer.names.add(part, f"batch {label}")
        report, seen = run(self.tracer, call)
        single = lambda b: b.found and (b.story[0].startswith(CONSTANT) or (b.phase == "data" and not b.length))
        meant = self.mode == "eval" and all(map(single, (report, *report.others)))  # NaN written among the outputs
        if self.agreed(bool(report.exception) or (report.found and (not meant or troubled(result[0])))):
            undo()  # for the batch's sake
            self.stop(report, given)
        self.tracer.sinks = {}
        if failed and not self.failed(seen, before):
            self.irregular.append(self.batch)
        return result

    def agreed(self, flag: bool) -> bool:
        """Does any rank say so? What one does all have to do, or the others would wait for it."""
        accelerator = self.trainer.accelerator
        return bool(accelerator.gather(torch.tensor([int(flag)], device=accelerator.device)).any())

    def state(self) -> list[Tensor]:
        names = self.tracer.names
        return [t for _, t in (*names.parameters.values(), *names.buffers.values())] if self.mode == "train" else []

    def spoilt(self) -> set:
        """Parameters and buffers that hold NaN, and what the trainer itself keeps that is not finite."""
        held = (part for k, v in vars(self.trainer).items() if not isinstance(v, nn.Module) for part in parts_of(k, v))
        kept = {name for name, t in held if is_float(t) and id(t) not in self.tracer.names.parameters and bad(t)}
        return kept | {id(t) for t in self.state() if is_float(t) and bad(t) == "nan"}

    def failed(self, result: Any, before: set) -> bool:
        """Is the loss bad, or a gradient, or something in ``spoilt()`` that was not there before?"""
        grads = any(is_float(t.grad) and bool(bad(t.grad)) for t in self.state())
        return grads or any(map(troubled, tree_leaves(result))) or bool(self.spoilt() - before)

    def open(self, original: Callable, dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.part, self.first = dataset if isinstance(dataset, str) else "", self.batch + 1
        return original(dataset, *args, **kwargs)

    def stop(self, report: Report, inputs: dict[str, Any]) -> None:
        """Add the batch, the rows without any label if the mean was empty, their dataset rows and their text."""
        self.report, report.batch = report, None if self.batch < 0 else self.batch  # None: before the first
        if not (report.found or report.exception):
            report.explanation = "Another rank has found something in its part of this batch: look at its report."
        tokens = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.dim() in (1, 2)}
        if report.cause == "empty_mean" and not report.rows:
            off = [t == unselected for k, t in tokens.items() for end, unselected in UNSELECTED if k.endswith(end)]
            # A mask has one dimension where a row has one label.
            report.rows = sorted({r for m in off for r in m.view(len(m), -1).all(1).nonzero().flatten().tolist()})
            report.length = max(map(len, off), default=0)
        index = next((i for i, batch in reversed(self.fetched) if alike(batch, inputs)), [])
        size = len(index) or max(map(len, tokens.values()), default=0)
        fits = tokens and report.length in [size * n for n in range(1, len(PARTS) + 1 if self.trl else 2)]
        came_in = report.op.startswith(("batch ", UNNAMED, CONSTANT))
        # A collator has names of its own for what the batch is made of.
        own = [Event().about(t, bad_mask(t)).rows for t in tokens.values() if is_float(t) and report.phase == "data"]
        if fits and (came_in or report.rows in own or report.phase == "forward" or report.cause == "gradient_at_edge"):
            report.examples = list(dict.fromkeys(index[row % size] for row in report.rows)) if index else []
            for row in report.rows[:4] if hasattr(getattr(self.trainer, "processing_class", None), "decode") else ():
                part = PARTS[row // size] if report.length > size else ""
                report.texts[row] = " | ".join(self.texts(tokens, row, row % size, part))
        if index and not (report.examples or report.phase in ("optimizer", "state")):
            report.explanation += f" The batch is made of {listed(list(dict.fromkeys(index)))} of the dataset."
        if self.part:
            report.explanation += f" This is batch {self.batch - self.first} of eval_dataset[{self.part!r}]."
        raise Found

    def texts(self, tokens: dict[str, Tensor], row: int, example: int, part: str) -> Iterator[str]:
        """What a row says, without padding. TRL has its parts one below the other, or each under a name of its own."""
        names = {k: k.removesuffix("input_ids").strip("_") for k in tokens if k.endswith("input_ids")}
        for key, name in names.items():
            ids, mask = tokens[key], tokens.get(key.replace("input_ids", "attention_mask"))
            row_here = row if row < len(ids) else example
            if row_here < len(ids) and (part in ("", name) or not name) and (name != "prompt" or len(names) == 1):
                kept = ids[row_here] if mask is None else ids[row_here][mask[row_here].bool()]
                words, label = " ".join(self.trainer.processing_class.decode(kept).split()), name or part
                yield (f"{label}: " if label else "") + (words if len(words) < 90 else f"{words[:40]} … {words[-40:]}")

    def conclude(self, metrics: Any) -> Report:
        """The report; if nothing was found, with what there is to say about the run."""
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                label = "values", f"the metric {name}"
                self.tracer.sink(label[1], value, label[0])
                behind = self.tracer.sinks.get(label) or (value != value and self.tracer.latest.get("inf")) or ()
                # NumPy makes NaN of inf. What the trainer only gathers may be NaN where a label is missing.
                self.tracer.sinks[label] = [e for e in behind if e.root().name != UNNAMED]
                self.report, self.logged[name] = verdict(self.tracer), value
        if not self.report.found and self.report.batch is None:
            raised, begun = self.report.exception, self.batch + 1
            said = {
                f"{self.mode} raised outside of its batches, after {begun} had begun.": raised,
                f"Not one batch was run: the {self.mode}_dataset is empty or too small for one.": not (raised or begun),
                f"Batches {self.irregular} failed, but not when they ran again. {IRREGULAR}": self.irregular,
                f"Not finite, although no batch was to blame: {', '.join(self.logged)}. {BETWEEN}": self.logged,
            }
            self.report.explanation = " ".join(text for text, so in said.items() if so)
        return self.report


def troubled(value: object) -> bool:
    """A loss that is not finite, or NaN or inf among the logits (−inf is how logits are masked)."""
    return is_float(value) and bad(value) not in (("",) if value.numel() == 1 else ("", "-inf"))


def alike(batch: Any, inputs: dict[str, Any]) -> bool:
    """Do two batches hold the same numbers, wherever they lie, or the same text?"""
    as_tensor = lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else torch.tensor([*map(ord, leaf)])
    old, new = ([as_tensor(t) for t in tree_leaves(b) if isinstance(t, (Tensor, str))] for b in (batch, inputs))
    same = lambda a, b: a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is no 0
    return bool(old) and len(old) == len(new) and all(map(same, old, new))


def watch_fetches(fetched: deque) -> contextlib.AbstractContextManager:
    """Note which rows of a dataset make up each batch. Loaders in other processes are not seen."""
    original = _MapDatasetFetcher.fetch

    def fetch(fetcher: Any, index: Any) -> Any:
        batch = original(fetcher, index)
        if isinstance(index, list):
            fetched.append((index, dict(batch) if isinstance(batch, Mapping) else {"": batch}))
        return batch

    return mock.patch.object(_MapDatasetFetcher, "fetch", fetch)


def locate_in_trainer(trainer: Any, mode: str, max_batches: int | None) -> Report:
    """See ``locate``. ``max_batches``: give up after so many healthy ones."""
    own_loader = not getattr(trainer, f"get_{mode}_dataloader").__module__.startswith(LIBRARIES)
    if getattr(trainer, f"{mode}_dataset", None) is None and not own_loader:
        raise InputError(f"locate(): the trainer has no {mode}_dataset; give it one, or locate() a step of your own")
    hunt, metrics, undo = Hunt(trainer, mode, max_batches), None, freeze([trainer, *global_state()])
    try:
        hunt.install()
        with contextlib.suppress(Found), watch_fetches(hunt.fetched), hunt.tracer:
            metrics = trainer.train() if mode == "train" else trainer.evaluate()
            hunt.look()
    except RAISED as error:
        sink_state(hunt.tracer)
        abandoned(hunt.tracer, error, "held")
        hunt.report = verdict(hunt.tracer, error)
    finally:
        undo()
    return hunt.conclude(metrics)
