"""Where a step is: whose code runs, on which line, inside which modules."""

from __future__ import annotations

import functools
import linecache
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

PACKAGE, TORCH = (str(Path(p).parent) + os.sep for p in (Path(__file__).parent, torch.__file__))
STDLIB = tuple({sysconfig.get_path(p) + os.sep for p in ("stdlib", "platstdlib")})
INSTALLED = ("site-packages", "dist-packages")
HIDDEN, USER, LIBRARY, ENGINE, CHECKPOINT, MODULE = range(6)
MACHINERY = {id(_engine_run_backward.__code__): ENGINE, id(nn.Module._call_impl.__code__): MODULE}
SHOWN = ("distributions", "nn/utils/parametrizations", "nn/utils/spectral_norm")  # of torch, what computes
OWNERS = (  # the first that fits; the course's cases stand for the reader's own code
    (CHECKPOINT, os.path.join(TORCH, "utils", "checkpoint.py")),
    (LIBRARY, tuple(os.path.join(TORCH, *part.split("/")) for part in SHOWN)),
    (HIDDEN, (TORCH, PACKAGE + "tracing", "<frozen", "<eval_with_key", "<torch_package")),
    (USER, PACKAGE + "course"),
    (LIBRARY, PACKAGE),
)


def whose(code) -> int:
    """Whose code is it: the user's, a library's, the autograd engine's, or machinery that nobody wants to see."""
    return MACHINERY.get(id(code)) or owner(code.co_filename)  # a code object itself is slow to look up


@functools.cache
def owner(file: str) -> int:
    installed = any(part in INSTALLED for part in Path(file).parts)
    other = LIBRARY if installed else HIDDEN if file.startswith(STDLIB) else USER
    return next((kind for kind, starts in OWNERS if file.startswith(starts)), other)


class Place(NamedTuple):
    """(code, instruction) of the user, and of a library that lies deeper; the modules whose forward is running,
    innermost first; is it inside the autograd engine; is it a recomputation for checkpointing."""

    user: tuple | None = None
    library: tuple | None = None
    modules: tuple = ()
    engine: bool = False
    recomputed: bool = False

    def within(self, outer: Place) -> Place:
        """The same place, seen from the line that called backward()."""
        library = self.library if self.user or self.library else outer.library
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
