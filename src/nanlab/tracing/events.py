"""Births, and the memory that they have made bad: by storage and region, so that views and partly written buffers keep
their own history. No tensor is kept alive: an event holds text and numbers only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanlab.tracing.report import Report
from nanlab.tracing.values import bad_mask, key_of, plain


@dataclass(eq=False, repr=False)
class Event(Report):
    """A birth: a finite number became inf or NaN, an inf became NaN, or a bad value came in from outside.

    ``n``: number of the operation. ``name``: of a tensor that was bad on arrival. ``deliberate``: an inf written on
    purpose.
    """

    n: int = 0
    note: str = ""
    amount: str = ""
    name: str = ""
    parents: tuple[Event, ...] = ()
    deliberate: bool = False

    def about(self, t: Tensor, mask: Tensor, **more: object) -> Event:
        """The same event, with how much of ``t`` is bad, and in which rows."""
        amount = f"{int(mask.sum())} of {mask.numel()} in {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        batched = mask.dim() and self.phase != "optimizer"  # a weight's rows are not the batch's
        rows = mask.reshape(len(mask), -1).any(1).nonzero().flatten().tolist() if batched else []
        return replace(self, amount=amount, rows=rows, length=len(mask) if batched else 0, **more)

    def root(self) -> Event:
        """The earliest ancestor that was not put there on purpose; else this event."""
        # An inf that backward meets in a saved value, but that never reached the loss, does not matter by itself.
        saved = lambda p: self.phase == "backward" and p.phase == "forward" and p.cause != "masked_row"
        # A mask made by a logarithm meets a softmax before it becomes NaN; what becomes so at once was none.
        no_mask = lambda root: self.kind == "nan" and root in self.parents and root.op.startswith("log")
        roots = [p.root() for p in self.parents if not saved(p)]
        real = [root for root in roots if not root.deliberate or no_mask(root)]
        if self.cause == "masked_row":  # a mask may be the logarithm of 0 and 1, or a bias that came in
            real = [root for root in real if root.cause not in ("log_of_zero", "bad_input")]
        return min(real, key=lambda e: e.n) if real else self

    def lineage(self) -> set[Event]:
        return {self}.union(*(p.lineage() for p in self.parents))


def merge(groups: Iterable[Iterable[Event]]) -> tuple[Event, ...]:
    """The events of several groups, each once, the earliest first; of more than eight, deliberate ones go first."""
    found = sorted({id(e): e for events in groups for e in events}.values(), key=lambda e: (e.deliberate, e.n))
    return tuple(sorted(found[:8], key=lambda e: e.n))


def still_there(kind: str, events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Those that can be behind such a number: where only inf is left, NaN has been dropped."""
    return tuple(e for e in events if kind == "nan" or e.kind != "nan") or events


class Taint(dict):
    """storage → [((offset, shape, strides), events)]: what is behind the bad numbers there."""

    def record(self, t: Tensor, events: tuple[Event, ...]) -> None:
        p, records = plain(t), self.setdefault(key_of(t), [])
        if p.numel() * p.element_size() >= p.untyped_storage().nbytes():
            records.clear()
        records.append(((p.storage_offset(), tuple(p.shape), p.stride()), events))

    def behind(self, x: Tensor) -> tuple[Event, ...] | None:
        """The events behind the first bad element of ``x``; None if nothing is known of its memory."""
        if not (records := self.get(key_of(x))):
            return None
        p = plain(x)
        first, address = int(bad_mask(x).flatten().to(torch.uint8).argmax()), p.storage_offset()
        for size, step in zip(reversed(p.shape), reversed(p.stride()), strict=True):
            first, index = divmod(first, size)
            address += index * step
        return next((events for region, events in reversed(records) if covers(region, address)), records[-1][1])


def covers(region: tuple, address: int) -> bool:
    """Does a tensor of this (offset, shape, strides) hold the element at ``address`` of its storage?"""
    rest = address - region[0]
    for step, size in sorted(zip(region[2], region[1], strict=True), reverse=True):
        rest -= max(min(rest // step, size - 1), 0) * step if step else 0
    return rest == 0
