"""Put everything back that can be reached from a few objects: numbers, containers, attributes, generators, closures."""

from __future__ import annotations

import functools
import random
import re
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, GenericAlias, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed._composable_state import _module_state_mapping as SHARDED
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from nanlab.tracing.values import has_memory, plain

ATOMS = {int, float, complex, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size}
ALIVE = (type, GenericAlias, ModuleType, np.memmap, _BaseDataLoaderIter)
FOREIGN = {*sys.stdlib_module_names, "datasets", "pandas", "pyarrow", "ray", "tokenizers", "tqdm", "vllm", "wandb"}
FOREIGN -= {"_random", "abc", "argparse", "builtins", "collections", "functools", "random", "types", "typing"}
EMPTY = object()  # a slot, or a variable of a closure, that nothing was put into
HELD = {
    Tensor: ("requires_grad", "grad", "_backward_hooks", "__dict__"),
    MethodType: ("__self__", "__func__"),
    FunctionType: ("__closure__", "__dict__", "__defaults__"),
    CellType: ("cell_contents",),
    functools.partial: ("func", "args", "keywords"),
    np.random.Generator: ("bit_generator",),
    object: ("__class__", "__dict__"),  # FSDP gives a module another class
}


def global_state() -> list[Any]:
    """What no trainer holds: the global generators of random numbers, and torch's registry of sharded modules."""
    torch.cuda.init() if torch.cuda.is_available() else None
    devices = torch.cuda.default_generators
    return [random.getstate.__self__, np.random.get_state.__self__, torch.default_generator, *devices, SHARDED.data]


@functools.cache
def foreign(kind: type) -> bool:
    """Threads, files, locks, tables, clients: with a life of their own."""
    return issubclass(kind, ALIVE) or any(c.__module__.partition(".")[0] in FOREIGN for c in kind.__mro__)


def freeze(roots: Iterable[Any], leave: tuple[type, ...] = ()) -> Callable[[], None]:
    """A function that gives everything within reach of ``roots`` its contents back, in place, whoever else holds it.

    ``leave``: kinds that are not looked into; of a tensor's, only the numbers.
    """
    seen, undo, data = {}, [], []
    for todo, left in ((list(roots), leave), (data, (*leave, np.ndarray, list, Tensor))):  # the rows of a data set
        while todo:
            value = todo.pop()
            if type(value) in ATOMS or id(value) in seen or (isinstance(value, left) and not isinstance(value, Tensor)):
                continue
            if isinstance(value, Dataset) and todo is not data:
                data.append(value)
                continue
            seen[id(value)] = value  # kept, so that no other object gets its id
            if isinstance(value, Tensor) and not isinstance(value, left) and has_memory(value):
                undo.append(functools.partial(put_numbers, value, *numbers(value)))
            if foreign(type(value)) or (isinstance(value, Tensor) and not value.is_leaf):
                continue
            get, put = next(ways for kind, ways in STATES.items() if isinstance(value, kind))
            undo.append(functools.partial(put, value, old := get(value)))
            for key, entry in old.items() if isinstance(old, dict) else enumerate(old if isinstance(old, list) else ()):
                (data if isinstance(key, str) and re.search("dataset|data_source", key) else todo).append(entry)
    return lambda: [put_back() for put_back in undo] and None


def attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except (AttributeError, ValueError):
        return EMPTY


def attributes(value: Any) -> dict[str, Any]:
    names = next(names for kind, names in HELD.items() if isinstance(value, kind))
    return {name: attribute(value, name) for name in (*names, *getattr(type(value), "__slots__", ()))}


def put_attributes(value: Any, old: dict[str, Any]) -> None:
    for name, was in old.items():
        if attribute(value, name) is not was:
            delattr(value, name) if was is EMPTY else setattr(value, name, was)


def put_entries(value: Any, old: Any) -> None:
    """Past what a subclass makes of clear() and update(); and not at all if nothing has changed."""
    same = lambda c: [*map(id, c), *map(id, c.values() if isinstance(c, dict) else ())]
    if same(value) != same(old):
        base = next(b for b in (OrderedDict, dict, list, deque, set) if isinstance(value, b))
        base.clear(value)
        (base.extend if hasattr(base, "extend") else base.update)(value, old)


def numbers(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the tensor in its own memory, the numbers that differ in place, their copy)"""
    own = plain(value)
    own = own[tuple(slice(None, None if step else 1) for step in own.stride())] if 0 in own.stride() else own
    return value.detach(), own, own.clone()


def put_numbers(value: Tensor, whole: Tensor, own: Tensor, old: Tensor) -> None:
    """Into the memory that the tensor had; it may have been given another, or another dtype."""
    own.copy_(old)
    place = lambda t: (t.dtype, t.shape, plain(t).data_ptr())
    if place(value) != place(whole):
        value.data = whole


STATES = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.BitGenerator: (np.random.BitGenerator.__getstate__, np.random.BitGenerator.__setstate__),
    np.ndarray: (np.copy, lambda value, old: np.copyto(value, old) if value.flags.writeable else None),
    dict: (dict, put_entries),
    (list, deque, set): (list, put_entries),
    (tuple, frozenset): (list, lambda *_: None),
    object: (attributes, put_attributes),
}
