"""watch(): keep a training run alive through a NaN, in step on every rank, and say what that cost.

The guard looks once per optimizer step, after the gradients of all micro-batches and ranks have been added up and
before ``optimizer.step``; in a Trainer again if something has changed the gradients in between. It takes the norm of
the losses and the gradients: one number, one fetch from the device. A finite norm means that every entry is finite. A
norm that is not may also come from squares that overflowed although the gradients are finite: then, and only then,
every entry is looked at, and the entries decide.

A refused step leaves no trace: ``optimizer.step`` is not called, gradients are dropped, and what the forward of the bad
batch has changed (buffers such as BatchNorm's running statistics, the state of the random generators) is put back. The
run then goes on bit for bit as if it had never seen the batch. One exception: a plain loop that draws numbers itself
between the first forward and `Guard.allow_step` (rows of the next micro-batch, as a rule) keeps its generators where
they are, for put back they would draw the bad rows again; dropout then differs from a run without the batch.

What it hides: the rows of a refused step are not learned from. All micro-batches on all ranks are lost, good ones too;
`Guard.summary` counts them. A cause that comes back with every epoch is skipped with every epoch: use `locate`.

What it does not see: a step that is finite and wrong. Nor a gradient that clipping has turned into zeros: where the L2
norm overflows, ``clip_grad_norm_`` multiplies finite gradients by 0. In a plain loop, what changes the gradients after
`Guard.allow_step`. And where a module also runs in the step of another (a discriminator in the generator's), that
forward counts to the module's own next step.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from nanlab import post_mortem
from nanlab.errors import InputError, refuse
from nanlab.findings import amount
from nanlab.post_mortem import call_again, forward_backward, named_tensors, replay, trainer_loss
from nanlab.snapshots import (
    Snapshot,
    buffer_slots,
    group_slots,
    map_leaves,
    plain,
    rng_state,
    same_rng,
    set_rng_state,
    state_slots,
    tensors_in,
)

__all__ = ["Event", "Finding", "Guard", "GuardStop", "Summary", "replay", "watch"]

POLICIES = ("skip", "stop", "rollback", "raise", "off")
SCALER_PATIENCE = 16  # 2**16, the scale that GradScaler starts with, halved 16 times is 1: no smaller one helps
LOG_TAIL = 20  # log entries in a post-mortem folder
# TRL's collators stack the sequences of one dataset row along the batch dimension.
SEQUENCES_PER_ROW = {
    "DataCollatorForPreference": 2,
    "DataCollatorForVisionPreference": 2,
    "DataCollatorForTriplePreference": 3,
}

logger = logging.getLogger(__name__)


class GuardStop(RuntimeError):
    """The guard ends the run. `event` says why; `folder` holds the post-mortem of this rank (None: not written)."""

    def __init__(self, event: Event, folder: Path | None, post_mortem: str):
        super().__init__(f"{event}; {post_mortem}")
        self.event, self.folder, self.post_mortem = event, folder, post_mortem


@dataclass(frozen=True)
class Finding:
    """One thing that is not finite, on one rank. `what` is a key of the tables that `Guard` checks."""

    what: str  # "loss", "gradient", "buffer", "parameter" or "optimizer state"
    name: str  # the first bad one of its kind: a parameter, a buffer, "micro-batch 2 of 4" ("" if there is only one)
    kind: str  # "nan" or "inf"
    rank: int

    def __str__(self) -> str:
        of = " of " if self.what in ("loss", "gradient") and self.name else " "
        return f"{(self.what + of + self.name).strip()} is {self.kind}"


@dataclass(frozen=True)
class Event:
    """One optimizer step that did not count.

    step: its number, from 1; in a Trainer the `global_step` under which it is logged.
    action: "skipped", "rolled back", "stopped" or "raised".
    findings: what is not finite, over all ranks. rows: rows lost with the step, over all ranks.
    report: what `locate` found on this rank (None if not asked for, or if nothing showed here).
    """

    step: int
    action: str
    reason: str
    findings: tuple[Finding, ...]
    rows: int
    report: Any = field(default=None, compare=False)

    @property
    def what(self) -> str:
        """Where it showed first: "loss", "gradient", "buffer", "parameter" or "optimizer state"."""
        return self.findings[0].what

    @property
    def name(self) -> str:
        """Name of the first bad parameter, buffer or micro-batch."""
        return self.findings[0].name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that saw it. A gradient is looked at after it was reduced, so it is bad on all of them."""
        return tuple(sorted({f.rank for f in self.findings if f.what == self.what}))

    def __str__(self) -> str:
        return f"step {self.step} {self.action}: {self.reason} ({amount(self.rows, 'row')} lost)"


@dataclass(frozen=True)
class Summary:
    """What the guard did to the run. `rollback_bytes`: size of the last good copy, 0 without one."""

    steps_seen: int
    steps_skipped: int
    rows_lost: int
    skipped_before_resume: int
    by_cause: dict[str, int]
    reports: list
    rollback_bytes: int
    rollback_device: str

    def __str__(self) -> str:
        lines = [f"{self.steps_skipped} of {self.steps_seen} steps skipped, {amount(self.rows_lost, 'row')} lost"]
        lines += [f"  {count} x {what}" for what, count in self.by_cause.items()]
        if self.skipped_before_resume:
            lines.append(f"  and {self.skipped_before_resume} before the run was resumed")
        if self.rollback_bytes:
            lines.append(f"  last good copy: {self.rollback_bytes / 2**20:.1f} MiB on {self.rollback_device}")
        return "\n".join(lines + [f"  {report}" for report in self.reports])


# -- Finite or not ---------------------------------------------------------------------------------


def _numbers(tensor: Tensor) -> Tensor:
    """The same as real numbers: a complex entry is two of them."""
    tensor = plain(tensor)
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if _world() > 1 else 0


def _surely_finite(groups: Iterable[Iterable[Tensor]], device: torch.device) -> bool:
    """True only if each group's norm is finite, on all ranks; False may also mean that a sum of squares overflowed.

    One answer for all ranks, at the price of one fetch from the device (and one all-reduce of one number). The L2 norm,
    because PyTorch's inf-norm, which does not overflow, is ten times slower on a CPU or worse. A norm for each group,
    so that the gradients' is the very number by which they will be clipped: a loss of a wider type would hide that it
    overflows in theirs.
    """
    numbers = ([p for t in tensors if (p := _numbers(t)).is_floating_point() and p.numel()] for tensors in groups)
    norms = [get_total_norm(tensors).to(device) for tensors in numbers if tensors]
    bad = ~torch.isfinite(torch.stack(norms)).all() if norms else torch.zeros((), dtype=torch.bool, device=device)
    if _world() == 1:
        return not bad.item()
    bad = bad.float()  # a flag: what MAX makes of a NaN depends on the backend
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return bad.item() == 0


def _first_bad(named: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """(name, "nan" or "inf") of the first tensor that is not finite. Slow: for the failing step only."""
    for name, tensor in named:
        values = _numbers(tensor)
        if values.is_floating_point() and not torch.isfinite(values).all():
            return name, "nan" if torch.isnan(values).any() else "inf"
    return None


def _is_finite(tensor: Tensor) -> bool:
    return _first_bad([("", tensor)]) is None


def _gather(item: Any) -> list:
    """The item of every rank. For the failing step only, which all ranks reach together."""
    if _world() == 1:
        return [item]
    items = [None] * _world()
    dist.all_gather_object(items, item)
    return items


# -- Batches ---------------------------------------------------------------------------------------


def _detached(value: Any) -> Any:
    return map_leaves(value, lambda leaf: leaf.detach() if torch.is_tensor(leaf) else leaf)


def _rows(batch: Any) -> int:
    """Rows of a batch: items of a list, else the first dimension of the first tensor in it; 1 if there is none."""
    if isinstance(batch, list) and batch and not torch.is_tensor(batch[0]):
        return len(batch)
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1)


def _sequences_per_row(collator: Any) -> int:
    found = max(SEQUENCES_PER_ROW.get(c.__name__, 1) for c in type(collator).__mro__)
    return found - 1 if getattr(collator, "include_reference", True) is False else found


# -- Hooks that stay behind -------------------------------------------------------------------------


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a hook is in a copy."""


class _Hook:
    """A hook of a module that is copied (an average of weights) or saved whole: the copy is not watched."""

    def __init__(self, call: Callable):
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return _Hook, (_nothing,)


class _StandIn:
    """`new(original, ...)` in the place of a method, on one object; a copy of the object gets its own method again."""

    def __init__(self, owner: Any, name: str, new: Callable):
        functools.update_wrapper(self, getattr(owner, name))  # keeps the mark by which a scheduler knows its step
        self.owner, self.name, self.new, self.original = owner, name, new, getattr(owner, name)
        self.own = vars(owner).get(name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.new(self.original, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Callable:
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        return getattr(type(self.owner), self.name).__get__(copy.deepcopy(self.owner, memo))

    def undo(self) -> None:
        if self.own is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)


# -- The guard -------------------------------------------------------------------------------------


class Guard:
    """Made by `watch`, which explains the policies. `events`: one `Event` per step that did not count."""

    def __init__(
        self, policy: str, locate: bool, max_consecutive: int, check_state: bool, keep_on: str, folder: str | Path
    ):
        self.policy, self.locate, self.max_consecutive = policy, locate, max_consecutive
        self.check_state = check_state or policy == "rollback"
        self.keep_on, self.folder = keep_on, Path(folder)
        self.events: list[Event] = []
        self.steps_seen = self.consecutive = self.scaler_skips = self.skipped_before_resume = 0
        self.stopped: GuardStop | None = None  # in a Trainer that was asked to end
        self.log_tail: Callable[[], list] = list
        self.recent: deque[tuple[int, list[Tensor]]] = deque(maxlen=LOG_TAIL)
        self.fatal = True  # a plain loop has no other way to end than an exception
        self._undo: list[Callable[[], None]] = []
        self._good: Snapshot | None = None  # parameters and the optimizer's numbers
        self._good_buffers: Snapshot | None = None
        self._open = False  # a step has begun, and is not decided yet
        self._unchecked = False  # the optimizer was allowed to step, and what it wrote is not looked at yet
        self._in_closure = False

    # Before training

    def _bind(self, model: nn.Module, optimizers: tuple, scaler) -> None:
        """Look up once what every step needs: names and places of parameters and buffers."""
        self.model, self.optimizers, self.scaler = model, optimizers, scaler
        if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
            raise InputError("watch: the model has parameters without a shape yet; run one batch through it before")
        if not any(p.requires_grad for p in model.parameters()):
            raise InputError(
                "watch: the model has no parameter that requires a gradient; give the model that you train"
            )
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._parameters = self._trained()
        self.device = self._parameters[0][1].device
        modules = list(model.named_modules())
        self._buffers = Snapshot(lambda: buffer_slots(modules))
        # Some buffers hold −inf on purpose (attention masks): only those that start finite are checked.
        held = self._buffers.held().items()
        self._finite_buffers = [name for name, buffer in held if buffer is None or _is_finite(buffer)]
        self._open = self._unchecked = False
        if self.policy == "rollback":
            device = None if self.keep_on == "device" else "cpu"
            self._good, self._good_buffers = Snapshot(self._written, device), Snapshot(self._buffers.slots, device)
            self._take_good()

    def _trained(self) -> list[tuple[str, Tensor]]:
        """What is trained now: a layer may have been unfrozen, and an optimizer holds parameters of a loss as well."""
        for i, optimizer in enumerate(self.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                for k, parameter in enumerate(group["params"]):
                    if parameter not in self._names:
                        of = f" of optimizer {i}" if len(self.optimizers) > 1 else ""
                        self._names[parameter] = f"parameter {k} of group {j}{of}"
        return [(name, parameter) for parameter, name in self._names.items() if parameter.requires_grad]

    def _state(self) -> dict[str, tuple[dict, str]]:
        slots = [state_slots(optimizer, self._names) for optimizer in self.optimizers]
        return {name: slot for each in slots for name, slot in each.items()}

    def _written(self) -> dict[str, tuple[dict, Any]]:
        """What `optimizer.step` may write to, for the last good copy."""
        by_name = dict(self._parameters)
        parts = {
            "parameter": {name: (by_name, name) for name in by_name},
            "state": self._state(),
            **{f"optimizer {i} group": group_slots(optimizer) for i, optimizer in enumerate(self.optimizers)},
        }
        return {f"{part} {name}": slot for part, slots in parts.items() for name, slot in slots.items()}

    def _take_good(self) -> None:
        self._good.take()
        self._good_buffers.take()

    def _watch_module(self, module: nn.Module, optimizers: tuple, scaler) -> None:
        if any(isinstance(h, _Hook) and h.call is not _nothing for h in module._forward_pre_hooks.values()):
            raise InputError("watch: this model is watched already; call remove() on its guard first")
        if self.check_state and not optimizers:
            raise InputError(
                "watch: policy='rollback' and check_state=True need the optimizer: watch(model, optimizer=...)"
            )
        self._watched = module
        wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
        self._bind(module.module if isinstance(module, wrappers) else module, optimizers, scaler)
        if self.check_state:
            self._check_optimizers()
        hooks = [
            module.register_forward_pre_hook(_Hook(self._on_forward), prepend=True, with_kwargs=True),
            module.register_forward_hook(_Hook(self._after_forward)),
        ]
        for optimizer in optimizers:
            inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
            if hasattr(inner, "_optimizer_step_pre_hooks"):  # not every optimizer is PyTorch's
                hooks.append(inner.register_step_pre_hook(_Hook(self._on_optimizer_step)))
        self._undo += [hook.remove for hook in hooks]

    def _check_optimizers(self) -> None:
        """What one has spoilt that is not known here would go on spoiling every step."""
        held = {p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        trainable = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        others = [name for name, p in trainable if p not in held]
        if len(others) == len(trainable):
            raise InputError("watch: the optimizer holds no parameter of this model; give the one that trains it")
        if others:
            raise InputError(
                f"watch: the optimizer does not hold {others[0]}, which requires a gradient; "
                "give all optimizers as a list, or freeze what is not trained"
            )

    def remove(self) -> None:
        """Take out every hook: the trainer or model is as it was before `watch`. Events and summary stay."""
        while self._undo:
            self._undo.pop()()
        self._open = False

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc) -> None:
        self.remove()

    # One step: begin, record each micro-batch, decide

    def _begin(self, rng: dict) -> None:
        """The first forward of a step is about to run: note what it may change."""
        self._rng = self._rng_after = rng
        self._drew, self._parameters = False, self._trained()
        self._buffers.take()
        self._batches: list[dict] = []
        self._losses: list[Tensor] = []
        self._rows, self._replay, self._open = 0, None, True

    def _record(self, args: tuple, kwargs: dict, rng: dict) -> None:
        self._batches.append({"args": _detached(args), "kwargs": _detached(kwargs), "rng": rng})

    def _note_draws(self, now: dict) -> None:
        """Has the loop drawn numbers since the last forward, as for the rows of the next micro-batch?

        Then the generators stay where they are: put back, they would draw the rows of the bad step again.
        """
        self._drew = self._drew or not same_rng(now, self._rng_after)

    def _numbers_before(self) -> dict[str, list[tuple[str, Tensor]]]:
        """What is looked at in front of `optimizer.step`."""
        count = len(self._losses)
        table = {
            "loss": [
                (f"micro-batch {i} of {count}" if count > 1 else "", loss) for i, loss in enumerate(self._losses, 1)
            ],
            "gradient": [(name, p.grad) for name, p in self._parameters if p.grad is not None],
        }
        if self.check_state:
            table["buffer"] = self._checked_buffers()
        return table

    def _checked_buffers(self) -> list[tuple[str, Tensor]]:
        held = self._buffers.held()
        return [(name, held[name]) for name in self._finite_buffers if held.get(name) is not None]

    def _gradients_now(self) -> list[tuple[Tensor, int]]:
        """Each gradient with the number of times it was written to: equal as long as nothing has changed them."""
        return [(p.grad, p.grad._version) for _, p in self._parameters if p.grad is not None]

    def _numbers_after(self) -> dict[str, list[tuple[str, Tensor]]]:
        """What is looked at behind `optimizer.step`: what it may have written."""
        # Adam's step counter lives on the CPU and is a count: nothing to find, and a slow thing to look at.
        state = {name: owner[key] for name, (owner, key) in self._state().items() if key != "step"}
        return {
            "optimizer state": [(name, tensor) for name, value in state.items() for tensor in tensors_in(value)],
            "parameter": self._parameters,
        }

    def _findings(self, table: Mapping[str, list[tuple[str, Tensor]]]) -> tuple[Finding, ...]:
        """What is not finite on any rank, the same answer on all; nothing, after one fetch, if all is well."""
        groups = ([tensor for _, tensor in named] for named in table.values())
        self._overflowed = not _surely_finite(groups, self.device)
        if not self._overflowed:
            return ()
        bad = {what: found for what, named in table.items() if (found := _first_bad(named))}
        mine = [Finding(what, *found, _rank()) for what, found in bad.items()]
        every = [finding for findings in _gather(mine) for finding in findings]
        return tuple(sorted(every, key=lambda f: (list(table).index(f.what), f.rank)))

    def _decide_before(self, findings: tuple[Finding, ...]) -> bool:
        """The branch in front of `optimizer.step`."""
        self.steps_seen += 1
        self.recent.append((self.step_number(), self._losses))
        if findings and self._scaling() and all(f.what == "gradient" for f in findings):
            return self._leave_to_scaler(findings)
        self.scaler_skips = 0
        if findings:
            self._refuse(findings)
            return False
        if self._good is not None:  # a checkpoint may have been loaded since, weights clipped, a layer unfrozen
            self._good.update(_is_finite)
        self._open, self._unchecked = False, self.check_state
        if not self.check_state:
            self.consecutive = 0
        return True

    def _decide_after(self) -> bool:
        """After `optimizer.step`: True if it left parameters and optimizer state finite, else undone if possible."""
        if not self._unchecked:
            return True
        self._unchecked = False
        if findings := self._findings(self._numbers_after()):
            self._refuse(findings, undone=self._good is not None)
            return False
        self.consecutive = 0
        if self._good is not None:
            self._take_good()
        return True

    def _scaling(self) -> bool:
        return self.scaler is not None and self.scaler.is_enabled()

    def _leave_to_scaler(self, findings: tuple[Finding, ...]) -> bool:
        """An inf in a scaled gradient is how GradScaler finds its scale: it skips the step itself."""
        self.scaler_skips += 1
        if self.scaler_skips < SCALER_PATIENCE:
            self._open = False
            return True
        why = f"no step has been taken for {self.scaler_skips} steps: {findings[0]} although the loss is finite"
        scale = f"the loss scale has fallen to {self.scaler.get_scale():g}"
        self._refuse(findings, dead=f"{why}; {scale}")
        return False

    def _refuse(self, findings: tuple[Finding, ...], *, undone: bool = True, dead: str = "") -> None:
        """Undo the step, write it down, and end the run where the policy says so or nothing else is left.

        undone: False if the step has spoilt what cannot be put back. dead: why there is no use in going on, if so.
        """
        self.consecutive += 1
        # Spoilt by this step, or between steps.
        spoilt = self._good is not None and bool(self._findings(self._numbers_after()))
        self._put_back(spoilt)
        report = self._locate(findings, spoilt) if self.locate else None
        too_many = self.consecutive >= self.max_consecutive
        ending = self.policy in ("stop", "raise") or too_many or not undone or bool(dead)
        action = "raised" if self.policy == "raise" else "stopped" if ending else "rolled back" if spoilt else "skipped"
        reason = dead or self._reason(findings, undone)
        event = Event(self.step_number(), action, reason, findings, sum(_gather(self._rows)), report)
        self.events.append(event)
        if _rank() == 0:
            logger.warning("%s", event)
        if ending:
            self._end(event)

    def _reason(self, findings: Iterable[Finding], undone: bool) -> str:
        # Reduced gradients are the same on all ranks; a loss is not.
        parts = [f"{f} on rank {f.rank}" if _world() > 1 and f.what == "loss" else str(f) for f in findings]
        if self.consecutive > 1:
            parts.append(f"{self.consecutive} steps in a row")
        if not undone:
            parts.append("this cannot be undone: policy='rollback' keeps a good copy")
        return "; ".join(dict.fromkeys(parts))

    def step_number(self) -> int:
        """Number of the step that is being decided, from 1."""
        return self.steps_seen

    def _put_back(self, spoilt: bool) -> None:
        """Everything as it was before the first forward of this step; what was not finite then, as in the good copy."""
        for _, parameter in self._parameters:
            parameter.grad = None
        self._buffers.put_back()
        if self._good_buffers is not None and _first_bad(self._checked_buffers()):
            self._good_buffers.put_back()
        if spoilt:
            self._good.put_back()
            for optimizer in self.optimizers:  # many ask `if p not in state` before their first step
                for parameter in [p for p, values in optimizer.state.items() if values == {}]:
                    del optimizer.state[parameter]
        set_rng_state(self._rng, self.device)
        self._open = False
        if self._scaling():  # forget that these gradients were unscaled; the scale stays
            # The first loss that is scaled makes the scale.
            self.scaler.scale(torch.zeros((), device=self.device))
            self.scaler.update(self.scaler.get_scale())

    def _end(self, event: Event) -> None:
        try:
            folder = self._write_post_mortem(event)
            stop = GuardStop(event, folder, f"post-mortem in {folder}")
        except Exception as error:  # a full disk, no such folder: the run still ends as it was asked to
            why = f"no post-mortem in {self.folder}: {type(error).__name__}: {error}"
            stop = GuardStop(event, None, why)
        if self.fatal or self.policy == "raise":
            raise stop
        self.stopped = stop
        if _rank() == 0:
            logger.warning("training stops; %s", stop.post_mortem)

    def _write_post_mortem(self, event: Event) -> Path:
        """A folder of this rank."""
        recent = [{"step": step, "loss": sum(loss.item() for loss in losses)} for step, losses in self.recent]
        so_far = self.summary()
        summary = {
            "event": {**asdict(event), "report": None if event.report is None else str(event.report)},
            "rank": _rank(),
            "world_size": _world(),
            "policy": self.policy,
            "steps_seen": so_far.steps_seen,
            "steps_skipped": so_far.steps_skipped,
            "rows_lost": so_far.rows_lost,
            "events": [str(e) for e in self.events],
        }
        findings = [f"  rank {f.rank}: {f}" for f in event.findings]
        report = [str(event), "", str(so_far), "", "Not finite:", *findings]
        report += ["", str(event.report)] if event.report is not None else []
        folder = self.folder / (f"step-{event.step:06d}" + (f"-rank{_rank()}" if _world() > 1 else ""))
        log_tail = {"recent": recent, "log": self.log_tail()}
        return post_mortem.write(folder, self._batches, self.model, log_tail, summary, report)

    # For a plain loop

    def allow_step(self, loss: Tensor | float | list, model: nn.Module | None = None, *, replay=None) -> bool:
        """True if the losses and gradients of this step are finite on every rank: then, and only then, step.

        Call it after `backward` and before gradients are clipped: clipping spreads one bad entry to all. With a
        `GradScaler`, put `scaler.step` and `scaler.update` both under the ``if``.

        loss: scalar tensor of this rank, or the list of the micro-batches' losses if gradients are accumulated.
        model: may be named for the reader's sake; it must be the one that is watched.
        replay: zero-argument callable that computes this step's loss again, for ``locate=True``. Not needed where
            ``model(...)`` returns an object with `.loss`.
        Raises `GuardStop` where the policy says so; `InputError` if the watched model has not run since the last step.
        """
        if self.policy == "off":
            return True
        self._check_model("allow_step", model)
        if self._unchecked:
            raise InputError(
                "allow_step: policy='rollback' and check_state=True need guard.after_step() after each optimizer.step()"
            )
        if not self._open:
            raise InputError(
                "allow_step: the watched model has not run in training mode since the last step; "
                "watch the module that you call as model(...)"
            )
        losses = loss if isinstance(loss, list | tuple) else [loss]
        if not losses or not all(x.numel() if torch.is_tensor(x) else isinstance(x, Real) for x in losses):
            raise InputError(
                f"allow_step: {' '.join(repr(loss).split()):.60} is no loss; give a scalar tensor or a list of them"
            )
        self._losses = [x.detach() if torch.is_tensor(x) else torch.tensor(x, device=self.device) for x in losses]
        self._replay = replay
        findings = self._findings(self._numbers_before())
        if findings or self.check_state:  # what is drawn from here on is the optimizer's, and is undone with its step
            now = rng_state(self.device)
            self._note_draws(now)
            if self._drew:
                self._rng = now
        return self._decide_before(findings)

    def after_step(self, model: nn.Module | None = None) -> bool:
        """Check what `optimizer.step` has written: True if parameters and optimizer state are finite.

        Looks only with ``check_state=True`` or ``policy="rollback"``; the latter undoes a bad step and returns False.
        """
        if self.policy == "off":
            return True
        self._check_model("after_step", model)
        return self._decide_after()

    def _check_model(self, call: str, model: nn.Module | None) -> None:
        if model is not None and model is not self._watched:
            raise InputError(f"{call}: this is not the model that is watched; call watch() on the model you train")

    def _trains(self, module: nn.Module) -> bool:
        """Is a forward that runs now part of a training step, and not of an evaluation or a closure?"""
        return module.training and torch.is_grad_enabled() and not self._in_closure

    def _on_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self._trains(module):
            return
        rng = rng_state(self.device)
        if not self._open:
            self._begin(rng)
        self._note_draws(rng)
        self._record(args, kwargs, rng)
        self._rows += _rows(args[0] if args and isinstance(args[0], list) else (args, kwargs))

    def _after_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._open and self._trains(module):
            self._rng_after = rng_state(self.device)

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple:
        """What a closure runs is part of the step that was allowed, not the beginning of the next one."""

        def within(closure):
            self._in_closure = True
            try:
                return closure()
            finally:
                self._in_closure = False

        return map_leaves((args, kwargs), lambda leaf: functools.partial(within, leaf) if callable(leaf) else leaf)

    def _call(self, *args, **kwargs) -> Tensor:
        """The loss of a recorded micro-batch, for `locate`."""
        output = self.model(*args, **kwargs)
        if getattr(output, "loss", None) is None:
            raise InputError("locate: the model returns no .loss; pass replay= to allow_step, a callable that does")
        return output.loss

    # Diagnosis

    def _locate(self, findings: tuple[Finding, ...], spoilt: bool) -> Any:
        """What `locate` finds in this step's batches on this rank; None if it finds nothing."""
        from nanlab.tracing import locate
        from nanlab.tracing.undo import freeze

        late = findings[0].what in ("parameter", "optimizer state") and self._good is not None

        def step():
            calls = [self._replay] if self._replay else [call_again(self._call, b, self.device) for b in self._batches]
            set_rng_state(self._batches[0]["rng"], self.device)
            loss = forward_backward(calls, self.device)
            if late:
                for optimizer in self.optimizers:
                    optimizer.step()
            return loss

        undo: Callable[[], None] = lambda: None
        try:
            # A Trainer that computes a loss again would also count it again in its next log entry.
            undo = freeze([self._call], (nn.Module, torch.optim.Optimizer, Guard, _TrainerLink))
            report = locate(step, model=self.model, **named_tensors(self._batches))
        except Exception as error:  # a run that survives its NaN must not die of the diagnosis
            logger.warning("locate could not replay the step: %s: %s", type(error).__name__, error)
            return None
        finally:
            undo()
            self._put_back(spoilt)
        return report if report.found else None

    def replay(self, folder: str | Path) -> Any:
        """`replay` of a post-mortem folder with the trainer or model that is watched."""
        return replay(folder, self._call, model=self.model)

    def summary(self) -> Summary:
        """Steps skipped, rows lost, reports; `print` it at the end."""
        return Summary(
            self.steps_seen,
            len(self.events),
            sum(event.rows for event in self.events),
            self.skipped_before_resume,
            dict(Counter(event.what for event in self.events)),
            [event.report for event in self.events if event.report is not None],
            self._good.nbytes + self._good_buffers.nbytes if self._good else 0,
            self.keep_on if self._good else "",
        )


# -- In a Trainer ----------------------------------------------------------------------------------


class _TrainerLink:
    """Hooks into one transformers or TRL Trainer, without a subclass.

    Only what has kept its name from transformers 5.0 on is used: the methods `training_step` and `compute_loss`, the
    objects `accelerator` (`clip_grad_norm_`) and `optimizer` (`step`), the flag `is_in_train`, and callbacks.
    """

    def __init__(self, guard: Guard, trainer: Any):
        if any(type(c).__name__ == "GuardCallback" for c in trainer.callback_handler.callbacks):
            raise InputError("watch: this trainer is watched already; call remove() on its guard first")
        self.guard, self.trainer = guard, trainer
        self.inside = False  # within training_step: evaluation calls compute_loss too
        self.findings: tuple[Finding, ...] | None = None  # of this step, made before clipping
        self.looked_at: list[tuple[Tensor, int]] = []  # the gradients of which these findings are
        self.skipped_elsewhere = 0  # steps of this run that are no event of the guard: before it was resumed
        self.last_loss: Tensor | float = 0.0
        self.per_train: list[Callable[[], None]] = []
        self.filter_off = False
        guard.fatal = False
        guard.step_number = lambda: trainer.state.global_step + 1
        guard.log_tail = lambda: trainer.state.log_history[-LOG_TAIL:]
        callback = _callback(self)
        trainer.add_callback(callback)
        guard._undo += [
            lambda: trainer.remove_callback(callback),
            self.release,
            _StandIn(trainer, "training_step", self.training_step).undo,
            _StandIn(trainer, "compute_loss", self.compute_loss).undo,
        ]
        if trainer.is_in_train and trainer.optimizer is not None:  # called from a callback: `on_train_begin` is over
            self.attach()

    def attach(self) -> None:
        """When training begins: the optimizer exists, and the accelerator is the one that will be used."""
        trainer, guard = self.trainer, self.guard
        self.release()
        if trainer.is_deepspeed_enabled:
            raise InputError("watch: DeepSpeed steps inside backward, where no guard can refuse; use FSDP or DDP")
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        guard._bind(trainer.model, (optimizer,), trainer.accelerator.scaler)
        guard.stopped, self.findings, self.looked_at = None, None, []
        noted = [
            entry.get("guard_skipped", 0) for entry in (*trainer.state.log_history, trainer.state.stateful_callbacks)
        ]
        # Below 0 where the guard has events of another run: a training before this one.
        self.skipped_elsewhere = max(noted) - len(guard.events)
        guard.skipped_before_resume = max(self.skipped_elsewhere, 0)
        self.per_train = [
            # the last step's mark would hold the schedule for good: without a scaler nobody else takes it off
            functools.partial(setattr, trainer.optimizer, "_is_overflow", False),
            _StandIn(trainer.optimizer, "step", self.optimizer_step).undo,
            _StandIn(trainer.accelerator, "clip_grad_norm_", self.clip_grad_norm).undo,
        ]

    def release(self) -> None:
        """When training ends: optimizer, accelerator and arguments as they were."""
        self.restore_filter()
        while self.per_train:
            self.per_train.pop()()

    def training_step(self, original, model, inputs, *args, **kwargs):
        guard = self.guard
        if not self.trainer.is_in_train:  # somebody tries a batch
            return original(model, inputs, *args, **kwargs)
        if not guard._open:
            guard._begin(rng_state(guard.device))
        self.inside, recorded = True, len(guard._batches)
        try:
            loss = original(model, inputs, *args, **kwargs)
        finally:
            self.inside = False
        if len(guard._batches) > recorded:  # what the loss is of: some trainers are given more rows than that
            (inputs,) = guard._batches[recorded]["args"]
        guard._rows += _rows(inputs) // _sequences_per_row(self.trainer.data_collator)
        guard._losses.append(loss.detach())
        return self.loss_for_log(loss)

    def compute_loss(self, original, model, inputs, *args, **kwargs):
        if self.inside:
            known = {key: value for key, value in kwargs.items() if key == "num_items_in_batch"}
            self.guard._record((inputs,), known, rng_state(self.guard.device))
        return original(model, inputs, *args, **kwargs)

    def loss_for_log(self, loss: Tensor) -> Tensor:
        """Do the work of `logging_nan_inf_filter` on the device: the Trainer's own costs two syncs a micro-batch.

        The log gets the last finite loss in the place of one that is not (the Trainer's filter: a share of the sum so
        far).
        """
        args = self.trainer.args
        if not args.logging_nan_inf_filter:
            return loss
        args.logging_nan_inf_filter, self.filter_off = False, True
        self.last_loss = torch.where(torch.isfinite(loss), loss, self.last_loss)
        return self.last_loss

    def restore_filter(self) -> None:
        """Evaluation reads the same flag, so it is only off between two lines of the training loop."""
        if self.filter_off:
            self.trainer.args.logging_nan_inf_filter, self.filter_off = True, False

    def look(self) -> tuple[Finding, ...]:
        """At the first of clipping and stepping, for clipping would spread one NaN to every gradient.

        Again where gradients that were finite have been changed since: by a callback in `on_pre_optimizer_step`, or by
        a norm that overflowed. PyTorch's version counter tells; a change through ``.data`` it does not see.
        """
        self.restore_filter()
        if self.findings is None or (not self.findings and self.changed()):
            self.findings = self.guard._findings(self.guard._numbers_before())
            self.looked_at = self.guard._gradients_now()
        return self.findings

    def changed(self) -> bool:
        marks = lambda gradients: [(id(gradient), version) for gradient, version in gradients]
        return marks(self.guard._gradients_now()) != marks(self.looked_at)

    def clip_grad_norm(self, original, *args, **kwargs):
        if not self.guard._open:
            return original(*args, **kwargs)
        self.look()
        norm = original(*args, **kwargs)
        if not self.guard._overflowed:  # a finite norm takes no gradient to NaN, whatever the limit
            self.looked_at = self.guard._gradients_now()
        return norm

    def optimizer_step(self, original, *args, **kwargs):
        """The branch. A refused step looks to the Trainer like one that GradScaler skipped: the schedule waits too."""
        if not self.guard._open:  # this step began before watch()
            return original(*args, **kwargs)
        findings = self.look()
        self.findings, self.looked_at = None, []
        kept = self.guard._decide_before(findings)
        if kept:
            original(*args, **kwargs)
            kept = self.guard._decide_after()
        if not kept or self.guard.scaler is None:  # with a scaler, accelerate has set it already
            self.trainer.optimizer._is_overflow = not kept

    def note(self, *entries: dict) -> None:
        """Say how much this run has skipped so far: it reaches trainer_state.json, and a run that is resumed."""
        if skipped := self.skipped_elsewhere + len(self.guard.events):
            for entry in entries:
                entry["guard_skipped"] = skipped


def _callback(link: _TrainerLink) -> Any:
    from transformers import TrainerCallback

    class GuardCallback(TrainerCallback):
        def __deepcopy__(self, memo):
            return TrainerCallback()

        def on_train_begin(self, args, state, control, **kwargs):
            link.attach()

        def on_substep_end(self, args, state, control, **kwargs):
            link.restore_filter()

        def on_step_end(self, args, state, control, **kwargs):
            link.note(state.stateful_callbacks)  # a checkpoint may come before the next log
            if link.guard.stopped is not None:
                control.should_training_stop = True
            return control

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs is not None:
                link.note(logs, state.log_history[-1])

        def on_train_end(self, args, state, control, **kwargs):
            link.release()
            if link.guard.events and _rank() == 0:
                logger.warning("%s", link.guard.summary())

    return GuardCallback()


# -- The call --------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    return type(value).__name__


def _can_hold(folder: Any) -> bool:
    """True if `folder` is one that can be written to, or could be made: better asked now than when the run ends."""
    if not isinstance(folder, str | os.PathLike):
        return False
    path = Path(folder).absolute()
    nearest = next(p for p in (path, *path.parents) if os.path.exists(p))
    return nearest.is_dir() and os.access(nearest, os.W_OK)


def _check_settings(policy: Any, max_consecutive: Any, keep_on: Any, folder: Any) -> None:
    wrong = {
        f"policy {policy!r} is unknown; choose one of {', '.join(POLICIES)}": policy not in POLICIES,
        f"keep_on {keep_on!r} is unknown; choose 'cpu' or 'device'": keep_on not in ("cpu", "device"),
        f"max_consecutive is {max_consecutive!r}; give 1 or more": (
            not isinstance(max_consecutive, Real) or not max_consecutive >= 1
        ),
        f"the folder {folder} cannot be written to; name one that can": folder is not None and not _can_hold(folder),
    }
    refuse("watch", wrong)


def _is_trainer(given: Any) -> bool:
    methods = ("training_step", "compute_loss", "add_callback")
    return not isinstance(given, type) and all(hasattr(given, name) for name in methods)


def _check_parts(given: Any, a_trainer: bool, optimizers: tuple, scaler: Any) -> None:
    strange = ", ".join(_kind(o) for o in optimizers if not hasattr(o, "param_groups"))
    wrong = {
        f"{_kind(given)} is neither a Trainer nor a torch.nn.Module": not (a_trainer or isinstance(given, nn.Module)),
        "a Trainer brings its own optimizer and scaler; leave out optimizer= and scaler=": (
            a_trainer and (bool(optimizers) or scaler is not None)
        ),
        f"optimizer is a {strange}; give the optimizer of your loop": bool(strange),
        f"scaler is a {_kind(scaler)}; give the GradScaler of your loop": (
            scaler is not None and not hasattr(scaler, "is_enabled")
        ),
    }
    refuse("watch", wrong)


def watch(
    trainer_or_model: Any,
    policy: str = "skip",
    locate: bool = False,
    max_consecutive: int = 5,
    *,
    check_state: bool = False,
    keep_on: str = "cpu",
    folder: str | Path | None = None,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer] | None = None,
    scaler: Any = None,
) -> Guard:
    """Guard a run against steps whose loss or gradients are not finite.

        guard = watch(trainer)                      # transformers or TRL Trainer
        trainer.train()
        print(guard.summary())

        guard = watch(model, optimizer=optimizer)   # a plain loop
        loss.backward()
        if guard.allow_step(loss):
            optimizer.step()
        optimizer.zero_grad()

    Every rank decides alike, on the reduced gradients and the losses of all ranks. The number that decides is fetched
    once per step. In a Trainer this is not one sync more: the guard does the work of ``logging_nan_inf_filter``, which
    is on by default and costs two syncs a micro-batch, on the device.

    trainer_or_model: a Trainer before `train`, or the module that your loop calls (also wrapped in DDP).
    policy: "skip" refuses the step and goes on. "rollback" also undoes a step that has left a parameter or the
        optimizer state not finite, from a copy taken after every good step and of what was changed since (a checkpoint
        was loaded, weights were clipped). "stop" ends the run at the first bad step; in a Trainer `train` returns.
        "raise" raises `GuardStop` there. "off" installs no hook and costs nothing.
    locate: replay a refused step at once under `nanlab.locate`; the Report is in the event.
    max_consecutive: that many refused steps in a row are a dead run, which is stopped.
    check_state: look also at buffers before, and at parameters and optimizer state after the step (a second fetch).
        In a plain loop call ``guard.after_step()`` after `optimizer.step`. Always on with "rollback".
    keep_on: "cpu" or "device", where the last good copy of trainable parameters, buffers and optimizer state lives.
        With AdamW it is three times the size of the parameters; `Guard.summary` states the bytes.
    folder: where a run that ends leaves its post-mortem; by default ``guard`` in the Trainer's output_dir, else in the
        working directory.
    optimizer, scaler: a plain loop's; the `GradScaler` if any, and the optimizer, or a list of them. "rollback" and
        `check_state` need all that train the model. Otherwise give it where it also holds parameters of a loss, and
        where `step` takes a closure: what that runs is part of the step, and is not looked at. Without the optimizer
        its batches would be counted into the next step, and what they change not be put back bit for bit.

    A Trainer's schedule does not advance on a refused step, as with a step that GradScaler skips; `global_step` does,
    for it counts the data. In a plain loop step the scheduler under the same ``if``.
    With a GradScaler, an inf in the scaled gradients with a finite loss is the scaler's own business; after 16 such
    steps in a row the guard ends the run and says that none has been taken.
    Raises `InputError`, in one line, for an argument that it does not know or cannot use, for a folder that cannot be
    written to, for a model without trainable parameters, with lazy ones, or watched already, for an optimizer that does
    not hold all that is trained, and for DeepSpeed, which steps inside backward.
    """
    _check_settings(policy, max_consecutive, keep_on, folder)
    optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else () if optimizer is None else (optimizer,)
    a_trainer = _is_trainer(trainer_or_model)
    _check_parts(trainer_or_model, a_trainer, optimizers, scaler)
    if folder is None:
        folder = Path(trainer_or_model.args.output_dir) / "guard" if a_trainer else Path("guard")
    guard = Guard(policy, locate, max_consecutive, check_state, keep_on, folder)
    guard.model = trainer_or_model.model if a_trainer else trainer_or_model  # `replay` may be asked for at once
    if a_trainer:
        guard._call = functools.partial(trainer_loss, trainer_or_model)
    if policy == "off":
        return guard
    if a_trainer:
        _TrainerLink(guard, trainer_or_model)
    else:
        guard._watch_module(trainer_or_model, optimizers, scaler)
    return guard
