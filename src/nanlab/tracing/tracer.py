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
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanlab.tracing.causes import Birth, diagnose

HERE = str(Path(__file__).parent) + os.sep
PACKAGE = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
INSTALLED = ("site-packages", "dist-packages")
STDLIB = tuple({sysconfig.get_path(p) + os.sep for p in ("stdlib", "platstdlib")})
BOUNDARY = ("sum", "_local_scalar_dense", "_amp_foreach_non_finite_check_and_unscale_", "allreduce_", "allgather_")
UNINITIALISED = ("empty", "resize_", "new_empty")
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "bernoulli_", "random_", "set_")
HIDDEN, USER, LIBRARY, ENGINE = 0, 1, 2, 3


# -- tensors ------------------------------------------------------------------------------------------------------------
def is_float(t: object) -> bool:
    return isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.device.type != "meta"


def plain(t: Tensor) -> Tensor:
    """The numbers of ``t`` as a strided tensor of a dtype that can be reduced."""
    t = t.detach()
    t = t._values() if t.layout is torch.sparse_coo else t.to_dense() if t.layout is not torch.strided else t
    if t.is_complex():
        return torch.view_as_real(t.resolve_conj())
    return t.float() if t.element_size() == 1 else t


def bad(t: Tensor) -> str:
    """'' | 'inf' | '-inf' | 'nan': the worst value in ``t``. One sum when it is healthy; the sum may overflow, so look twice."""
    if t.layout is not torch.strided or t.is_complex() or t.element_size() == 1:
        t = plain(t)
    if t.numel() == 0:
        return ""
    total = t.sum().item()
    if total - total == 0:
        return ""
    low, high = (v.item() for v in torch.aminmax(t))
    return "nan" if high != high else "inf" if high == math.inf else "-inf" if low == -math.inf else ""


def key_of(t: Tensor) -> StorageWeakRef:
    return StorageWeakRef(plain(t).untyped_storage())


def span(t: Tensor) -> str:
    """Shape, dtype, range of the finite values, and how many are zero, inf or NaN."""
    t = plain(t)
    text = f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
    good = t[torch.isfinite(t)]
    if t.numel() == 0:
        return text + " empty"
    if good.numel():
        low, high = torch.aminmax(good)
        text += f" in [{low.item():.3g}, {high.item():.3g}]"
    counts = {"zero": (t == 0).sum(), "inf": torch.isinf(t).sum(), "nan": torch.isnan(t).sum()}
    return text + "".join(f", {int(n)} {name}" for name, n in counts.items() if n)


def bad_rows(mask: Tensor) -> list[int]:
    return mask.reshape(len(mask), -1).any(1).nonzero().flatten().tolist() if mask.dim() else []


@dataclass(frozen=True)
class Region:
    """Where a tensor lies in its storage."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor) -> Region:
        t = plain(t)
        return cls(t.storage_offset(), tuple(t.shape), t.stride())

    def has(self, address: int) -> bool:
        rest = address - self.offset
        for step, size in sorted(zip(self.stride, self.size, strict=True), reverse=True):
            index = min(rest // step, size - 1) if step else 0
            if index < 0:
                return False
            rest -= index * step
        return rest == 0


# -- where in the code ----------------------------------------------------------------------------------------------------
@functools.cache
def whose(code) -> int:
    """Whose code is it: the user's, a library's, or machinery that nobody wants to see."""
    file = code.co_filename
    if file.startswith(TORCH):
        return ENGINE if code.co_name == "_engine_run_backward" else HIDDEN
    if file.startswith(HERE) or file.startswith(("<frozen", "<eval_with_key", "<torch_package")):
        return HIDDEN
    if file.startswith(PACKAGE):
        return USER if file.startswith(PACKAGE + "course" + os.sep) else LIBRARY
    if any(part in INSTALLED for part in Path(file).parts):
        return LIBRARY
    return HIDDEN if file.startswith(STDLIB) else USER


def walk(frame, stop) -> tuple[tuple, bool]:
    """The frames that matter from ``frame`` out to ``stop``, innermost first, and whether the autograd engine came first."""
    found = []
    while frame is not None and frame is not stop:
        code = frame.f_code
        if kind := whose(code):
            if kind == ENGINE:
                return tuple(found), True
            found.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found), False


def line_of(code, lasti: int) -> str:
    """'file.py:12'; a notebook cell is called 'cell:12', a library's file goes by its path inside the package."""
    line = next((n for start, end, n in code.co_lines() if start <= lasti < end and n), code.co_firstlineno)
    parts = Path(code.co_filename).parts
    name = parts[-1]
    if "ipykernel_" in code.co_filename or name.startswith(("<cell", "<ipython-input", "Cell ")):
        name = "cell"
    elif whose(code) == LIBRARY:
        cut = max((i + 1 for i, part in enumerate(parts) if part in INSTALLED), default=len(Path(PACKAGE).parts) - 1)
        name = "/".join(parts[cut:])
    return f"{name}:{line}"


@dataclass(frozen=True)
class Site:
    """Where an operation ran. ``frames``: (code, instruction), innermost first, the user's and the libraries' only."""

    op: str
    phase: str
    module: str = ""
    frames: tuple = ()
    node: str = ""
    note: str = ""

    @property
    def source(self) -> str:
        return next((line_of(*f) for f in self.frames if whose(f[0]) == USER), "")

    @property
    def library(self) -> str:
        return line_of(*self.frames[0]) if self.frames and whose(self.frames[0][0]) == LIBRARY else ""


@dataclass(eq=False)
class Event:
    """A birth: a finite number became inf or NaN, an inf became NaN, or a bad value came in from outside."""

    n: int
    site: Site
    kind: str
    cause: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    count: int = 0
    rows: list[int] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    detail: str = ""
    name: str = ""
    parents: tuple[Event, ...] = ()
    deliberate: bool = False  # an inf that somebody wrote on purpose
    scaled: bool = False  # made by GradScaler.scale

    def root(self) -> Event:
        """The earliest ancestor that was not put there on purpose; else this event."""
        if self.cause == "masked_row":
            return self
        real = [root for root in (p.root() for p in self.parents) if not root.deliberate]
        return min(real, key=lambda e: e.n) if real else self


class Call:
    """A module's forward in progress. The frame is let go when it returns, or its locals would stay alive."""

    __slots__ = ("below", "frame", "frames", "name")

    def __init__(self, name, frame, frames, below) -> None:
        self.name, self.frame, self.frames, self.below = name, frame, frames, below


@functools.cache
def facts(func) -> tuple[str, tuple, bool, bool]:
    """(name, arguments it writes, is the output a view or uninitialised, does it overwrite without reading)."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return str(func), (), False, False
    name = schema.name.split("::")[-1]
    writes = [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    if name.endswith("batch_norm") and not writes:  # it updates its running statistics without saying so
        writes = [(i, a.name) for i, a in enumerate(schema.arguments) if a.name.startswith("running_")]
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return name, tuple(writes), view or name.startswith(UNINITIALISED), name in OVERWRITES


class Tracer(TorchDispatchMode):
    """Watch everything inside ``with Tracer() as t``; then ``t.sink(name, tensor)`` for each thing that should be finite."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap __torch_dispatch__ twice, at some microseconds an operation

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.taint: dict[StorageWeakRef, list[tuple[Region, tuple[Event, ...]]]] = {}
        self.names: dict[StorageWeakRef, tuple[str, str]] = {}  # storage → (name, the cause if it is bad on arrival)
        self.counts: set[StorageWeakRef] = set()  # scalar sums: a zero among them is an empty count
        self.forward: dict[int, tuple] = {}  # autograd sequence number → (call, frames, operation)
        self.call: Call | None = None
        self.modules: dict[int, str] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.parameters: dict[int, tuple[str, Tensor]] = {}
        self.buffers: dict[str, Tensor] = {}
        self.growth: list[float] = []
        self.sinks: dict[str, tuple[Event, ...]] = {}
        self.reads: tuple[Event, ...] = ()  # the last bad number that was read into Python
        self.stepping: torch.optim.Optimizer | None = None
        self.bad_groups: list[Event] = []
        self.scaler_skips = self.communicated = self.went_backward = self.compiled = False
        self.outside: tuple = ()  # frames of the call of backward()

    # -- what things are called ---------------------------------------------------------------------------------------
    def adopt(self, model: nn.Module, prefix: str = "") -> None:
        for name, module in model.named_modules():
            self.modules.setdefault(id(module), prefix + name)
        for name, parameter in model.named_parameters():
            self.adopt_parameter(prefix + name, parameter)
        for name, buffer in model.named_buffers():
            self.name(buffer, f"buffer {prefix}{name}", "bad_state")
            self.buffers[prefix + name] = buffer

    def adopt_parameter(self, name: str, p: Tensor) -> None:
        if id(p) not in self.parameters:
            self.parameters[id(p)] = (name, p)
            self.name(p, f"parameter {name}", "bad_state")
            self.name(p.grad, f"gradient of {name}, left over from before", "bad_state")

    def name(self, t: object, name: str, cause: str = "bad_input") -> None:
        if is_float(t):
            self.names.setdefault(key_of(t), (name, cause))

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """On its first step: names, and a look at the state that was there before (a restored checkpoint's, say)."""
        if any(o is optimizer for o in self.optimizers):
            return
        self.optimizers.append(optimizer)
        for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            self.adopt_parameter(f"#{i}", p)
            for name, value in optimizer.state.get(p, {}).items():
                if is_float(value):
                    self.name(value, f"optimizer state {name} of {self.parameters[id(p)][0]}", "bad_state")
                    if kind := bad(value):
                        self.arrived(value, kind, self.site("step"))

    def check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """A NaN learning rate is no tensor at all."""
        for i, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, (float, Tensor)) and not math.isfinite(value):
                    kind, label = "nan" if value != value else "inf", f"{name} of the optimizer"
                    detail = f"param_groups[{i}]['{name}'] is {float(value)} when step() is called."
                    event = Event(self.n, self.site("step"), kind, "bad_state", name=label, detail=detail)
                    event.site = replace(event.site, phase="state")
                    self.bad_groups.append(event)
                    self.sinks.setdefault(label, (event,))

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
            self.adopt_optimizer(optimizer)
            self.check_groups(optimizer)
            self.growth.append(self.largest())

    def after_step(self, *_args) -> None:
        self.stepping = None

    def largest(self) -> float:
        """The largest finite |parameter| that an optimizer moves."""
        params = [p.detach() for o in self.optimizers for g in o.param_groups for p in g["params"] if p.numel()]
        values = [abs(v.item()) for p in params for v in torch.aminmax(p)]
        return max((v for v in values if math.isfinite(v)), default=math.nan)

    def run_backward(self, tensors, *args, **kwargs):
        roots = [t for t in ([tensors] if isinstance(tensors, Tensor) else tensors) if is_float(t)]
        if torch._C._current_graph_task_id() != -1:
            return self.backward(tensors, *args, **kwargs)
        self.went_backward = True
        self.outside, _ = walk(sys._getframe(1), None)
        for t in roots:
            self.sink("the loss given to backward()", t)
        result = self.backward(tensors, *args, **kwargs)
        for p in leaves(roots) if self.taint else ():
            self.sink(f"gradient of {self.name_of(p)}", p.grad)
        return result

    def name_of(self, p: Tensor) -> str:
        return self.parameters.get(id(p), ("a leaf tensor",))[0]

    # -- where are we -----------------------------------------------------------------------------------------------------
    def here(self) -> tuple[tuple, bool]:
        """All frames that matter, innermost first, and whether native backward code is running."""
        local, engine = walk(sys._getframe(1), self.call and self.call.frame)
        frames, call = local, self.call
        while call and not (engine and not local):
            frames, call = frames + call.frames, call.below
        return frames + self.outside if engine else frames, engine and not local

    def site(self, op: str, writes_leaf: bool = False) -> Site:
        frames, native = self.here()
        module = self.call.name if self.call else ""
        if torch._C._current_graph_task_id() != -1:
            if native or not recomputing(sys._getframe(1)):
                return self.backward_site(op, frames, native)
            return Site(op, "forward", module, frames, note="recomputed for checkpointing")
        if self.stepping or (writes_leaf and not torch.is_grad_enabled()):
            return Site(op, "optimizer", "", frames)
        return Site(op, "forward", module, frames)

    def backward_site(self, op: str, frames: tuple, native: bool) -> Site:
        """A native node is tied to the forward line that made it; Python code in a backward has a line of its own."""
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -9
        call, lines, made_by = next(
            (self.forward[k] for k in range(number, number - 3, -1) if k in self.forward), (None, (), "")
        )
        module = call.name if call else ""
        while call:
            lines, call = lines + call.frames, call.below
        variable = getattr(node, "variable", None)  # AccumulateGrad: no forward line, but a parameter
        if variable is not None:
            module = self.name_of(variable).rpartition(".")[0]
        note = (
            f"gradient of {self.name_of(variable)}"
            if variable is not None
            else f"gradient of {made_by}" * bool(made_by)
        )
        own = not native or variable is not None or not lines
        return Site(op, "backward", module, frames if own else lines, node.name() if node is not None else "", note)

    # -- what happens -------------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, writes, skip, overwrites = facts(func)
        written, before = [], {}
        if writes:
            found = (args[i] if i < len(args) else kwargs.get(a) for i, a in writes)
            written = [t for v in found for t in (v if isinstance(v, (list, tuple)) else (v,)) if is_float(t)]
            before = {id(t): None if overwrites else self.was_bad(t) for t in written}
        out = func(*args, **kwargs)
        self.n += 1
        if torch.is_grad_enabled() and (number := torch.autograd._get_sequence_nr() - 1) not in self.forward:
            self.forward[number] = (self.call, walk(sys._getframe(1), self.call and self.call.frame)[0], name)
        if skip:
            return out
        outs = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if is_float(t)]
        outs += [t for t in written if not any(t is o for o in outs)] if len(written) < 2 else written
        found = [(i, t, kind) for i, t in enumerate(outs) if (kind := bad(t))]
        if found:
            self.note(func, name, args, kwargs, outs, found, before)
        elif name in BOUNDARY:
            self.boundary(name, args, out)
        return out

    def was_bad(self, t: Tensor) -> str:
        """Before it is written. Within an optimizer step all state was looked at when the step began."""
        return "" if self.stepping and key_of(t) not in self.taint else bad(t)

    def boundary(self, name: str, args: tuple, out) -> None:
        if name == "sum" and out.numel() == 1:
            self.counts.add(key_of(out))
        elif name == "_local_scalar_dense" and is_float(args[0]) and bad(args[0]):
            self.reads = self.blame(args[0], bad(args[0]))
        elif name == "_amp_foreach_non_finite_check_and_unscale_":
            self.scaler_skips |= bool(args[1]) and float(args[2]) < 1  # at a scale of 1 there is nothing left to lower
        elif name.startswith("all"):
            self.communicated = True

    def note(self, func, op, args, kwargs, outs, found, before) -> None:
        """Some outputs are not finite. Which events do they carry on, and is anything born here?"""
        born: Event | None = None
        for i, t, kind in found:
            inputs, args_i, kwargs_i = aligned(func, args, kwargs, i, len(outs), before)
            birth = Birth(op, kind, func, t, inputs, args_i, kwargs_i)
            blame = {id(x): self.blame(x, k) for _, x, k in inputs if k}
            carried, parents, is_born = self.trace(birth, blame, before)
            if is_born:
                born = born or self.born(birth, parents, id(t) in before)
                name = self.names.get(key_of(t), ("",))[0]
                if name and name not in born.name and born.name.count(",") < 3:
                    born.name += ", " * bool(born.name) + name
            self.record(t, (*carried, *((born,) if is_born and born else ())))

    def trace(self, birth: Birth, blame: dict[int, tuple], before: dict) -> tuple[tuple, tuple, bool]:
        """(events carried on, parents of what is born, is anything born). Element by element where places correspond."""
        bad_in = [(x, k) for _, x, k in birth.inputs if k]
        shapes_fit = all(broadcasts(x, birth.out) for x, _ in bad_in)
        if (
            torch.Tag.pointwise in getattr(birth.func, "tags", ())
            and shapes_fit
            and not any(id(x) in before for x, _ in bad_in)
        ):
            out, isnan = ~torch.isfinite(birth.out), torch.isnan(birth.out)
            was_bad, was_nan = torch.zeros_like(out), torch.zeros_like(out)
            for x, _ in bad_in:
                was_bad |= ~torch.isfinite(x)
                was_nan |= torch.isnan(x)
            birth.fresh = (out & ~was_bad) | (isnan & ~was_nan)
            touching = lambda where: merge(blame[id(x)] for x, _ in bad_in if (~torch.isfinite(x) & where).any())
            return touching(out & ~birth.fresh), touching(birth.fresh), bool(birth.fresh.any())
        same = [x for x, k in bad_in if k == "nan" or (birth.kind != "nan")]
        if birth.op in ("_log_softmax", "logsumexp") and birth.kind != "nan":
            same = []  # a probability of zero becomes visible here, whatever masked it
        if same:
            return merge(blame[id(x)] for x in same), (), False
        return (), merge(blame.values()), True

    def born(self, birth: Birth, parents: tuple, written: bool) -> Event:
        leaf = written and birth.out.is_leaf and birth.out.requires_grad
        site = self.site(birth.op.rstrip("_"), leaf)
        frames, native = self.here()
        birth.phase, birth.native = site.phase, native and site.phase == "backward"
        birth.counted = lambda t: key_of(t) in self.counts
        birth.eps = self.stepping and self.stepping.param_groups[0].get("eps")
        literal = birth.literal and birth.literal == birth.kind.strip("-")
        if literal and self.stepping is not None and self.bad_groups:
            return self.bad_groups[0]
        cause, detail = diagnose(birth) if not literal else ("bad_input" if site.phase == "forward" else "unknown", "")
        mask = birth.fresh if birth.fresh is not None else ~torch.isfinite(plain(birth.out))
        return Event(
            self.n,
            site,
            birth.kind.strip("-"),
            cause,
            tuple(birth.out.shape),
            str(birth.out.dtype).removeprefix("torch."),
            int(mask.sum()),
            bad_rows(mask),
            [f"{a}: {span(x)}" for a, x, _ in birth.inputs],
            detail,
            parents=parents,
            deliberate=literal and birth.kind != "nan",
            scaled=scaling(sys._getframe(1)),
        )

    def blame(self, x: Tensor, kind: str) -> tuple[Event, ...]:
        """Whose fault is the first bad element of ``x``? Nobody's here, if it came in from outside."""
        records = self.taint.get(key_of(x))
        if not records:
            return (self.arrived(x, kind),)
        p = plain(x)
        first, address = int((~torch.isfinite(p)).flatten().to(torch.uint8).argmax()), p.storage_offset()
        for size, step in zip(reversed(p.shape), reversed(p.stride()), strict=True):
            first, index = divmod(first, size)
            address += index * step
        return next((events for region, events in reversed(records) if region.has(address)), records[-1][1])

    def arrived(self, x: Tensor, kind: str, site: Site | None = None) -> Event:
        name, cause = self.names.get(key_of(x), ("", "bad_state" if isinstance(x, nn.Parameter) else "bad_input"))
        site = site or self.site("")
        site = replace(
            site, op=name or name_in_frames(x) or "an unnamed tensor", phase="state" if cause == "bad_state" else "data"
        )
        p = plain(x)
        good = p[torch.isfinite(p)]
        flat = good.numel() == 0 or bool((good == good[0]).all())
        mask = not isinstance(x, nn.Parameter) and flat and kind == "-inf"  # 0 and −inf only: an attention mask
        deliberate = mask or (x.dim() == 0 and not name and kind != "nan")
        where = ~torch.isfinite(p)
        event = Event(
            self.n,
            site,
            kind.strip("-"),
            cause,
            tuple(x.shape),
            str(x.dtype).removeprefix("torch."),
            int(where.sum()),
            bad_rows(where),
            [f"{site.op}: {span(x)}"],
            name=site.op,
            deliberate=deliberate,
        )
        self.record(x, (event,))
        return event

    def record(self, t: Tensor, events: tuple[Event, ...]) -> None:
        p = plain(t)
        whole = p.numel() * p.element_size() >= p.untyped_storage().nbytes()
        records = self.taint.setdefault(key_of(t), [])
        if whole:
            records.clear()
        records.append((Region.of(t), events))

    # -- what should have been finite --------------------------------------------------------------------------------------
    def sink(self, name: str, t: object) -> None:
        """Something that ought to be finite: remember whose fault it is, if it is not."""
        if is_float(t) and name not in self.sinks and (kind := bad(t)):
            self.sinks[name] = self.blame(t, kind)

    def sink_number(self, name: str, value: float) -> None:
        """A Python number in the result: it was read from a tensor, most likely the last bad one that was read."""
        if not math.isfinite(value):
            kind = "nan" if value != value else "inf"
            self.sinks[name] = self.reads or (Event(self.n, Site("float", "forward"), kind, "unknown", name=name),)

    def sink_state(self) -> None:
        """Parameters, gradients, optimizer state; buffers only if this step made them NaN."""
        for name, p in self.parameters.values():
            self.sink(f"gradient of {name}", p.grad)
            self.sink(f"parameter {name}", p)
        if not self.taint:
            return
        for optimizer in self.optimizers:
            for p, state in optimizer.state.items():
                for name, value in state.items():
                    self.sink(f"optimizer state {name} of {self.name_of(p)}", value)
        for name, buffer in self.buffers.items():
            if is_float(buffer) and bad(buffer) == "nan" and not any(e.name for e in self.blame(buffer, "nan")):
                self.sink(f"buffer {name}", buffer)

    def abandoned(self, error: BaseException) -> None:
        """The step raised: what its frames held is all there is to judge by."""
        trace = error.__traceback__
        while trace is not None:
            for name, value in list(trace.tb_frame.f_locals.items()) if whose(trace.tb_frame.f_code) == USER else ():
                self.sink(f"variable {name} when the step raised", value)
            trace = trace.tb_next


def merge(groups: Iterable[tuple[Event, ...]]) -> tuple[Event, ...]:
    unique = {id(e): e for events in groups for e in events}
    return tuple(sorted(unique.values(), key=lambda e: e.n)[:8])


def broadcasts(x: Tensor, out: Tensor) -> bool:
    return x.dim() <= out.dim() and all(
        a in (1, b) for a, b in zip(reversed(x.shape), reversed(out.shape), strict=False)
    )


def aligned(func, args, kwargs, i: int, count: int, before: dict) -> tuple[list, tuple, dict]:
    """The float inputs of one output, with names. In a ``_foreach_*`` call that is the i-th entry of every list."""
    pick = lambda v: v[i % len(v)] if isinstance(v, (list, tuple)) and v and len(v) in (count, count // 2) else v
    if "_foreach" in str(func) or "_fused" in str(func) or "_amp" in str(func):
        args, kwargs = tuple(pick(v) for v in args), {k: pick(v) for k, v in kwargs.items()}
    names = [a.name for a in func._schema.arguments] if hasattr(func, "_schema") else [str(k) for k in range(len(args))]
    pairs = [*zip(names, args, strict=False), *kwargs.items()]
    flat = [(n, x) for n, v in pairs for x in (v if isinstance(v, (list, tuple)) else (v,)) if is_float(x)]
    inputs = [(n, x, before[id(x)] if id(x) in before else bad(x)) for n, x in flat]
    return [(n, x, k) for n, x, k in inputs if k is not None], args, kwargs


def leaves(roots: list[Tensor]) -> Iterator[Tensor]:
    """The leaf tensors that a backward pass from ``roots`` reaches."""
    todo, seen = [t.grad_fn for t in roots if t.grad_fn is not None], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        todo += [n for n, _ in node.next_functions if n is not None]


def files(frame) -> Iterator[str]:
    while frame is not None and whose(frame.f_code) != ENGINE:
        yield frame.f_code.co_filename
        frame = frame.f_back


def recomputing(frame) -> bool:
    return any(f.startswith(TORCH) and f.endswith("checkpoint.py") for f in files(frame))


def scaling(frame) -> bool:
    return any(f.startswith(TORCH) and f.endswith("grad_scaler.py") for f in files(frame))


def name_in_frames(x: Tensor) -> str:
    """What the user's code calls this tensor: a variable, or an entry of a dict."""
    key, frame = key_of(x), sys._getframe(1)
    same = lambda v: v is x or (is_float(v) and v.numel() == x.numel() and key_of(v) == key)
    while frame is not None:
        for name, value in list(frame.f_locals.items()) if whose(frame.f_code) == USER else ():
            if same(value):
                return name
            if isinstance(value, Mapping):
                for k, v in value.items():
                    if same(v):
                        return f"{name}[{k!r}]"
        frame = frame.f_back
    return ""
