"""Births, and the memory that they have made bad: by storage and element, so that views and partly written buffers keep
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
    purpose. ``selects``: the logarithm of zeros and ones.
    """

    n: int = 0
    note: str = ""
    amount: str = ""
    name: str = ""
    parents: tuple[Event, ...] = ()
    deliberate: bool = False
    selects: bool = False

    def about(self, t: Tensor, mask: Tensor, **more: object) -> Event:
        """The same event, with how much of ``t`` is bad, and in which rows."""
        amount = f"{int(mask.sum())} of {mask.numel()} in {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        # A weight's rows are not the batch's; of a sparse tensor the mask knows the values only.
        batched = t.layout is torch.strided and t.dim() and self.phase != "optimizer"
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
            real = [root for root in real if not root.selects and root.cause != "bad_input"]
        return min(real, key=lambda e: e.n) if real else self

    def fault(self) -> tuple:
        """What it is called in a report: the same for each round of a loop."""
        return self.op, self.cause, self.name, self.source, self.library, self.module

    def lineage(self) -> set[Event]:
        return {self}.union(*(p.lineage() for p in self.parents))


Parts = list[tuple[Tensor | None, tuple[Event, ...]]]  # bad elements of a tensor (None: all), the events behind them


def merge(groups: Iterable[Iterable[Event]]) -> tuple[Event, ...]:
    """The events of several groups, each once, the earliest first; of more than eight, deliberate ones go first."""
    found = sorted(dict.fromkeys(e for events in groups for e in events), key=lambda e: (e.deliberate, e.n))
    return tuple(sorted(found[:8], key=lambda e: e.n))


class Taint(dict):
    """storage → (histories of the bad numbers there, which one each element has; None if there is only one)."""

    def record(self, t: Tensor, parts: Parts) -> None:
        p, key = plain(t), key_of(t)
        whole = p.numel() * p.element_size() >= p.untyped_storage().nbytes()
        histories, which = ([], None) if whole else self.get(key, ([], None))
        histories = list(dict.fromkeys((*histories, *(events for _, events in parts))))
        if which is None and len(histories) > 1:
            which = torch.zeros(p.untyped_storage().nbytes() // p.element_size(), dtype=torch.int32, device=p.device)
        for mask, events in parts if which is not None else ():
            which[addresses(p, bad_mask(t) if mask is None else mask, len(which))] = histories.index(events)
        self[key] = histories, which

    def behind(self, x: Tensor) -> Parts | None:
        """The bad elements of ``x``, by history; None if nothing is known of its memory."""
        histories, which = self.get(key_of(x), ([], None))
        if which is None:
            return [(None, events) for events in histories] or None
        mask = bad_mask(x)
        own = torch.full_like(mask, -1, dtype=torch.int32)
        own[mask] = which[addresses(plain(x), mask, len(which))]
        return [(own == i, histories[i]) for i in own[mask].unique().tolist()]


def addresses(p: Tensor, mask: Tensor, size: int) -> Tensor:
    """Where the elements of a mask lie in a storage of so many numbers."""
    at = (mask.nonzero() * torch.tensor(p.stride(), dtype=torch.long, device=p.device)).sum(1) + p.storage_offset()
    return at * p.element_size() * size // p.untyped_storage().nbytes()
