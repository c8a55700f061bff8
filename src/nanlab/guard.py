"""watch(): keep a training run alive through a NaN, in step on every rank, and say what that cost.

The guard looks once per optimizer step, after the gradients of all micro-batches and ranks have been added up and
before ``optimizer.step``. It takes the norm of the losses and the gradients: one number, one fetch from the device. A
finite norm means that every entry is finite. A norm that is not may also come from squares that overflowed although
the gradients are finite: then, and only then, every entry is looked at, and the entries decide.

A refused step leaves no trace: ``optimizer.step`` is not called, gradients are dropped, and what the forward of the bad
batch has changed (buffers such as BatchNorm's running statistics, the state of the random generators) is put back. The
run then goes on bit for bit as if it had never seen the batch.

What it hides: the rows of a refused step are not learned from. All micro-batches on all ranks are lost, good ones too;
`Guard.summary` counts them. A cause that comes back with every epoch is skipped with every epoch: use `locate`.

What it does not see: a step that is finite and wrong. Nor a gradient that clipping has turned into zeros: where the L2
norm overflows, ``clip_grad_norm_`` multiplies finite gradients by 0.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import os
import random
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from nanlab.errors import InputError

POLICIES = ("skip", "stop", "rollback", "raise", "off")
SCALER_PATIENCE = 16  # 2**16, the scale that GradScaler starts with, halved 16 times is 1: no smaller one helps
WEIGHTS_LIMIT = 256 * 2**20  # bytes: a post-mortem folder holds the weights of small models only
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
    action: "skipped", "rolled back", "stopped", "raised", or "left to the scaler".
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
        return f"step {self.step} {self.action}: {self.reason} ({self.rows} rows lost)"


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
        lines = [f"{self.steps_skipped} of {self.steps_seen} steps skipped, {self.rows_lost} rows lost"]
        lines += [f"  {count} x {what}" for what, count in self.by_cause.items()]
        if self.skipped_before_resume:
            lines.append(f"  and {self.skipped_before_resume} before the run was resumed")
        if self.rollback_bytes:
            lines.append(f"  last good copy: {self.rollback_bytes / 2**20:.1f} MiB on {self.rollback_device}")
        return "\n".join(lines + [f"  {report}" for report in self.reports])


# -- Finite or not ---------------------------------------------------------------------------------


def _plain(tensor: Tensor) -> Tensor:
    """The numbers that this rank holds: a DTensor's own shard, a sparse tensor's values."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor._values() if tensor.is_sparse else tensor


def _numbers(tensor: Tensor) -> Tensor:
    """The same as real numbers: a complex entry is two of them."""
    tensor = _plain(tensor)
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if _world() > 1 else 0


def _surely_finite(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """True only if every entry is finite, on all ranks; False may also mean that the sum of squares overflowed.

    One answer for all ranks, at the price of one fetch from the device (and one all-reduce of one number). The L2 norm,
    because PyTorch's inf-norm, which does not overflow, is ten times slower on a CPU or worse.
    """
    tensors = [p for t in tensors if (p := _numbers(t)).is_floating_point() and p.numel()]
    norm = get_total_norm(tensors).to(device)
    if _world() == 1:
        return math.isfinite(norm.item())
    bad = (~torch.isfinite(norm)).float()  # a flag: what MAX makes of a NaN depends on the backend
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return bad.item() == 0


def _first_bad(named: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """(name, "nan" or "inf") of the first tensor that is not finite. Slow: for the failing step only."""
    for name, tensor in named:
        values = _numbers(tensor)
        if values.is_floating_point() and not torch.isfinite(values).all():
            return name, "nan" if torch.isnan(values).any() else "inf"
    return None


def _gather(item: Any) -> list:
    """The item of every rank. For the failing step only, which all ranks reach together."""
    if _world() == 1:
        return [item]
    items = [None] * _world()
    dist.all_gather_object(items, item)
    return items


# -- What can be put back --------------------------------------------------------------------------


def rng_state(device: torch.device) -> dict[str, Any]:
    """Python's, PyTorch's CPU and the device's random generators; no device sync."""
    state = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Undo everything that was drawn since `rng_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"].cpu())
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"].cpu())


class _Copy:
    """A copy of tensors that sit in dicts (a module's buffers, an optimizer's state), in memory that is used again.

    `slots` returns {name: (dict, key)}, asked for anew each time: a forward may put new tensors in old places.
    """

    def __init__(self, slots: Callable[[], dict[str, tuple[dict, Any]]], device: str | None = None):
        self.slots, self.device = slots, device  # device None: each copy beside its original
        self.tensors: dict[str, Tensor] = {}
        self.others: dict[str, Any] = {}

    @torch.no_grad()
    def take(self) -> None:
        live = {name: owner[key] for name, (owner, key) in self.slots().items()}
        tensors = {name: _plain(value) for name, value in live.items() if torch.is_tensor(value)}
        self.others = {name: copy.deepcopy(value) for name, value in live.items() if name not in tensors}
        self.tensors = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        if tensors:
            torch._foreach_copy_(list(self.tensors.values()), list(tensors.values()), non_blocking=True)

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        held = self.tensors.get(name)
        if held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
            return held
        device = self.device or tensor.device
        pin = torch.device(device).type == "cpu" and tensor.device.type == "cuda"  # else the copy would wait
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pin)

    @torch.no_grad()
    def put_back(self) -> None:
        for name, (owner, key) in self.slots().items():
            if name in self.others:
                owner[key] = copy.deepcopy(self.others[name])
            elif name not in self.tensors:  # it did not exist yet: an optimizer's state before the first step
                del owner[key]
            elif torch.is_tensor(owner[key]) and _plain(owner[key]).shape == self.tensors[name].shape:
                _plain(owner[key]).copy_(self.tensors[name])
            else:
                owner[key] = self.tensors[name].clone()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def _buffer_slots(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, tuple[dict, str]]:
    return {
        f"{prefix}.{key}" if prefix else key: (module._buffers, key)
        for prefix, module in modules
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


def _state_slots(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, tuple[dict, str]]:
    return {
        f"{key} of {name}": (optimizer.state[parameter], key)
        for parameter, name in names.items()
        if parameter in optimizer.state
        for key in optimizer.state[parameter]
    }


# -- Batches ---------------------------------------------------------------------------------------


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to every leaf of nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return change(value)


def _detached(value: Any) -> Any:
    return _map(value, lambda leaf: leaf.detach() if torch.is_tensor(leaf) else leaf)


def _storable(leaf: Any) -> Any:
    if torch.is_tensor(leaf):
        return _plain(leaf).cpu()
    return leaf if isinstance(leaf, str | int | float | bool | None) else repr(leaf)


def _rows(batch: Any) -> int:
    """Rows of a batch: items of a list, else the first dimension of the first tensor in it; 1 if there is none."""
    if isinstance(batch, list) and batch and not torch.is_tensor(batch[0]):
        return len(batch)
    sizes: list[int] = []
    _map(batch, lambda leaf: sizes.append(len(leaf)) if torch.is_tensor(leaf) and leaf.dim() else None)
    return sizes[0] if sizes else 1


def _sequences_per_row(collator: Any) -> int:
    names = [c.__name__ for c in type(collator).__mro__]
    found = next((SEQUENCES_PER_ROW[name] for name in names if name in SEQUENCES_PER_ROW), 1)
    return found - 1 if getattr(collator, "include_reference", True) is False else found


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
        self._good: _Copy | None = None
        self._open = self._unchecked = self._in_closure = False

    # Before training

    def _bind(self, model: nn.Module, optimizer, scaler) -> None:
        """Look up once what every step needs: names and places of parameters and buffers."""
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self._parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not self._parameters:
            raise InputError(
                "watch: the model has no parameter that requires a gradient; give the model that you train"
            )
        self.device = self._parameters[0][1].device
        self._names = {parameter: name for name, parameter in self._parameters}
        modules = list(model.named_modules())
        self._buffers = _Copy(lambda: _buffer_slots(modules))
        # Some buffers hold −inf on purpose (attention masks): only those that start finite are checked.
        named = [(name, owner[key]) for name, (owner, key) in self._buffers.slots().items()]
        self._finite_buffers = [name for name, buffer in named if _first_bad([(name, buffer)]) is None]
        self._open = self._unchecked = False
        if self.policy == "rollback":
            self._good = _Copy(self._everything, None if self.keep_on == "device" else "cpu")
            self._good.take()

    def _everything(self) -> dict[str, tuple[dict, Any]]:
        """What a step may change, for the last good copy."""
        by_name = dict(self._parameters)
        parts = {
            "parameter": {name: (by_name, name) for name in by_name},
            "buffer": self._buffers.slots(),
            "state": _state_slots(self.optimizer, self._names),
        }
        return {f"{part} {name}": slot for part, slots in parts.items() for name, slot in slots.items()}

    def _watch_module(self, module: nn.Module, optimizer, scaler) -> None:
        self._watched = module
        wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
        self._bind(module.module if isinstance(module, wrappers) else module, optimizer, scaler)
        if self.check_state and not any(p in self._names for g in optimizer.param_groups for p in g["params"]):
            raise InputError("watch: the optimizer holds no parameter of this model; give the one that trains it")
        hooks = [module.register_forward_pre_hook(self._on_forward, prepend=True, with_kwargs=True)]
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if hasattr(inner, "_optimizer_step_pre_hooks"):  # not every optimizer is PyTorch's
            hooks.append(inner.register_step_pre_hook(self._on_optimizer_step))
        self._undo += [hook.remove for hook in hooks]

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

    def _begin(self) -> None:
        """The first forward of a step is about to run: note what it may change."""
        self._rng = rng_state(self.device)
        self._buffers.take()
        self._batches: list[dict] = []
        self._losses: list[Tensor] = []
        self._rows, self._replay, self._open = 0, None, True

    def _record(self, args: tuple, kwargs: dict) -> None:
        batch = {"args": _detached(args), "kwargs": _detached(kwargs), "rng": rng_state(self.device)}
        self._batches.append(batch)

    def _before_step(self) -> dict[str, list[tuple[str, Tensor]]]:
        count = len(self._losses)
        table = {
            "loss": [
                (f"micro-batch {i} of {count}" if count > 1 else "", loss) for i, loss in enumerate(self._losses, 1)
            ],
            "gradient": [(name, p.grad) for name, p in self._parameters if p.grad is not None],
        }
        if self.check_state:
            slots = self._buffers.slots()
            table["buffer"] = [(name, slots[name][0][slots[name][1]]) for name in self._finite_buffers if name in slots]
        return table

    def _after_step(self) -> dict[str, list[tuple[str, Tensor]]]:
        state = _state_slots(self.optimizer, self._names) if self.optimizer is not None else {}
        # Adam's step counter lives on the CPU and is a count: nothing to find, and a slow thing to look at.
        state = {name: owner[key] for name, (owner, key) in state.items() if key != "step"}
        return {
            "optimizer state": [(name, value) for name, value in state.items() if torch.is_tensor(value)],
            "parameter": self._parameters,
        }

    def _findings(self, table: Mapping[str, list[tuple[str, Tensor]]]) -> tuple[Finding, ...]:
        """What is not finite on any rank, the same answer on all; nothing, after one fetch, if all is well."""
        if _surely_finite((tensor for named in table.values() for _, tensor in named), self.device):
            return ()
        bad = {what: found for what, named in table.items() if (found := _first_bad(named))}
        mine = [Finding(what, *found, _rank()) for what, found in bad.items()]
        every = [finding for findings in _gather(mine) for finding in findings]
        return tuple(sorted(every, key=lambda f: (list(table).index(f.what), f.rank)))

    def _allow(self, findings: tuple[Finding, ...]) -> bool:
        """The branch in front of `optimizer.step`."""
        self.steps_seen += 1
        self.recent.append((self.step_number(), self._losses))
        if findings and self._scaling() and all(f.what == "gradient" for f in findings):
            return self._leave_to_scaler(findings)
        self.scaler_skips = 0
        if findings:
            self._refuse(findings)
            return False
        self._open, self._unchecked = False, self.check_state
        if not self.check_state:
            self.consecutive = 0
        return True

    def _kept(self) -> bool:
        """After `optimizer.step`: True if it left parameters and optimizer state finite, else undone if possible."""
        if not self._unchecked:
            return True
        self._unchecked = False
        if findings := self._findings(self._after_step()):
            self._refuse(findings, undone=self._good is not None)
            return False
        self.consecutive = 0
        if self._good is not None:
            self._good.take()
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
        self._refuse(findings, reason=f"{why}; {scale}", dead=True)
        return False

    def _refuse(self, findings, *, undone: bool = True, reason: str = "", dead: bool = False) -> None:
        """Undo the step, write it down, and end the run where the policy says so or nothing else is left."""
        self.consecutive += 1
        self._put_back()
        report = self._locate(findings) if self.locate else None
        ending = self.policy in ("stop", "raise") or dead or not undone or self.consecutive >= self.max_consecutive
        late = findings[0].what in ("parameter", "optimizer state")
        action = "raised" if self.policy == "raise" else "stopped" if ending else "rolled back" if late else "skipped"
        reason = reason or self._reason(findings, undone)
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

    def _put_back(self) -> None:
        """Everything as it was before the first forward of this step; with a last good copy, as it was then."""
        for _, parameter in self._parameters:
            parameter.grad = None
        (self._good or self._buffers).put_back()
        set_rng_state(self._rng, self.device)
        self._open = False
        if self._scaling():  # forget that these gradients were unscaled; the scale stays
            self.scaler.update(self.scaler.get_scale())

    def _end(self, event: Event) -> None:
        try:
            folder = _write_post_mortem(self, event)
            stop = GuardStop(event, folder, f"post-mortem in {folder}")
        except Exception as error:  # a full disk, no such folder: the run still ends as it was asked to
            why = f"no post-mortem in {self.folder}: {type(error).__name__}: {error}"
            stop = GuardStop(event, None, why)
        if self.fatal or self.policy == "raise":
            raise stop
        self.stopped = stop
        if _rank() == 0:
            logger.warning("training stops; %s", stop.post_mortem)

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
        if model is not None and model is not self._watched:
            raise InputError("allow_step: this is not the model that is watched; call watch() on the model you train")
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
        return self._allow(self._findings(self._before_step()))

    def after_step(self, model: nn.Module | None = None) -> bool:
        """Check what `optimizer.step` has written: True if parameters and optimizer state are finite.

        Looks only with ``check_state=True`` or ``policy="rollback"``; the latter undoes a bad step and returns False.
        """
        if self.policy == "off":
            return True
        if model is not None and model is not self._watched:
            raise InputError("after_step: this is not the model that is watched; call watch() on the model you train")
        return self._kept()

    def _on_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not module.training or not torch.is_grad_enabled() or self._in_closure:
            return
        if not self._open:
            self._begin()
        self._record(args, kwargs)
        self._rows += _rows((args, kwargs))

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple:
        """What a closure runs is part of the step that was allowed, not the beginning of the next one."""

        def within(closure):
            self._in_closure = True
            try:
                return closure()
            finally:
                self._in_closure = False

        return _map((args, kwargs), lambda leaf: functools.partial(within, leaf) if callable(leaf) else leaf)

    def _call(self, *args, **kwargs) -> Tensor:
        """The loss of a recorded micro-batch, for `locate`."""
        output = self.model(*args, **kwargs)
        if getattr(output, "loss", None) is None:
            raise InputError("locate: the model returns no .loss; pass replay= to allow_step, a callable that does")
        return output.loss

    # Diagnosis

    def _locate(self, findings: tuple[Finding, ...]) -> Any:
        """What `locate` finds in this step's batches on this rank; None if it finds nothing."""
        from nanlab.tracing import locate

        late = findings[0].what in ("parameter", "optimizer state") and self._good is not None

        def step():
            calls = [self._replay] if self._replay else [_call_again(self._call, b, self.device) for b in self._batches]
            set_rng_state(self._batches[0]["rng"], self.device)
            loss = _forward_backward(calls, self.device)
            if late:
                self.optimizer.step()
            return loss

        try:
            report = locate(step, model=self.model, optimizer=self.optimizer, **_named_tensors(self._batches))
        except Exception as error:  # a run that survives its NaN must not die of the diagnosis
            logger.warning("locate could not replay the step: %s: %s", type(error).__name__, error)
            return None
        finally:
            self._put_back()
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
            self._good.nbytes if self._good else 0,
            self.keep_on if self._good else "",
        )


# -- Replay and post-mortem ------------------------------------------------------------------------


def _call_again(call: Callable, batch: Mapping, device: torch.device) -> Callable[[], Tensor]:
    def run():
        set_rng_state(batch["rng"], device)
        inputs = batch["args"], batch["kwargs"]
        args, kwargs = _map(inputs, lambda leaf: leaf.to(device) if torch.is_tensor(leaf) else leaf)
        return call(*args, **kwargs)

    return run


def _forward_backward(calls: Iterable[Callable[[], Tensor]], device: torch.device) -> Tensor:
    """The sum of the losses, each with its backward done: gradients add up as they did in the step."""
    total = torch.zeros((), device=device)
    for call in calls:
        loss = call()
        loss.backward()
        total = total + loss.detach()
    return total


def _named_tensors(batches: Iterable[Mapping]) -> dict[str, Tensor]:
    """The batch's own tensors under the names a reader knows them by, numbered if there are several micro-batches."""
    named: dict[str, Tensor] = {}
    batches = list(batches)
    for i, batch in enumerate(batches, 1):
        flat = dict(batch["kwargs"])
        for j, argument in enumerate(batch["args"]):
            flat.update(argument if isinstance(argument, Mapping) else {f"argument_{j}": argument})
        suffix = f"_{i}" if len(batches) > 1 else ""
        named.update({f"{key}{suffix}": value for key, value in flat.items() if torch.is_tensor(value)})
    return {key: value for key, value in named.items() if key not in ("step", "model", "optimizer", "mode")}


def _write_post_mortem(guard: Guard, event: Event) -> Path:
    """A folder per rank that is whole or not there: batches, RNG, small weights, log tail, report, summary."""
    name = f"step-{event.step:06d}" + (f"-rank{_rank()}" if _world() > 1 else "")
    target = guard.folder / name
    for n in range(2, 1000):  # evidence of an earlier run is not overwritten
        if not target.exists():
            break
        target = guard.folder / f"{name}-{n}"
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    torch.save(_map(guard._batches, _storable), draft / "batches.pt")
    state = guard.model.state_dict()
    small = sum(t.nbytes for t in state.values() if torch.is_tensor(t)) <= WEIGHTS_LIMIT
    if whole := small and not any(hasattr(t, "to_local") for t in state.values()):
        torch.save(_map(dict(state), _storable), draft / "weights.pt")
    recent = [{"step": step, "loss": sum(loss.item() for loss in losses)} for step, losses in guard.recent]
    (draft / "log_tail.json").write_text(json.dumps({"recent": recent, "log": guard.log_tail()}, default=str, indent=1))
    summary = {
        "event": {**asdict(event), "report": None if event.report is None else str(event.report)},
        "rank": _rank(),
        "world_size": _world(),
        "torch": torch.__version__,
        "policy": guard.policy,
        "weights": whole,
        "micro_batches": len(guard._batches),
        "steps_seen": guard.steps_seen,
        "steps_skipped": len(guard.events),
        "rows_lost": sum(e.rows for e in guard.events),
        "events": [str(e) for e in guard.events],
    }
    (draft / "summary.json").write_text(json.dumps(summary, indent=1))
    (draft / "report.txt").write_text(_report_text(guard, event, whole))
    os.replace(draft, target)
    return target


def _report_text(guard: Guard, event: Event, whole: bool) -> str:
    lines = [str(event), "", str(guard.summary()), "", "Not finite:"]
    lines += [f"  rank {f.rank}: {f}" for f in event.findings]
    lines += ["", str(event.report)] if event.report is not None else []
    weights = "weights.pt" if whole else "not here (too large, or sharded): load the checkpoint of the step before"
    lines += [
        "",
        f"batches.pt  {len(guard._batches)} micro-batches of this rank, with the state of the random generators",
        f"weights     {weights}",
        "Run it again: nanlab.guard.replay(this_folder, trainer), or replay(this_folder, call, model=model) where",
        "call(*args, **kwargs) computes the loss of one recorded batch.",
    ]
    return "\n".join(lines) + "\n"


def replay(folder: str | Path, step: Any, *, model: nn.Module | None = None) -> Any:
    """Run the batches of a post-mortem folder once more under `locate`, and return its Report.

    folder: what `GuardStop.folder` names. step: a Trainer, or a callable that gets one recorded batch as the forward
    got it (a Trainer's: the inputs dict and ``num_items_in_batch``) and returns the scalar loss. model: the module
    that `step` uses; with a Trainer its own. Weights in the folder are loaded into the model, and stay there.
    Gradients are dropped and the random generators put back afterwards. Raises `InputError` if the folder is not one,
    is damaged, or holds the weights of another model.
    """
    folder = Path(folder)
    if not (folder / "batches.pt").is_file():
        raise InputError(f"replay: {folder} holds no batches.pt; give the folder that the guard named when it stopped")
    if hasattr(step, "compute_loss"):
        model, step = step.model, functools.partial(_trainer_loss, step)
    if model is None:
        raise InputError("replay: name the model: replay(folder, call, model=model)")
    from nanlab.tracing import locate

    device = next(model.parameters()).device
    batches = _load(folder / "batches.pt", device)
    if (folder / "weights.pt").is_file():
        _load_weights(model, folder / "weights.pt", device)
    calls = [_call_again(step, batch, device) for batch in batches]
    before, training = rng_state(device), model.training
    model.train()
    try:
        return locate(functools.partial(_forward_backward, calls, device), model=model, **_named_tensors(batches))
    finally:
        model.train(training)
        model.zero_grad(set_to_none=True)
        set_rng_state(before, device)


def _load(path: Path, device: torch.device) -> Any:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # pickle, zip and PyTorch each have their own for a damaged file
        raise InputError(f"replay: {path} is damaged ({type(error).__name__}); take another folder") from error


def _load_weights(model: nn.Module, path: Path, device: torch.device) -> None:
    try:
        model.load_state_dict(_load(path, device))
    except (RuntimeError, TypeError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"replay: {path} does not fit this model; give the one that ran: {why:.200}") from error


# -- In a Trainer ----------------------------------------------------------------------------------


def _trainer_loss(trainer: Any, inputs: dict, **kwargs) -> Tensor:
    with trainer.compute_loss_context_manager():
        return trainer.compute_loss(trainer.model, dict(inputs), **kwargs)


def _replace(owner: Any, name: str, new: Callable) -> Callable[[], None]:
    """Put ``functools.partial(new, original)`` in the place of a method, on this one object; returns the way back."""
    original, own = getattr(owner, name), vars(owner).get(name)

    @functools.wraps(original)  # keeps the mark by which a scheduler knows its optimizer's step
    def stand_in(*args, **kwargs):
        return new(original, *args, **kwargs)

    setattr(owner, name, stand_in)
    return lambda: delattr(owner, name) if own is None else setattr(owner, name, own)


class _TrainerLink:
    """Hooks into one transformers or TRL Trainer, without a subclass.

    Only what has kept its name from transformers 5.0 on is used: the methods `training_step` and `compute_loss`, the
    objects `accelerator` (`clip_grad_norm_`) and `optimizer` (`step`), the flag `is_in_train`, and callbacks.
    """

    def __init__(self, guard: Guard, trainer: Any):
        self.guard, self.trainer = guard, trainer
        self.inside = False  # within training_step: evaluation calls compute_loss too
        self.findings: tuple[Finding, ...] | None = None  # of this step, made before clipping
        self.last_loss: Tensor | float = 0.0
        self.per_train: list[Callable[[], None]] = []
        self.filter_off = False
        guard.fatal = False
        guard.step_number = lambda: trainer.state.global_step + 1
        guard.log_tail = lambda: trainer.state.log_history[-LOG_TAIL:]
        guard._call = functools.partial(_trainer_loss, trainer)
        callback = _callback(self)
        trainer.add_callback(callback)
        guard._undo += [
            lambda: trainer.remove_callback(callback),
            self.release,
            _replace(trainer, "training_step", self.training_step),
            _replace(trainer, "compute_loss", self.compute_loss),
        ]
        if trainer.is_in_train and trainer.optimizer is not None:  # called from a callback: `on_train_begin` is over
            self.attach()

    def attach(self) -> None:
        """When training begins: the optimizer exists, and the accelerator is the one that will be used."""
        trainer, guard = self.trainer, self.guard
        self.release()
        if trainer.is_deepspeed_enabled:
            raise InputError("watch: DeepSpeed steps inside backward, where no guard can refuse; use FSDP or DDP")
        guard._bind(
            trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer), trainer.accelerator.scaler
        )
        guard.stopped, self.findings = None, None
        logged = max((entry.get("guard_skipped", 0) for entry in trainer.state.log_history), default=0)
        guard.skipped_before_resume = max(logged - len(guard.events), 0)
        self.per_train = [
            _replace(trainer.optimizer, "step", self.optimizer_step),
            _replace(trainer.accelerator, "clip_grad_norm_", self.clip_grad_norm),
        ]

    def release(self) -> None:
        """When training ends: optimizer, accelerator and arguments as they were."""
        self.restore_filter()
        while self.per_train:
            self.per_train.pop()()

    def training_step(self, original, model, inputs, *args, **kwargs):
        guard = self.guard
        if not guard._open:
            guard._begin()
        guard._rows += _rows(inputs) // _sequences_per_row(self.trainer.data_collator)
        self.inside = True
        try:
            loss = original(model, inputs, *args, **kwargs)
        finally:
            self.inside = False
        guard._losses.append(loss.detach())
        return self.loss_for_log(loss)

    def compute_loss(self, original, model, inputs, *args, **kwargs):
        if self.inside:
            known = {key: value for key, value in kwargs.items() if key == "num_items_in_batch"}
            self.guard._record((inputs,), known)
        return original(model, inputs, *args, **kwargs)

    def loss_for_log(self, loss: Tensor) -> Tensor:
        """Do the work of `logging_nan_inf_filter` on the device: the Trainer's own costs two syncs a micro-batch.

        The log gets the last finite loss in the place of one that is not (the Trainer's filter: the average so far).
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
        """Once per step, at the first of clipping and stepping: clipping would spread one NaN to every gradient."""
        self.restore_filter()
        if self.findings is None:
            self.findings = self.guard._findings(self.guard._before_step())
        return self.findings

    def clip_grad_norm(self, original, *args, **kwargs):
        if self.guard._open:
            self.look()
        return original(*args, **kwargs)

    def optimizer_step(self, original, *args, **kwargs):
        """The branch. A refused step looks to the Trainer like one that GradScaler skipped: the schedule waits too."""
        if not self.guard._open:  # this step began before watch()
            return original(*args, **kwargs)
        findings, self.findings = self.look(), None
        kept = self.guard._allow(findings)
        if kept:
            original(*args, **kwargs)
            kept = self.guard._kept()
        if not kept or self.guard.scaler is None:  # with a scaler, accelerate has set it already
            self.trainer.optimizer._is_overflow = not kept

    def log(self, logs: dict | None) -> None:
        """The log says how much was skipped so far: it also reaches trainer_state.json, and a run that is resumed."""
        skipped = len(self.guard.events) + self.guard.skipped_before_resume
        if skipped and logs is not None:
            for entry in (logs, self.trainer.state.log_history[-1]):
                entry["guard_skipped"] = skipped


def _callback(link: _TrainerLink) -> Any:
    from transformers import TrainerCallback

    class GuardCallback(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            link.attach()

        def on_substep_end(self, args, state, control, **kwargs):
            link.restore_filter()

        def on_step_end(self, args, state, control, **kwargs):
            if link.guard.stopped is not None:
                control.should_training_stop = True
            return control

        def on_log(self, args, state, control, logs=None, **kwargs):
            link.log(logs)

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


def watch(
    trainer_or_model: Any,
    policy: str = "skip",
    locate: bool = False,
    max_consecutive: int = 5,
    *,
    check_state: bool = False,
    keep_on: str = "cpu",
    folder: str | Path | None = None,
    optimizer: torch.optim.Optimizer | None = None,
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
        optimizer state not finite, from a copy taken after every good step. "stop" ends the run at the first bad step;
        in a Trainer `train` returns. "raise" raises `GuardStop` there. "off" hooks in nothing and costs nothing.
    locate: replay a refused step at once under `nanlab.locate`; the Report is in the event.
    max_consecutive: that many refused steps in a row are a dead run, which is stopped.
    check_state: look also at buffers before, and at parameters and optimizer state after the step (a second fetch).
        In a plain loop call ``guard.after_step()`` after `optimizer.step`. Always on with "rollback".
    keep_on: "cpu" or "device", where the last good copy of trainable parameters, buffers and optimizer state lives.
        With AdamW it is three times the size of the parameters; `Guard.summary` states the bytes.
    folder: where a run that ends leaves its post-mortem; by default ``guard`` in the Trainer's output_dir, else in the
        working directory.
    optimizer, scaler: a plain loop's; the `GradScaler` if any, and the optimizer for "rollback" and `check_state`, and
        where `step` takes a closure: what that runs is part of the step, and is not looked at. Without the optimizer
        its batches would be counted into the next step, and what they change not be put back bit for bit.

    A Trainer's schedule does not advance on a refused step, as with a step that GradScaler skips; `global_step` does,
    for it counts the data. In a plain loop step the scheduler under the same ``if``.
    With a GradScaler, an inf in the scaled gradients with a finite loss is the scaler's own business; after 16 such
    steps in a row the guard ends the run and says that none has been taken.
    Raises `InputError` for a policy or object that it does not know, and for a folder that cannot be written to.
    """
    a_trainer = all(hasattr(trainer_or_model, name) for name in ("training_step", "compute_loss", "add_callback"))
    a_module = isinstance(trainer_or_model, nn.Module)
    wrong = {
        f"policy {policy!r} is unknown; choose one of {', '.join(POLICIES)}": policy not in POLICIES,
        f"keep_on {keep_on!r} is unknown; choose 'cpu' or 'device'": keep_on not in ("cpu", "device"),
        f"max_consecutive is {max_consecutive!r}; give 1 or more": (
            not isinstance(max_consecutive, Real) or not max_consecutive >= 1
        ),
        f"{_kind(trainer_or_model)} is neither a Trainer nor a torch.nn.Module": not a_trainer and not a_module,
        "a Trainer brings its own optimizer and scaler; leave out optimizer= and scaler=": (
            a_trainer and not (optimizer is None and scaler is None)
        ),
        f"optimizer is a {_kind(optimizer)}; give the optimizer of your loop": (
            optimizer is not None and not hasattr(optimizer, "param_groups")
        ),
        f"scaler is a {_kind(scaler)}; give the GradScaler of your loop": (
            scaler is not None and not hasattr(scaler, "is_enabled")
        ),
        f"the folder {folder} cannot be written to; name one that can": folder is not None and not _can_hold(folder),
    }
    if message := next((message for message, is_so in wrong.items() if is_so), None):
        raise InputError(f"watch: {message}")
    if folder is None:
        folder = Path(trainer_or_model.args.output_dir) / "guard" if a_trainer else Path("guard")
    guard = Guard(policy, locate, max_consecutive, check_state, keep_on, folder)
    if policy == "off":
        return guard
    if a_trainer:
        if any(type(c).__name__ == "GuardCallback" for c in trainer_or_model.callback_handler.callbacks):
            raise InputError("watch: this trainer is watched already; call remove() on its guard first")
        _TrainerLink(guard, trainer_or_model)
        return guard
    if optimizer is None and guard.check_state:
        raise InputError(
            "watch: policy='rollback' and check_state=True need the optimizer: watch(model, optimizer=...)"
        )
    guard._watch_module(trainer_or_model, optimizer, scaler)
    return guard
