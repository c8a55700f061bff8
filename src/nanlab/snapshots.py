"""What a training step changes, and how it is put back: random generators, buffers, an optimizer's state."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def plain(tensor: Tensor) -> Tensor:
    """The numbers that this rank holds: a DTensor's own shard, a sparse tensor's values."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor._values() if tensor.is_sparse else tensor


def rng_state(device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's, PyTorch's CPU and the device's random generators; no device sync."""
    kind, keys, *rest = np.random.get_state()
    numpy = (kind, torch.from_numpy(keys.astype(np.int64)), *rest)  # as a tensor it can be saved and loaded safely
    state = {"python": random.getstate(), "numpy": numpy, "cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Undo everything that was drawn since `rng_state`."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["cpu"].cpu())
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"].cpu())


def same_rng(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """True if nothing was drawn between two `rng_state`."""
    tensors = [(a[key], b[key]) for key in a if torch.is_tensor(a[key])]
    (kind, keys, *rest), (kind_b, keys_b, *rest_b) = a["numpy"], b["numpy"]
    same = (a["python"], kind, rest) == (b["python"], kind_b, rest_b)
    return same and all(torch.equal(x, y) for x, y in [*tensors, (keys, keys_b)])


def _mark(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Where a tensor lies and how often it was written to: the same as long as nothing has changed it."""
    return tensor.device, tensor.data_ptr(), tensor._version


def _fits(tensor: Tensor, held: Tensor) -> bool:
    """True if `held` can be written into `tensor`: an expanded one has less memory than entries."""
    expanded = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.shape == held.shape and not expanded


class Snapshot:
    """A copy of tensors that sit in dicts (a module's buffers, an optimizer's state), in memory that is used again.

    `slots` returns {name: (dict, key)}, asked for anew each time: a forward may put new tensors in old places.
    """

    def __init__(self, slots: Callable[[], dict[str, tuple[dict, Any]]], device: str | None = None):
        self.slots, self.device = slots, device  # device None: each copy beside its original
        self.tensors: dict[str, Tensor] = {}
        self.others: dict[str, Any] = {}
        self.marks: dict[str, tuple[torch.device, int, int]] = {}  # of the originals, when they were copied

    @torch.no_grad()
    def take(self) -> None:
        """Copy what the slots hold now; on a GPU without waiting for it."""
        tensors = self._live()
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in tensors}
        self._copy(tensors)

    @torch.no_grad()
    def update(self, usable: Callable[[Tensor], bool]) -> None:
        """Copy again what is new or was changed since, by its version counter, if it is `usable`; else keep the copy.

        What was changed through ``.data`` is not seen.
        """
        self._copy({name: t for name, t in self._live().items() if self.marks.get(name) != _mark(t) and usable(t)})

    def held(self) -> dict[str, Any]:
        """What is in the slots now."""
        return {name: owner[key] for name, (owner, key) in self.slots().items()}

    def _live(self) -> dict[str, Tensor]:
        """The tensors in the slots; what is none is copied at once."""
        live = self.held()
        tensors = {name: plain(value) for name, value in live.items() if torch.is_tensor(value)}
        self.others = {name: copy.deepcopy(value) for name, value in live.items() if name not in tensors}
        return tensors

    def _copy(self, tensors: dict[str, Tensor]) -> None:
        rooms = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        if rooms:
            torch._foreach_copy_(list(rooms.values()), list(tensors.values()), non_blocking=True)
        self.tensors |= rooms
        self.marks |= {name: _mark(tensor) for name, tensor in tensors.items()}

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        held = self.tensors.get(name)
        if held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
            return held
        device = self.device or tensor.device
        pin = torch.device(device).type == "cpu" and tensor.device.type == "cuda"  # else the copy would wait
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pin)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the slots what they held when `take` was called; a slot that did not exist then is deleted."""
        for name, (owner, key) in self.slots().items():
            if name in self.others:
                owner[key] = copy.deepcopy(self.others[name])
            elif name not in self.tensors:  # it did not exist yet: an optimizer's state before the first step
                del owner[key]
            elif torch.is_tensor(owner[key]) and _fits(plain(owner[key]), self.tensors[name]):
                plain(owner[key]).copy_(self.tensors[name])
            else:
                owner[key] = self.tensors[name].to(self.marks[name][0], copy=True)

    @property
    def nbytes(self) -> int:
        """Size of the copied tensors, in bytes."""
        return sum(t.nbytes for t in self.tensors.values())


def buffer_slots(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, tuple[dict, str]]:
    """Where the buffers of (name, module) pairs sit, by their qualified name; a place may hold None as yet."""
    return {
        f"{prefix}.{key}" if prefix else key: (module._buffers, key)
        for prefix, module in modules
        for key in module._buffers
    }


def state_slots(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, tuple[dict, str]]:
    """Where an optimizer's state of these parameters sits: "exp_avg of head.weight"."""
    return {
        f"{key} of {name}": (optimizer.state[parameter], key)
        for parameter, name in names.items()
        if parameter in optimizer.state
        for key in optimizer.state[parameter]
    }


def group_slots(optimizer: torch.optim.Optimizer) -> dict[str, tuple[dict, str]]:
    """Where the numbers of an optimizer's groups sit, the rates and what it estimates or counts there: "lr of 0"."""
    return {
        f"{key} of {i}": (group, key)
        for i, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, Real | Tensor)
    }


def map_leaves(value: Any, change: Callable[[Any], Any], make_tuple: Callable[[Any, list], tuple] | None = None) -> Any:
    """`change` applied to every leaf of nested dicts, lists and tuples; one with named fields keeps them.

    make_tuple: another way to make a tuple of the old one and the new items.
    """
    make_tuple = make_tuple or (lambda old, items: old._make(items) if hasattr(old, "_make") else tuple(items))
    if isinstance(value, Mapping):
        return {key: map_leaves(item, change, make_tuple) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_leaves(item, change, make_tuple) for item in value]
        return items if isinstance(value, list) else make_tuple(value, items)
    return change(value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among the leaves of nested dicts, lists and tuples."""
    leaves: list[Any] = []
    map_leaves(value, leaves.append)
    return [leaf for leaf in leaves if torch.is_tensor(leaf)]
