"""Where a step is: whose code runs, on which line, inside which modules; and what that code calls a tensor."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import sys
import sysconfig
from collections import UserDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from nanlab.tracing.values import bad, is_float, plain

PACKAGE, TORCH = (str(Path(p).parent) + os.sep for p in (Path(__file__).parent, torch.__file__))
STDLIB = tuple({sysconfig.get_path(p) + os.sep for p in ("stdlib", "platstdlib")})
INSTALLED, GENERATED = ("site-packages", "dist-packages"), ("<frozen", "<eval_with_key", "<torch_package")
HIDDEN, USER, LIBRARY, ENGINE, CHECKPOINT, MODULE = range(6)
MACHINERY = {_engine_run_backward.__code__: ENGINE, nn.Module._call_impl.__code__: MODULE}
UNNAMED = "an unnamed tensor"


@functools.cache
def whose(code) -> int:
    """Whose code is it: the user's, a library's, the autograd engine's, or machinery that nobody wants to see."""
    file = code.co_filename
    if file.startswith(TORCH):
        return MACHINERY.get(code, CHECKPOINT * file.endswith("checkpoint.py"))
    if file.startswith((PACKAGE + "tracing", *GENERATED)):
        return HIDDEN
    if file.startswith(PACKAGE + "course"):  # the course's cases stand for the reader's own code
        return USER
    library = file.startswith(PACKAGE) or any(part in INSTALLED for part in Path(file).parts)
    return LIBRARY if library else HIDDEN if file.startswith(STDLIB) else USER


class Place(NamedTuple):
    """(code, instruction) of the user, and of a library that lies deeper; the modules whose forward is running,
    innermost first; is it inside the autograd engine; is it a recomputation for checkpointing."""

    user: tuple | None = None
    library: tuple | None = None
    modules: tuple = ()
    engine: bool = False
    recomputed: bool = False

    def lines(self) -> tuple | None:
        return self.user or self.library

    def within(self, outer: Place) -> Place:
        """The same place, seen from the line that called backward()."""
        library = self.library if self.lines() else outer.library
        return self._replace(user=self.user or outer.user, library=library)


def walk(frame) -> Place:
    """Where is this frame? Goes outwards, up to the autograd engine."""
    library, user, modules, recomputed = None, None, [], False
    while frame is not None and (kind := whose(code := frame.f_code)) != ENGINE:
        if kind == LIBRARY and not user:
            library = library or (code, frame.f_lasti)
        elif kind == USER:
            user = user or (code, frame.f_lasti)
        elif kind == MODULE:
            modules.append(frame.f_locals["self"])
        recomputed |= kind == CHECKPOINT
        frame = frame.f_back
    return Place(user, library, tuple(modules), frame is not None, recomputed)


def line_of(at: tuple | None) -> tuple[str, str]:
    """('file.py:12', 'in step():  loss = …'). A cell is called 'cell:12'; a library's file by its path inside it."""
    if at is None:
        return "", ""
    code, instruction = at
    line = next((n for start, end, n in code.co_lines() if start <= instruction < end and n), code.co_firstlineno)
    function = "" if code.co_name.startswith("<") else f"in {code.co_name}():"
    said = f"{function}  {linecache.getline(code.co_filename, line).strip()[:120]}".strip()
    parts = Path(code.co_filename).parts
    if "ipykernel_" in code.co_filename or parts[-1].startswith(("<cell", "<ipython-input")):
        return f"cell:{line}", said
    cut = max((i + 1 for i, part in enumerate(parts) if part in INSTALLED), default=len(Path(PACKAGE).parts) - 1)
    return f"{'/'.join(parts[cut:]) if whose(code) == LIBRARY else parts[-1]}:{line}", said


def pairs_of(value: object) -> list[tuple[object, object]]:
    """(key, entry) of a container, at most a thousand. Its own entries: some mappings load them when asked."""
    held = value.data if isinstance(value, UserDict) else value
    pairs = dict.items(held) if isinstance(held, dict) else enumerate(held) if isinstance(held, (list, tuple)) else ()
    return list(itertools.islice(pairs, 1000))


def with_entries(variables: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """(name, value) of variables, and of what their containers hold."""
    for name, value in variables.items():
        yield name, value
        yield from ((f"{name}[{k!r}]", entry) for k, entry in pairs_of(value))


def parts_of(name: str, value: object, depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for every tensor that a variable is or holds: in a container, a module, an object."""
    if isinstance(value, Tensor):
        yield name, value
        if value.is_leaf and value.grad is not None:
            yield f"{name}.grad", value.grad
    elif isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.flags.writeable:
        yield name, torch.from_numpy(value)
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{k}", v) for k, v in (*value.named_parameters(), *value.named_buffers()))
    elif depth and not isinstance(value, (str, type, ModuleType, TorchDispatchMode)):
        entries = [(f"{name}[{k!r}]", v) for k, v in pairs_of(value)]
        if not entries:
            entries = [(f"{name}.{k}", v) for k, v in getattr(value, "__dict__", {}).items()]
        for label, entry in entries:
            yield from parts_of(label, entry, depth - 1)


def user_variables() -> Iterator[tuple[str, object]]:
    """(name, value) of the variables of the user's frames, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield from list(frame.f_locals.items()) if whose(frame.f_code) == USER else ()
        frame = frame.f_back


def name_in_frames(x: Tensor) -> tuple[str, Tensor]:
    """What the user's code calls this tensor, and the tensor of that name, of which ``x`` may be a view."""
    memory = lambda t: plain(t).untyped_storage().data_ptr()  # what NumPy shares has a storage of its own
    for label, v in (part for variable in user_variables() for part in parts_of(*variable)):
        if v is x or (is_float(v) and memory(v) == memory(x) and (v.numel() == x.numel() or bad(v))):
            return label, v
    return UNNAMED, x
