"""Record what every operation of one step does to the finite numbers. Nothing is raised and nothing is changed.

A ``TorchDispatchMode`` sees each operation below autograd. A healthy output costs one reduction. A non-finite one makes an
``Event`` when it is *born* (finite inputs, non-finite output) or when an inf becomes NaN; otherwise it carries the events of
its inputs. Events are kept by storage and region, so that views and partly written buffers keep their own history. No
tensor is kept alive: an event holds text and numbers only.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanlab.tracing.causes import Birth, bad, bad_mask, diagnose, is_float, plain, span

PACKAGE, TORCH = (str(Path(p).parent) + os.sep for p in (Path(__file__).parent, torch.__file__))
STDLIB = tuple({sysconfig.get_path(p) + os.sep for p in ("stdlib", "platstdlib")})
INSTALLED = ("site-packages", "dist-packages")
UNINITIALISED = ("empty", "resize_", "new_empty")
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "bernoulli_", "random_", "set_")
# In an optimizer step these cannot make a finite number bad: averages, shrinking by a factor, adding a constant.
HARMLESS = re.compile(r"(_foreach_)?(lerp|sqrt|mul|add)_?")
COUNTS, SPREADS = ("sum", "count_nonzero"), ("std", "var", "sqrt", "norm", "linalg_vector_norm", "sub", "rsub")
BOUNDARY = (*COUNTS, *SPREADS, "_local_scalar_dense", "_amp_foreach_non_finite_check_and_unscale_")
HIDDEN, USER, LIBRARY, ENGINE = range(4)


# -- where in the code --------------------------------------------------------------------------------------------------
@functools.cache
def whose(code) -> int:
    """Whose code is it: the user's, a library's, the autograd engine's, or machinery that nobody wants to see."""
    file = code.co_filename
    if file.startswith(TORCH):
        return ENGINE if code.co_name == "_engine_run_backward" else HIDDEN
    if file.startswith((PACKAGE + "tracing", "<frozen", "<eval_with_key", "<torch_package")):
        return HIDDEN
    if file.startswith(PACKAGE):  # the course's own cases count as the reader's code
        return USER if file.startswith(PACKAGE + "course") else LIBRARY
    if any(part in INSTALLED for part in Path(file).parts):
        return LIBRARY
    return HIDDEN if file.startswith(STDLIB) else USER


def walk(frame, stop=None) -> tuple[tuple, bool]:
    """The frames that matter from ``frame`` out to ``stop``, innermost first; True if the autograd engine came before."""
    found = []
    while frame is not None and frame is not stop:
        if kind := whose(frame.f_code):
            if kind == ENGINE:
                return tuple(found), True
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found), False


def line_of(code, instruction: int) -> str:
    """'file.py:12'. A notebook cell is called 'cell:12'; a library's file goes by its path inside the package."""
    line = next((n for start, end, n in code.co_lines() if start <= instruction < end and n), code.co_firstlineno)
    parts = Path(code.co_filename).parts
    name = parts[-1]
    if "ipykernel_" in code.co_filename or name.startswith(("<cell", "<ipython-input")):
        name = "cell"
    elif whose(code) == LIBRARY:
        cut = max((i + 1 for i, part in enumerate(parts) if part in INSTALLED), default=len(Path(PACKAGE).parts) - 1)
        name = "/".join(parts[cut:])
    return f"{name}:{line}"


def within(frame, file: str) -> bool:
    """Is this file of torch's at work, on this side of the autograd engine?"""
    while frame is not None and whose(frame.f_code) != ENGINE:
        if frame.f_code.co_filename.startswith(TORCH) and frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def name_in_frames(x: Tensor) -> str:
    """What the user's code calls this tensor: a variable, or an entry of a dict."""
    key, frame = key_of(x), sys._getframe(1)
    same = lambda v: v is x or (is_float(v) and v.numel() == x.numel() and key_of(v) == key)
    while frame is not None:
        for name, value in list(frame.f_locals.items()) if whose(frame.f_code) == USER else ():
            entries = value.items() if isinstance(value, Mapping) else ()
            if same(value) or (found := next((k for k, v in entries if same(v)), None)) is not None:
                return name if same(value) else f"{name}[{found!r}]"
        frame = frame.f_back
    return "an unnamed tensor"


# -- what happened ------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Event:
    """A birth: a finite number became inf or NaN, an inf became NaN, or a bad value came in from outside."""

    n: int
    op: str
    phase: str
    module: str
    frames: tuple  # (code, instruction), innermost first, the user's and the libraries' only
    note: str = ""
    kind: str = ""
    cause: str = "unknown"
    amount: str = ""
    rows: list[int] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    detail: str = ""
    name: str = ""  # of a tensor that was bad on arrival
    parents: tuple[Event, ...] = ()
    deliberate: bool = False  # an inf that somebody wrote on purpose
    scaled: bool = False  # made by GradScaler

    @property
    def source(self) -> str:
        return next((line_of(*f) for f in self.frames if whose(f[0]) == USER), "")

    @property
    def library(self) -> str:
        return line_of(*self.frames[0]) if self.frames and whose(self.frames[0][0]) == LIBRARY else ""

    def fill(self, t: Tensor, mask: Tensor, **fields: object) -> Event:
        """Say how much of ``t`` is bad, and in which rows."""
        self.amount = f"{int(mask.sum())} of {mask.numel()} in {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        self.rows = mask.reshape(len(mask), -1).any(1).nonzero().flatten().tolist() if mask.dim() else []
        self.__dict__.update(fields)
        return self

    def root(self) -> Event:
        """The earliest ancestor that was not put there on purpose; else this event."""
        real = [root for root in (p.root() for p in self.parents) if not root.deliberate]
        return min(real, key=lambda e: e.n) if real and self.cause != "masked_row" else self


class Call:
    """A module's forward in progress. The frame is let go when it returns, or its locals would stay alive."""

    def __init__(self, name: str, frame, frames: tuple, below: Call | None) -> None:
        self.name, self.frame, self.frames, self.below = name, frame, frames, below

    def around(self) -> tuple:
        """The frames outside this call."""
        return self.frames + (self.below.around() if self.below else ())


def key_of(t: Tensor) -> StorageWeakRef:
    return StorageWeakRef(plain(t).untyped_storage())


def covers(region: tuple, address: int) -> bool:
    """Does a tensor of this (offset, shape, strides) hold the element at ``address`` of its storage?"""
    rest = address - region[0]
    for step, size in sorted(zip(region[2], region[1], strict=True), reverse=True):
        index = min(rest // step, size - 1) if step else 0
        rest -= max(index, 0) * step
    return rest == 0


def merge(groups: Iterable[tuple[Event, ...]]) -> tuple[Event, ...]:
    return tuple(sorted({id(e): e for events in groups for e in events}.values(), key=lambda e: e.n)[:8])


@functools.cache
def facts(func) -> tuple[str, tuple, bool, bool]:
    """(name, arguments it writes, is the output a view or uninitialised, does it overwrite without reading)."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return str(func), (), False, False
    name, arguments = schema.name.split("::")[-1], list(enumerate(schema.arguments))
    writes = tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)
    if name.endswith("batch_norm") and not writes:  # it updates its running statistics without saying so
        writes = tuple((i, a.name) for i, a in arguments if a.name.startswith("running_"))
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return (
        name,
        writes,
        view or name.startswith(UNINITIALISED),
        name in OVERWRITES or schema.overload_name.endswith("out"),
    )


def leaves(roots: list[Tensor]) -> Iterator[Tensor]:
    """The leaf tensors that a backward pass from ``roots`` reaches."""
    todo, seen = [t.grad_fn for t in roots if t.grad_fn is not None], set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [n for n, _ in node.next_functions if n is not None]
            if (variable := getattr(node, "variable", None)) is not None:
                yield variable


class Tracer(TorchDispatchMode):
    """Watch everything inside ``with Tracer() as t``; then ``t.sink(name, tensor)`` for each thing that should be finite."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap __torch_dispatch__ twice, at some microseconds an operation

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.taint: dict[StorageWeakRef, list[tuple[tuple, tuple[Event, ...]]]] = {}  # storage → (region, events)
        self.names: dict[StorageWeakRef, tuple[str, str]] = {}  # storage → (name, the cause if it is bad on arrival)
        self.counts: set[StorageWeakRef] = set()  # sums: a zero among them may be an empty count
        self.spreads: set[StorageWeakRef] = set()  # single numbers that are no counts
        self.forward: dict[int, tuple] = {}  # autograd sequence number → (call, frames, operation)
        self.modules: dict[int, str] = {}
        self.parameters: dict[int, tuple[str, Tensor]] = {}
        self.buffers: dict[str, Tensor] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.growth: list[tuple[int, float]] = []
        self.sinks: dict[str, tuple[Event, ...]] = {}
        self.reads: tuple[Event, ...] = ()  # behind the last bad number that was read into Python
        self.call: Call | None = None
        self.stepping: torch.optim.Optimizer | None = None
        self.bad_setting: Event | None = None  # a NaN learning rate
        self.scaler_skips = self.went_backward = False
        self.outside: tuple = ()  # frames around the call of backward()

    # -- what things are called -----------------------------------------------------------------------------------------
    def adopt(self, model: nn.Module, prefix: str = "") -> None:
        """Learn the names of a model's modules, parameters and buffers."""
        for name, module in model.named_modules():
            self.modules.setdefault(id(module), prefix + name)
        for name, parameter in model.named_parameters():
            self.adopt_parameter(prefix + name, parameter)
        for name, buffer in model.named_buffers():
            self.name(buffer, f"buffer {prefix}{name}", "bad_state")
            self.buffers[prefix + name] = buffer

    def adopt_parameter(self, name: str, p: Tensor) -> None:
        self.parameters.setdefault(id(p), (name, p))
        self.name(p, f"parameter {name}", "bad_state")
        self.name(p.grad, f"gradient of {name}, left over from before", "bad_state")

    def name(self, t: object, name: str, cause: str = "bad_input") -> None:
        if is_float(t):
            self.names.setdefault(key_of(t), (name, cause))

    def name_of(self, p: Tensor) -> str:
        return self.parameters.get(id(p), ("a leaf tensor",))[0]

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """On its first step: what its state is called, which may have been restored from a checkpoint."""
        self.optimizers[id(optimizer)] = optimizer
        for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            self.adopt_parameter(f"#{i}", p)
            for name, value in optimizer.state.get(p, {}).items():
                self.name(value, f"optimizer state {name} of {self.name_of(p)}", "bad_state")

    def check_settings(self, optimizer: torch.optim.Optimizer) -> None:
        """A NaN learning rate is no tensor at all."""
        settings = [(i, k, v) for i, group in enumerate(optimizer.param_groups) for k, v in group.items()]
        for i, name, value in settings:
            if isinstance(value, (float, Tensor)) and not math.isfinite(value) and self.bad_setting is None:
                label, event = f"{name} of the optimizer", self.event("step")
                detail = f"param_groups[{i}]['{name}'] is {float(value)} when step() is called."
                kind = "nan" if value != value else "inf"
                event.__dict__.update(op=label, name=label, phase="state", cause="bad_state", kind=kind, detail=detail)
                self.bad_setting, self.sinks[label] = event, (event,)

    # -- entering and leaving -------------------------------------------------------------------------------------------
    def __enter__(self):
        self.hooks = [
            module_hooks.register_module_forward_pre_hook(self.enter_module),
            module_hooks.register_module_forward_hook(self.leave_module, always_call=True),
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]
        self.backward, torch.autograd.backward = torch.autograd.backward, self.run_backward
        return super().__enter__()

    def __exit__(self, *exc):
        torch.autograd.backward = self.backward
        for hook in self.hooks:
            hook.remove()
        self.call = None
        return super().__exit__(*exc)

    def enter_module(self, module: nn.Module, _args) -> None:
        if id(module) not in self.modules:
            self.adopt(module)
        frame = sys._getframe(1)
        frames, engine = walk(frame, self.call and self.call.frame)
        name = self.modules[id(module)] or type(module).__name__
        self.call = Call(name, frame, frames + self.outside if engine else frames, self.call)

    def leave_module(self, *_args) -> None:
        if self.call:
            self.call.frame, self.call = None, self.call.below

    def before_step(self, optimizer: torch.optim.Optimizer, *_args) -> None:
        with _disable_current_modes():
            self.stepping = optimizer
            if id(optimizer) not in self.optimizers:
                self.adopt_optimizer(optimizer)
            self.check_settings(optimizer)
            self.growth.append((self.n, self.largest()))

    def after_step(self, *_args) -> None:
        self.stepping = None

    def largest(self) -> float:
        """The largest finite |parameter| in a sample of each that an optimizer moves."""
        groups = (g for o in self.optimizers.values() for g in o.param_groups)
        samples = [plain(p).flatten()[:4096] for g in groups for p in g["params"] if p.numel()]
        values = [abs(v.item()) for s in samples for v in torch.aminmax(s)]
        return max((v for v in values if math.isfinite(v)), default=math.nan)

    def run_backward(self, tensors, *args, **kwargs):
        if torch._C._current_graph_task_id() != -1:
            return self.backward(tensors, *args, **kwargs)
        roots = [t for t in ([tensors] if isinstance(tensors, Tensor) else tensors) if is_float(t)]
        self.went_backward, (self.outside, _) = True, walk(sys._getframe(1))
        for t in roots:
            self.sink("the loss given to backward()", t)
        result = self.backward(tensors, *args, **kwargs)
        with (
            _disable_current_modes()
        ):  # gradients are looked at here: a guard may throw them away, another rank may spoil them
            for p in leaves(roots):
                self.sink(f"gradient of {self.name_of(p)}", p.grad)
        return result

    # -- where are we ---------------------------------------------------------------------------------------------------
    def event(self, op: str, writes_leaf: bool = False) -> Event:
        """A blank event, here and now: phase, module, and lines."""
        local, engine = walk(sys._getframe(1), self.call and self.call.frame)
        around = self.outside if engine else ()
        if torch._C._current_graph_task_id() == -1 or (local and within(sys._getframe(1), "checkpoint.py")):
            frames = local + (self.call.around() if self.call else around)
            note = "recomputed for checkpointing" if engine else ""
            if self.stepping is not None or (writes_leaf and not torch.is_grad_enabled()):
                return Event(self.n, op, "optimizer", "", frames)
            return Event(self.n, op, "forward", self.call.name if self.call else "", frames, note)
        # A native node is tied to the forward line that made it; Python code in a backward has a line of its own.
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -9
        made = next((self.forward[k] for k in range(number, number - 3, -1) if k in self.forward), None)
        call, lines, op_before = made or (None, around, "")
        module, note = call.name if call else "", f"gradient of {op_before}" if made else ""
        if (
            variable := getattr(node, "variable", None)
        ) is not None:  # AccumulateGrad: a parameter, but no forward line
            lines, call, note = around, None, f"gradient of {self.name_of(variable)}"
            module = self.name_of(variable).rpartition(".")[0]
        frames = local + around if local else lines + (call.around() if call else ())
        return Event(self.n, op, "backward", module, frames, f"{node.name()}, {note}" if node is not None else "")

    # -- what happens ---------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, writes, skip, overwrites = facts(func)
        written, before = [], {}
        if writes:
            found = (args[i] if i < len(args) else kwargs.get(a) for i, a in writes)
            written = [t for v in found for t in (v if isinstance(v, (list, tuple)) else (v,)) if is_float(t)]
            if overwrites:
                before = dict.fromkeys(map(id, written))
            elif self.stepping is None or name.startswith("_fused"):
                before = {id(t): bad(t) for t in written}
        out = func(*args, **kwargs)
        self.n += 1
        if torch.is_grad_enabled() and (number := torch.autograd._get_sequence_nr() - 1) not in self.forward:
            self.forward[number] = (self.call, walk(sys._getframe(1), self.call and self.call.frame)[0], name)
        if skip or (self.stepping is not None and not self.taint and harmless(name, args)):
            return out
        outs = written or [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if is_float(t)]
        if written and isinstance(out, tuple):
            outs = written + [t for t in out if is_float(t) and not any(t is w for w in written)]
        found = [(i, t, kind) for i, t in enumerate(outs) if (kind := bad(t))]
        if found:
            self.note(Birth(name, func, args, kwargs), outs, found, before)
        if name in BOUNDARY and (name[0] == "_" or (isinstance(out, Tensor) and out.numel() <= 64)):
            self.boundary(name, args, out)
        return out

    def boundary(self, name: str, args: tuple, out) -> None:
        if name in COUNTS:
            self.counts.add(key_of(out))
        elif name in SPREADS:
            self.spreads.add(key_of(out))
        elif name == "_local_scalar_dense" and is_float(args[0]) and (kind := bad(args[0])):
            self.reads = self.blame(args[0], kind)
        elif name.startswith("_amp"):
            self.scaler_skips |= bool(args[1]) and float(args[2]) < 1  # at a scale of 1 there is nothing left to lower

    def note(self, birth: Birth, outs: list[Tensor], found: list, before: dict[int, str | None]) -> None:
        """Some outputs are not finite: carried on from the inputs, or born here?"""
        born: Event | None = None
        for i, t, kind in found:
            case = birth.aligned(i, len(outs))
            case.out, case.kind = t, kind
            if self.stepping is not None and id(t) not in before and key_of(t) not in self.taint:
                case.was_bad_before(t) and self.arrived(t, kind)
            if self.stepping is not None and id(t) not in before:
                before[id(t)] = kind if key_of(t) in self.taint else ""
            case.inputs = [(a, x, before[id(x)] if id(x) in before else bad(x)) for a, x in case.tensors()]
            case.inputs = [(a, x, k) for a, x, k in case.inputs if k is not None]
            blame = {id(x): self.blame(x, k) for _, x, k in case.inputs if k}
            carried, parents, is_born = trace(case, blame, before)
            if is_born:
                born = born or self.born(case, parents, id(t) in before)
            self.record(t, (*carried, *((born,) if is_born and born else ())))

    def born(self, birth: Birth, parents: tuple, written: bool) -> Event:
        leaf = written and birth.out.is_leaf and birth.out.requires_grad
        event = self.event(birth.op.rstrip("_"), leaf)
        birth.phase, birth.native = event.phase, not walk(sys._getframe(1), self.call and self.call.frame)[0]
        birth.counted = lambda t: key_of(t) in self.counts or (t.numel() == 1 and key_of(t) not in self.spreads)
        birth.eps = self.stepping.param_groups[0].get("eps") if self.stepping is not None else None
        literal = birth.literal and birth.literal == birth.kind.strip("-")
        if literal and self.stepping is not None and self.bad_setting:
            return self.bad_setting
        cause, detail = diagnose(birth) if not literal else ("bad_input" if event.phase == "forward" else "unknown", "")
        inputs = [f"{a}: {span(x)}" for a, x, _ in birth.inputs]
        mask = birth.fresh if birth.fresh is not None else bad_mask(birth.out)
        return event.fill(
            birth.out, mask, kind=birth.kind.strip("-"), cause=cause, detail=detail, inputs=inputs, parents=parents,
            deliberate=bool(literal) and birth.kind != "nan", scaled=within(sys._getframe(1), "grad_scaler.py"),
        )  # fmt: skip

    def blame(self, x: Tensor, kind: str) -> tuple[Event, ...]:
        """Whose fault is the first bad element of ``x``? Nobody's here, if it came in from outside."""
        records = self.taint.get(key_of(x))
        if not records:
            return (self.arrived(x, kind),)
        p = plain(x)
        first, address = int(bad_mask(x).flatten().to(torch.uint8).argmax()), p.storage_offset()
        for size, step in zip(reversed(p.shape), reversed(p.stride()), strict=True):
            first, index = divmod(first, size)
            address += index * step
        return next((events for region, events in reversed(records) if covers(region, address)), records[-1][1])

    def arrived(self, x: Tensor, kind: str) -> Event:
        known = self.names.get(key_of(x))
        name, cause = known or (name_in_frames(x), "bad_state" if isinstance(x, nn.Parameter) else "bad_input")
        good = plain(x)[~bad_mask(x)]
        mask = kind == "-inf" and not isinstance(x, nn.Parameter) and bool((good == good[:1]).all())  # 0 and −inf only
        event = self.event(name).fill(
            x, bad_mask(x), phase="state" if cause == "bad_state" else "data", kind=kind.strip("-"), cause=cause, name=name,
            inputs=[f"{name}: {span(x)}"], deliberate=mask or (x.dim() == 0 and not known and kind != "nan"),
        )  # fmt: skip
        self.record(x, (event,))
        return event

    def record(self, t: Tensor, events: tuple[Event, ...]) -> None:
        p = plain(t)
        records = self.taint.setdefault(key_of(t), [])
        if p.numel() * p.element_size() >= p.untyped_storage().nbytes():
            records.clear()
        records.append(((p.storage_offset(), tuple(p.shape), p.stride()), events))

    # -- what should have been finite -----------------------------------------------------------------------------------
    def sink(self, name: str, t: object) -> None:
        """Something that ought to be finite: remember whose fault it is, if it is not."""
        if is_float(t) and name not in self.sinks and (kind := bad(t)):
            self.sinks[name] = self.blame(t, kind)

    def sink_number(self, name: str, value: float) -> None:
        """A Python number in the result: it was read from a tensor, most likely the last bad one that was read."""
        if not math.isfinite(value):
            kind = "nan" if value != value else "inf"
            self.sinks[name] = self.reads or (Event(self.n, "float", "forward", "", (), kind=kind, name=name),)

    def sink_state(self) -> None:
        """Parameters, gradients, optimizer state; buffers only if this step made them NaN."""
        for name, p in self.parameters.values() if self.taint else ():
            self.sink(f"gradient of {name}", p.grad)
            self.sink(f"parameter {name}", p)
        for optimizer in self.optimizers.values() if self.taint else ():
            for p, state in optimizer.state.items():
                for name, value in state.items():
                    self.sink(f"optimizer state {name} of {self.name_of(p)}", value)
        for name, buffer in self.buffers.items() if self.taint else ():
            if is_float(buffer) and bad(buffer) == "nan" and not any(e.name for e in self.blame(buffer, "nan")):
                self.sink(f"buffer {name}", buffer)

    def abandoned(self, error: BaseException) -> None:
        """The step raised: what its frames held is all there is to judge by."""
        trace = error.__traceback__
        while trace is not None:
            for name, value in list(trace.tb_frame.f_locals.items()) if whose(trace.tb_frame.f_code) == USER else ():
                self.sink(f"variable {name} when the step raised", value)
            trace = trace.tb_next


def harmless(name: str, args: tuple) -> bool:
    scalar = args[1] if len(args) > 1 else 0.0
    if not HARMLESS.fullmatch(name) or isinstance(scalar, (list, tuple, Tensor)) != ("lerp" in name):
        return False
    return "mul" not in name or abs(scalar) <= 1


def trace(birth: Birth, blame: dict[int, tuple], before: dict) -> tuple[tuple, tuple, bool]:
    """(events carried on, parents of what is born, is anything born). Element by element where places correspond."""
    bad_in = [(x, k) for _, x, k in birth.inputs if k]
    if birth.pointwise and not any(id(x) in before for x, _ in bad_in):
        out, nan = bad_mask(birth.out), torch.isnan(birth.out)
        was_bad, was_nan = torch.zeros_like(out), torch.zeros_like(out)
        for x, _ in bad_in:
            was_bad |= bad_mask(x)
            was_nan |= torch.isnan(x)
        birth.fresh = (out & ~was_bad) | (nan & ~was_nan)
        touching = lambda mask, where: merge(blame[id(x)] for x, _ in bad_in if (mask(x) & where).any())
        carried = merge([touching(torch.isnan, nan & ~birth.fresh), touching(bad_mask, out & ~nan)])
        return carried, touching(bad_mask, birth.fresh), bool(birth.fresh.any())
    same = [x for x, k in bad_in if k == "nan" or birth.kind != "nan"]
    if birth.op in ("_log_softmax", "logsumexp") and birth.kind != "nan":
        same = []  # a probability of zero becomes visible here, whatever masked it
    return merge(blame[id(x)] for x in same), () if same else merge(blame.values()), not same
