"""Record what every operation of one step does to the finite numbers. Nothing is raised and nothing is changed.

A ``TorchDispatchMode`` sees each operation below autograd. A healthy output costs one reduction. A non-finite one
makes an ``Event`` when it is *born* (finite inputs, non-finite output) or when an inf becomes NaN; otherwise its bad
elements carry on the events behind those inputs that made them bad (how that is known: ``nanlab.tracing.carry``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from nanlab.tracing.carry import trace
from nanlab.tracing.causes import CONSTANT, COPIES, MASKS, Birth, Was, diagnose
from nanlab.tracing.counts import Counts
from nanlab.tracing.events import Event, Parts, Taint, merge
from nanlab.tracing.names import UNNAMED, Names, name_in_frames
from nanlab.tracing.values import as_list, bad, bad_mask, big, is_composed, is_float, is_mask, key_of, plain, span, wide
from nanlab.tracing.where import Place, line_of, walk

UNSEEN_OR_SHARED = ("empty", "resize_", "set_", "new_empty", "_unsafe_view")
COLLECTIVE = re.compile("_?c10d|fsdp::all_gather").match
OVERWRITES = re.compile(
    r"(_foreach_)?(copy|fill|zero|normal|uniform|exponential|bernoulli|random)_|.*\.(\w+_)?out|split_with_sizes_copy|chunk_cat"
)
# In an optimizer step these cannot make a finite number bad: averages, shrinking by a factor, adding a constant.
HARMLESS = {
    "lerp": lambda by, wide: 0 <= by <= 1,
    "mul": lambda by, wide: abs(by) <= 1,
    "div": lambda by, wide: abs(by) >= (1e-3 if wide else 1),  # a float32 has room for that
    "add": lambda by, wide: True,
}
GONE = Was(None, None)
UNSEEN = "It came in while gradients were reduced: look at the reports of the other ranks."


@functools.cache
def facts(func) -> tuple[str, tuple, bool, bool]:
    """(name, arguments it writes, is the output a view or uninitialised, does it overwrite without reading)."""
    if (schema := getattr(func, "_schema", None)) is None:
        return str(func), (), False, False
    name, arguments = schema.name.split("::")[-1], list(enumerate(schema.arguments))
    if COLLECTIVE(schema.name):
        return schema.name, (), True, False
    writes = tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)
    if name.endswith("batch_norm") and not writes:  # it updates its running statistics without saying so
        writes = tuple((i, a.name) for i, a in arguments if a.name.startswith("running_"))
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    overwrites = OVERWRITES.fullmatch(name) or OVERWRITES.fullmatch(f"{name}.{schema.overload_name}")
    return name, writes, view or name.startswith(UNSEEN_OR_SHARED), bool(overwrites)


def leaves(roots: list[Tensor]) -> list[Tensor]:
    """The leaf tensors that a backward pass from ``roots`` reaches."""
    todo, variables = [t.grad_fn for t in roots], {None: None}
    while todo:
        if (node := todo.pop()) not in variables:
            variables[node] = getattr(node, "variable", None)
            todo += [n for n, _ in node.next_functions]
    return [v for v in variables.values() if v is not None]


class Tracer(TorchDispatchMode):
    """Watch everything inside ``with Tracer() as t``; then ``t.sink(name, tensor)`` for each that should be finite.

    ``n``: operations so far. ``went_backward``: at the last call of backward(), −1 if there was none; ``engine``: at
    the last operation of any backward pass. ``forward``: autograd sequence number → (place, operation). ``outside``:
    the place that called backward(). ``sinks``: (role, name) → the events behind what should be finite and is not.
    ``passed``: where forward has handed bad numbers on.
    Storages: ``put``, that something bad was copied into as it was; ``came``, that nothing here has written;
    ``lifted``, made of Python numbers → the events behind what had been read by then; ``dropped``, a sum → the events
    of what nansum has left out, or large numbers made of what nan_to_num() or clamp() have put in place of inf → those
    of the inf.
    Events behind numbers that left the tensors: ``reads``, kind → the first that was read into Python; ``answer``, the
    last answer that a bad number gave (``tests``: storages of such), ``looked``: when it, or such a number, was read;
    ``chosen``, the last whole number made of NaN; ``refused``, the arguments of an operation that raised; ``latest``,
    kind → the last output, ``last``, of any kind; ``sends``, what this rank has given to others, or another rank to
    this one.
    Optimizers: ``steps``, whose step is running, None for a closure; ``optimizers``, that have stepped; ``settings``,
    kind → the event of such a learning rate; ``growth``: (n, largest |parameter|) before each step.
    """

    supports_higher_order_operators = True
    _should_skip_dynamo = classmethod(lambda cls: False)  # torch would wrap each operation once more, at a price

    def __init__(self) -> None:
        super().__init__()
        forwards = lambda: self.steps[-1] is None and torch._C._current_graph_task_id() == -1
        self.names, self.counts, self.taint = Names(), Counts(forwards), Taint()
        self.n, self.went_backward, self.engine, self.forward, self.outside, self.sinks = 0, -1, -1, {}, Place(), {}
        self.put, self.came, self.passed, self.lifted, self.dropped = set(), set(), set(), {}, {}
        self.reads, self.tests, self.latest = {}, {}, {}
        self.last, self.chosen, self.answer, self.refused, self.sends = (), (), (), (), ()
        self.steps, self.optimizers, self.settings, self.growth = [None], {}, {}, []
        self.scaler_skips, self.raised_about_nan, self.call, self.looked = False, False, "", -1

    # -- entering and leaving ----------------------------------------------------------------------------------------
    def __enter__(self):
        before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        self.hooks = [before(self.before_step), after(lambda *_: self.steps.pop())]
        self.backward, torch.autograd.backward = torch.autograd.backward, self.run_backward
        self.forward.setdefault(torch.autograd._get_sequence_nr() - 1)  # of the graph that is there already
        return super().__enter__()

    def __exit__(self, *exc):
        torch.autograd.backward = self.backward
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*exc)

    def before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple:
        """Look at what the optimizer is given. Its arguments, where a closure runs as what it is."""
        with _disable_current_modes():
            self.steps.append(optimizer)
            parameters, came_in = [p for g in optimizer.param_groups for p in g["params"]], []
            if self.optimizers.get(optimizer) != len(parameters):  # afterwards every write is seen
                self.names.adopt_optimizer(optimizer)
                self.optimizers[optimizer] = len(parameters)
                came_in = [v for s in optimizer.state.values() for v in s.values()] + [p.grad for p in parameters]
            largest, spoilt = self.ranges()
            self.growth.append((self.n, largest))
            for t in came_in + spoilt:
                if is_float(t) and key_of(t) not in self.taint and bad(t):
                    self.arrived(t)
            self.look_at_settings(optimizer)
        within = lambda value: functools.partial(self.closure, value) if inspect.isroutine(value) else value
        return tuple(map(within, args)), {k: within(v) for k, v in kwargs.items()}

    def look_at_settings(self, optimizer: Optimizer) -> None:
        """A learning rate, mostly no tensor. An inf is a finding only where it does harm: some are inf by design."""
        for name, value in ((k, v) for g in optimizer.param_groups for k, vs in g.items() for v in as_list(vs)):
            single = isinstance(value, (float, np.floating)) or (is_float(value) and value.numel() == 1)
            if single and name != "params" and not math.isfinite(value):
                kind, label = "nan" if value != value else "inf", f"{name} of the optimizer"
                self.names.add(value, label, "bad_state")
                said, read = f"{name} is {float(value)} when step() is called.", self.reads.get(str(float(value)), ())
                more = {"name": label, "kind": kind, "cause": "bad_state", "explanation": said, "parents": read}
                self.settings.setdefault(kind, (self.guilty(value) or [self.event(label, "state", **more)])[0])

    def closure(self, call: Callable, *args, **kwargs) -> object:
        """Within an optimizer's step: forward and backward."""
        self.steps.append(None)
        try:
            return call(*args, **kwargs)
        finally:
            self.steps.pop()

    def ranges(self) -> tuple[float, list[Tensor]]:
        """Of the parameters that optimizers move: the largest |number| of those that are finite, and the others."""
        moved = (p for o in self.optimizers for g in o.param_groups for p in g["params"] if plain(p).numel())
        tops = [(max(-low.item(), high.item()), p) for p in moved for low, high in [torch.aminmax(wide(p))]]
        finite = [top for top, _ in tops if math.isfinite(top)]
        return max(finite, default=math.nan), [p for top, p in tops if not math.isfinite(top)]

    def run_backward(self, tensors, *args, **kwargs):
        """In place of torch.autograd.backward: look at the loss before, at the gradients after."""
        if torch._C._current_graph_task_id() != -1:
            return self.backward(tensors, *args, **kwargs)
        roots = list(filter(is_float, as_list(tensors)))
        self.went_backward, self.outside = self.n, self.names.here()
        for t in roots:
            self.sink_loss("the loss given to backward()", t)
        result = self.backward(tensors, *args, **kwargs)
        with _disable_current_modes():  # now: a guard may throw the gradients away, or another rank have spoilt them
            for p in leaves(roots):
                if id(p) not in self.names.parameters:
                    self.names.adopt_parameter(name_in_frames(p)[0], p)
                if self.taint or torch.distributed.is_initialized():
                    self.sink(f"gradient of {self.names.of(p)}", p.grad)
        return result

    @_disable_current_modes()
    def sink_loss(self, name: str, loss: Tensor) -> None:
        """Alone, what reaches a loss is not meant."""
        self.sink(name, loss)
        reached = [e.root() for e in self.guilty(loss)]
        for root in reached if all(root.deliberate for root in reached) else ():
            root.deliberate = False

    # -- where are we ------------------------------------------------------------------------------------------------
    def event(self, op: str, phase: str = "", updates: bool = False, **more: object) -> Event:
        """An event, here and now: phase, module, and lines."""
        here, backward, owner, note = self.names.here(), torch._C._current_graph_task_id() != -1, "", ""
        place = here.within(self.outside) if here.engine else here
        # Also in a hook of the backward pass; a weight that forward() itself writes is none that an optimizer moves.
        stepping = self.steps[-1] is not None or (updates and not backward and not here.modules and self.engine >= 0)
        if not backward or here.recomputed or stepping:
            phase = phase or ("optimizer" if stepping else "forward")
            place = place._replace(modules=() if stepping else place.modules)
            note = "recomputed for checkpointing" if here.recomputed and here.engine else ""
        elif (node := torch._C._current_autograd_node()) is not None:
            # A native node is tied to the forward line that made it; Python code in a backward has a line of its own.
            variable, (made, of) = getattr(node, "variable", None), self.made(node, place)
            if variable is not None:  # AccumulateGrad: a parameter, but no forward line
                of, made = self.names.of(variable), place._replace(modules=())
                owner = of.rpartition(".")[0]
            place = (place if any(here[:2]) else made)._replace(modules=made.modules)
            note = f"{node.name()}, gradient of {of}" if of else node.name()
        (source, said), (library, inside) = map(line_of, (place.user, place.library))
        module = next((self.names.modules[m] or type(m).__name__ for m in place.modules), owner)
        spot = {"op": op, "phase": phase or "backward", "module": module, "source": source, "library": library}
        return Event(n=self.n, note=note, call=self.call, **{**spot, "code": (said, inside), **more})

    def made(self, node: object, place: Place) -> tuple[Place, str]:
        """(line, operation) of the forward pass to which a node of the backward pass belongs, if it is known."""
        number = node._sequence_nr()
        return next((self.forward[k] for k in range(number, number - 3, -1) if self.forward.get(k)), (place, ""))

    # -- what happens ------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_composed, types)):
            return NotImplemented  # then it does what it has to do with its parts, and that is watched
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and (out := self.decomposed(func, args, kwargs)) is not NotImplemented:
            return out
        self.refused = ()  # whatever an operation refused before, the step went on
        name, writes, skip, overwrites = facts(func)
        written, before = self.about_to_write(args, kwargs, name, writes, overwrites) if writes else ([], {})
        try:
            out = func(*args, **kwargs)
        except Exception:
            self.refused = () if written or COLLECTIVE(name) else self.refuses(func, args, kwargs)
            raise
        self.n += 1
        if (number := torch.autograd._get_sequence_nr() - 1) not in self.forward:
            here, node = self.names.here(), torch._C._current_autograd_node()
            native = here.engine and not any(here[:2]) and node is not None  # a backward pass that is itself derived
            self.forward[number] = (self.made(node, here.within(self.outside))[0] if native else here, name)
        self.engine = self.engine if torch._C._current_graph_task_id() == -1 else self.n
        if name == "lift_fresh":
            self.lifted |= {key_of(t): self.reads.get(bad(t), ()) for t in args if is_float(t)}
        if COLLECTIVE(name):
            self.sent(func, args, out)
        if skip or (not self.taint and self.harmless(name, args)):
            return out
        outs = list({id(t): t for t in (*written, *as_list(out)) if is_float(t)}.values())
        found = [(i, t, kind) for i, t in enumerate(outs) if (kind := bad(t))]
        try:
            if found:
                birth = Birth(op=name, func=func, args=args, kwargs=kwargs, returned=as_list(out), before=before)
                self.note(birth, outs, found)
            self.came -= set(map(key_of, written if self.came else ()))
            self.remember(name, args, out, outs)
        except Exception as error:  # the step must go on: an event without a closer look is better than none
            for _, t, kind in found:
                event = self.event(name, kind=kind.strip("-"), cause="unknown", explanation=f"({error!r})")
                self.taint.record(t, [(None, (event,))])
        return out

    def about_to_write(self, args, kwargs, name: str, writes: tuple, overwrites: bool) -> tuple[list[Tensor], dict]:
        """(the tensors that an operation is going to write, by id what they are now)"""
        written = [t for i, a in writes for t in as_list(args[i] if i < len(args) else kwargs.get(a)) if is_float(t)]
        before = dict.fromkeys(map(id, written), GONE) if overwrites else {}
        # What is overwritten does not matter, unless out= is an input too.
        again = [id(a) for a in args] if overwrites and not name.endswith("_") else []
        given = [t for t in written if not overwrites or id(t) in again]
        for t in given if self.steps[-1] is None else ():  # an optimizer's were looked at when it began
            before[id(t)] = Was(kind, t.clone(), self.blame(t)) if (kind := bad(t)) else Was("", t)
        return written, before

    def refuses(self, func, args: tuple, kwargs: dict) -> tuple[Event, ...]:
        """The events behind the arguments of an operation that has raised, and with finite ones would not."""
        behind = merge(self.guilty(t) for t in tree_leaves((args, kwargs)))
        finite = lambda t: torch.full_like(t, 0.5).where(bad_mask(t), t) if is_float(t) and bad(t) else t
        with torch.random.fork_rng([]), contextlib.suppress(Exception):
            if behind:
                func(*tree_map(finite, args), **tree_map(finite, kwargs))
                return behind
        return ()

    def sent(self, func, args: tuple, out: object) -> None:
        """What a collective operation writes is there when every rank has sent; what this one sends may be to blame."""
        named = [(a.name, value) for a, value in zip(func._schema.arguments, args, strict=False)]
        blame = merge(map(self.guilty, tree_leaves([value for name, value in named if "output" not in name])))
        for t in tree_leaves([out, *(value for name, value in named if "output" in name)]):
            if blame and is_float(t):
                self.taint.record(t, [(None, blame)])
        self.sends = merge([self.sends, blame])

    def decomposed(self, func, args: tuple, kwargs: dict):
        """In inference mode composite operations arrive whole: take them apart, and watch the parts."""
        if not isinstance(func, torch._ops.OpOverload):
            return NotImplemented
        super().__enter__()
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def remember(self, name: str, args: tuple, out: object, outs: list[Tensor]) -> None:
        """What cannot be seen later: which tensors count, and which bad numbers left the tensors."""
        self.counts.note(name, args, out, outs)
        drops = self.taint and name.startswith(("nansum", "nan_to_num", "clamp", "clip", "minimum"))
        if (drops or self.dropped) and (name == "nansum" or any(map(big, outs))):
            given = filter(is_float, tree_leaves(args))
            behind = merge(self.dropped.get(key_of(t)) or (self.guilty(t) if drops else ()) for t in given)
            self.dropped |= dict.fromkeys(map(key_of, outs), tuple(e for e in behind if not e.root().deliberate))
        whole = lambda t: not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
        drawn = any(isinstance(t, Tensor) and whole(t) for t in as_list(out))
        looks = (drawn or name == "_local_scalar_dense") and args and is_float(args[0])
        kind = bad(args[0]) if looks else ""
        # A sentinel may have been read before.
        if kind and not drawn and all(e.phase == "data" for e in self.reads.get(kind, ())):
            self.reads[kind] = self.guilty(args[0])
        elif kind == "nan" and drawn:
            self.chosen = self.guilty(args[0])  # argmax, long(), a drawn token
        elif name.startswith("_amp_foreach"):  # GradScaler; at a scale of 1 there is nothing left to lower
            self.scaler_skips |= bool(args[1]) and float(args[2]) < 1
        elif name == "_amp_update_scale_":  # by now it is lowered; a fused optimizer is given its gradients scaled
            self.scaler_skips |= bool(args[2]) and float(args[0]) >= 1
        self.looked = self.n if kind else self.looked
        self.follow(name, args, out)

    def follow(self, name: str, args: tuple, out: object) -> None:
        """Answers to the question whether a number is bad, and what is made of answers: how many there are."""
        asks = isinstance(out, bool) or any(isinstance(t, Tensor) and t.dtype is torch.bool for t in as_list(out))
        if not asks and not self.tests:
            return
        given, made = ({key_of(t): t for t in tree_leaves(of) if isinstance(t, Tensor)} for of in (args, out))
        unused, known = given.keys() - self.taint.keys(), asks or given.keys() <= self.tests.keys()
        behind = merge(self.tests.get(key) or self.guilty(t) for key, t in given.items()) if known else ()
        # To ask of a number is not to use it, and what is written over is no answer any more.
        for table, keys in ((self.taint, unused), (self.tests, made)):
            for key in keys:
                table.pop(key, None)
        self.tests |= dict.fromkeys(made, behind) if behind else {}
        if behind and (not made or name == "nonzero"):  # the length of which is the answer
            self.answer, self.looked = behind, self.n

    def harmless(self, name: str, args: tuple) -> bool:
        """Operations that need no look while nothing is bad yet; they are a quarter of all the numbers."""
        if self.steps[-1] is None:
            # Copies of gradients, which are looked at themselves.
            return name in ("slice_backward", "cat", "clone") and torch._C._current_graph_task_id() != -1
        rule, by = HARMLESS.get(name.removeprefix("_foreach_").rstrip("_")), args[-1] if args else None
        return bool(rule) and isinstance(by, (int, float)) and rule(by, as_list(args[0])[0].element_size() >= 4)

    def note(self, birth: Birth, outs: list[Tensor], found: list) -> None:
        """Some outputs are not finite: carried on from the inputs, or born here?"""
        events: dict = {}  # one operation may hold several faults, of which each may be dropped alone
        for t in outs if self.steps[-1] is not None else ():
            birth.before.setdefault(id(t), Was(bad(t) if key_of(t) in self.taint else "", t))
        for i, t, kind in found:
            case = birth.aligned(i, len(outs), out=t)
            was = [(a, *case.before.get(id(x), Was(bad(x), x))) for a, x in case.tensors()]
            blame = {id(x): parts or self.blame(x) for _, k, x, parts in was if k}
            case.inputs = [(a, x, "" if a in MASKS and k == "-inf" else k) for a, k, x, _ in was if k is not None]
            parts, born = trace(case, blame)
            self.passed |= {self.names.here().user} if parts and not born and self.counts.forwards() else set()
            name = self.names.tensors.get(key_of(t), ("",))[0]
            moved = id(t) in case.before and t.is_leaf and (t.requires_grad or name.startswith("parameter"))
            for mask, of in born:
                key = tuple(s.what for s in of), torch.isnan(plain(t)[mask][0]).item()
                if key not in events:
                    events[key] = self.born(case.at(mask, of), merge(s.events for s in of), moved)
                parts.append((mask, (events[key],)))
            self.taint.record(t, parts)
            behind = merge(events for _, events in parts) if moved else ()
            for e in (*behind, *(b.root() for b in behind)):
                # After the backward pass, and outside of a module: an update by hand.
                if e.n > max(self.engine, self.went_backward) >= 0 and not e.module and e.phase == "forward":
                    e.phase, e.rows, e.length = "optimizer", [], 0
            self.last = self.latest[kind] = merge(e for _, e in parts)
            copied = case.before.get(id(t)) is GONE or birth.op in COPIES or any(e.name for e in events.values())
            # A gradient is no place where anybody puts them.
            self.put |= {key_of(t)} if copied and torch._C._current_graph_task_id() == -1 else set()

    def born(self, birth: Birth, parents: tuple[Event, ...], moved: bool) -> Event:
        """The event of a birth: where it is, why, and whether somebody meant it. ``moved``: it is a parameter."""
        event = self.event(birth.op.rstrip("_"), updates=moved)
        self.look_around(birth, event.phase, parents)
        (event.cause, event.explanation), event.kind = diagnose(birth), birth.kind.strip("-")
        number = birth.literal()
        read = [e for e in self.reads.get(number, ()) if not e.root().deliberate]
        # Written in the code: a mask, a sentinel, a poison; or the answer of torch itself where there is nothing.
        literal = number.strip("-") == event.kind and not read and event.cause not in ("empty_mean", "log_of_zero")
        if not read and self.steps[-1] is not None and number.strip("-") in self.settings:
            return self.settings[number.strip("-")]
        if literal and (event.phase == "forward" or (event.cause == "unknown" and (moved or birth.native))):
            what = "a number given to" if moved else CONSTANT
            event.cause, event.phase, event.name = "bad_input", "data", f"{what} {event.op}"
            event.explanation = "That line writes it: ask what it stands for, a missing value or a mask."
        # All of it may have been dropped since it was bad, or the largest number may stand in place of inf.
        x, near = birth.get("self"), event.cause == "overflow" and any(big(x) for _, x, _ in birth.inputs)
        lost = [e for e in self.dropped.get(key_of(x), ()) if e.root().phase != "data"] if is_float(x) else []
        bounded = [self.dropped.get(key_of(x), ()) for _, x in birth.tensors() if near and not self.scaler_skips]
        event.parents = merge([lost] if event.cause == "empty_mean" else [parents, read, *bounded])
        # The logarithm of 0 and 1 is a mask that will be added.
        event.selects = event.cause == "log_of_zero" and self.counts.whole(x) and is_mask(birth.out)
        passed_on = birth.op == "_log_softmax" and bool(parents) and all(p.deliberate for p in parents)
        meant = (literal and not moved) or passed_on or (event.selects and not birth.fresh.all())
        event.deliberate = birth.kind != "nan" and bool(meant)
        inputs = [f"{a}{' (written since)' * (x is birth.out)}: {span(x)}" for a, x, _ in birth.inputs]
        if (by := birth.get("other")) is not None and not is_float(by):
            inputs.append(f"other: {span(by) if isinstance(by, Tensor) else by}")
        return event.about(birth.out, birth.fresh, inputs=inputs)

    def look_around(self, birth: Birth, phase: str, parents: tuple[Event, ...]) -> None:
        """What the table of causes asks of the step around an operation."""
        birth.phase, birth.counts = phase, self.counts
        birth.native = phase == "backward" and not any(walk(sys._getframe(1))[:2])
        birth.gradient = any(p.grad is birth.out for _, p in self.names.parameters.values())
        birth.saved = any(p.phase == "forward" or p.deliberate for p in parents)
        if self.steps[-1] is not None:
            birth.state = {v.dtype for state in self.steps[-1].state.values() for v in state.values() if is_float(v)}
            # Adafactor has a pair of them.
            birth.eps = [float(e) for g in self.steps[-1].param_groups for e in as_list(g.get("eps")) if e is not None]

    def guilty(self, value: object) -> tuple[Event, ...]:
        """The events behind the bad numbers of a tensor; none if it has none, or is no tensor."""
        return merge(events for _, events in self.blame(value)) if is_float(value) and bad(value) else ()

    def blame(self, x: Tensor) -> Parts:
        """Whose fault are the bad elements of ``x``? Nobody's here, if they came in from outside."""
        if (parts := self.taint.behind(x)) is None:
            return [(None, self.arrived(x))]
        for e in merge(events for _, events in parts) if key_of(x) in self.put else ():
            if e.phase == "data" and not e.deliberate and e.name.startswith((UNNAMED, CONSTANT)):
                name, cause, whole = self.names.find(x)  # a constant is called by what it was put into
                if cause == "bad_state" or (name != UNNAMED and e.name == UNNAMED):
                    phase = "state" if cause == "bad_state" else "data"
                    seen = e.about(whole, bad_mask(whole), name=name, op=name, cause=cause, phase=phase)
                    vars(e).update(vars(seen), inputs=[f"{name}: {span(whole)}"])
        return parts

    def arrived(self, x: Tensor) -> tuple[Event, ...]:
        """The event of a bad tensor that the step has not made."""
        kind, variable = bad(x), getattr(torch._C._current_autograd_node(), "variable", None)
        if variable is not None and variable.grad is not None and key_of(variable.grad) == key_of(x):
            self.names.adopt_parameter(name_in_frames(variable)[0], variable)
        (name, cause, whole), known = self.names.find(x), key_of(x) in self.names.tensors
        phase, said = "state" if cause == "bad_state" else "data", ""
        mask = kind == "-inf" and not x.requires_grad and is_mask(x)
        number = x.dim() == 0 or (x.numel() == 1 and key_of(x) in self.lifted)
        op, deliberate = name, mask or (number and not known and kind != "nan")
        reducing = torch.distributed.is_initialized() and self.went_backward >= 0 and self.steps[-1] is None
        if reduced := reducing and name == UNNAMED:
            if self.sends:  # one of the ranks did it; this one had a part in it
                self.taint.record(x, [(None, self.sends)])
                return self.sends
            op, phase, cause, name, said = "all_reduce", "backward", "unknown", "", UNSEEN
        event = self.event(op, phase, name=name, cause=cause, kind=kind.strip("-"), explanation=said)
        event = event.about(whole, bad_mask(whole), inputs=[f"{event.op}: {span(whole)}"], deliberate=deliberate)
        if reduced:
            self.sends, event.rows, event.length = (event,), [], 0
        event.amount += ", inf among them" * (kind == "nan" and bool(wide(whole).isinf().any()))
        if key_of(x) in self.lifted or name == UNNAMED:  # made of a bad number that had been read
            event.parents = merge([[e.root() for e in self.lifted.get(key_of(x)) or self.reads.get(kind, ())]])
        self.taint.record(x, [(None, (event,))])
        self.came.add(key_of(x))
        return (event,)

    # -- what should have been finite --------------------------------------------------------------------------------
    @_disable_current_modes()
    def sink(self, name: str, value: object, role: str = "") -> None:
        """Something that ought to be finite: remember whose fault it is, if it is not. ``role``: see ``excused``."""
        events = ()
        if isinstance(value, Tensor):  # a whole number may have been made of NaN
            events = self.guilty(value) if is_float(value) or value.dtype is torch.bool else self.chosen
        elif isinstance(value, (float, np.floating, np.ndarray)) and np.asarray(value).dtype.kind == "f":
            kind = bad(torch.from_numpy(np.array(value, dtype=np.float64)))
            # Most likely the first bad number that was read; a number that nothing here made is meant, as a part.
            meant = lambda e: e.root().deliberate and (kind == "-inf" or kind not in self.reads)
            events = [e for e in self.reads.get(kind) or self.latest.get(kind) or () if not meant(e)]
            if kind and not events and name == "the result" and isinstance(value, float):
                events = (Event(n=self.n, op=name, phase="forward", kind=kind.strip("-"), cause="unknown"),)
        if events:
            self.sinks[role, name] = merge([self.sinks.get((role, name), ()), events])
