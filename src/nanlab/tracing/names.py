"""What modules and tensors are called: by a model, by an optimizer, or by the variables of the code that runs."""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
from collections import UserDict
from collections.abc import Iterator, Mapping
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from nanlab.tracing.values import bad, is_float, key_of, plain
from nanlab.tracing.where import USER, Place, walk, whose

UNNAMED = "an unnamed tensor"


class Names:
    """``tensors``: storage → (name, the cause if it is bad on arrival, tensor). ``modules``: module → name.
    ``parameters``, ``buffers``: id → (name, tensor). The first name that is given stays."""

    def __init__(self) -> None:
        self.tensors, self.modules, self.parameters, self.buffers = {}, {}, {}, {}

    def add(self, t: object, name: str, cause: str = "bad_input") -> None:
        if is_float(t):
            self.tensors.setdefault(key_of(t), (name, cause, t))

    def adopt(self, model: nn.Module, prefix: str = "") -> None:
        """Learn the names of a model's modules, parameters and buffers."""
        for name, module in model.named_modules():
            self.modules.setdefault(module, (prefix + name).rstrip("."))
        for name, parameter in model.named_parameters():
            self.adopt_parameter(prefix + name, parameter)
        for name, buffer in model.named_buffers():
            self.add(buffer, f"buffer {prefix}{name}", "bad_state")
            self.buffers.setdefault(id(buffer), (prefix + name, buffer))

    def adopt_parameter(self, name: str, p: Tensor) -> None:
        if id(p) not in self.parameters:
            self.parameters[id(p)] = name, p
            self.add(p, f"parameter {name}", "bad_state")
            self.add(p.grad, f"gradient of {name}, left over from before", "bad_state")

    def adopt_optimizer(self, optimizer: Optimizer) -> None:
        """Learn what its state is called, which may have been restored from a checkpoint."""
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        unknown = {id(p) for p in parameters} - self.parameters.keys()
        # What a module calls it has the last word: a loop's variable is still there when the loop has ended.
        variables = sorted(user_variables() if unknown else (), key=lambda one: isinstance(one[1], nn.Module))
        called = {id(v): name for variable in variables for name, v in parts_of(*variable)}
        for i, p in enumerate(parameters):
            self.adopt_parameter(called.get(id(p), f"#{i}"), p)
            for name, value in optimizer.state.get(p, {}).items():
                self.add(value, f"optimizer state {name} of {self.of(p)}", "bad_state")

    def of(self, p: Tensor) -> str:
        return self.parameters.get(id(p), ("a leaf tensor",))[0]

    def find(self, x: Tensor) -> tuple[str, str, Tensor]:
        """What a tensor is called that the step has not made, the cause if it is bad, and the tensor of that name."""
        self.here()  # adopts the modules around
        if found := self.tensors.get(key_of(x)):
            return found
        name, whole = name_in_frames(x)
        state = isinstance(whole, nn.Parameter) or id(whole) in self.parameters or name.endswith(".grad")
        return name, "bad_state" if state else "bad_input", whole

    def here(self) -> Place:
        """Where the step is. A model that was made inside the step is adopted at first sight, from the outside in."""
        place = walk(sys._getframe(1))
        for module in reversed(place.modules):
            if module not in self.modules:
                called = (f"{name}." for name, value in user_variables() if value is module and name != "self")
                self.adopt(module, next(called, ""))
        return place


def entries_of(name: str, value: object) -> list[tuple[str, object]]:
    """(name, entry) of a container, at most a thousand. Its own entries: some mappings load them when asked."""
    held = value.data if isinstance(value, UserDict) else value
    pairs = dict.items(held) if isinstance(held, dict) else enumerate(held) if isinstance(held, (list, tuple)) else ()
    shown = lambda k: repr(k) if isinstance(k, (str, int, tuple)) else type(k).__name__  # a tensor takes its time
    return [(f"{name}[{shown(k)}]", entry) for k, entry in itertools.islice(pairs, 1000)]


def with_entries(variables: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """(name, value) of variables, and of what their containers hold."""
    for name, value in variables.items():
        yield name, value
        yield from entries_of(name, value)


def parts_of(name: str, value: object, depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for every tensor that a variable is or holds: in a container, a module, an object."""
    if isinstance(value, Tensor):
        yield name, value
        if value.is_leaf and value.grad is not None:
            yield f"{name}.grad", value.grad
    elif isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.flags.writeable:
        with contextlib.suppress(TypeError, ValueError):  # stored in a way that torch does not know
            yield name, torch.from_numpy(value)
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{k}", v) for k, v in (*value.named_parameters(), *value.named_buffers()))
    elif depth and not isinstance(value, (str, type, ModuleType, Optimizer, TorchDispatchMode)):
        entries = entries_of(name, value) or [(f"{name}.{k}", v) for k, v in getattr(value, "__dict__", {}).items()]
        for label, entry in entries:
            yield from parts_of(label, entry, depth - 1)


def user_variables() -> Iterator[tuple[str, object]]:
    """(name, value) of the variables of the user's frames, innermost first."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        yield from list(frame.f_locals.items()) if whose(frame.f_code) == USER else ()


def name_in_frames(x: Tensor) -> tuple[str, Tensor]:
    """What the user's code calls this tensor, and the tensor of that name, of which ``x`` may be a view."""
    memory = lambda t: plain(t).untyped_storage().data_ptr()  # what NumPy shares has a storage of its own
    for label, v in (part for variable in user_variables() for part in parts_of(*variable)):
        if v is x or (is_float(v) and memory(v) == memory(x) and (v.numel() == x.numel() or bad(v))):
            return label, v
    return UNNAMED, x
