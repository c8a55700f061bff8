"""Which bad numbers that went into an operation are behind each bad number that came out, and which were born in it.

The operation is asked itself: it is done again with bad inputs of one history only, and finite numbers in place of the
others. Where the output is bad again, those inputs are enough for it; where it is bad without any, it is born here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from nanlab.tracing.causes import Birth
from nanlab.tracing.events import Event, Parts, merge
from nanlab.tracing.values import bad_mask, is_float, plain

MANY = 8  # sources, or sets of them; what is beyond that is not told apart
# What stands in place of bad numbers: no function is bad at both, and no matrix of the first is singular.
STAND_INS = (lambda n: torch.rand(n, generator=torch.Generator().manual_seed(0)) / 2 + 0.25, torch.ones)


class Source(NamedTuple):
    """Bad inputs with one history, all NaN or all inf. ``masks``: id of an input → which of its elements."""

    what: frozenset
    nan: bool
    events: list[Event]
    masks: dict[int, Tensor]


def sources(inputs: Sequence[tuple[str, Tensor, str]], blame: dict[int, Parts], what: Callable = id) -> list[Source]:
    """``what``: of an event, that which makes it another one."""
    found: dict[tuple, Source] = {}
    for _, x, kind in inputs:
        for mask, events in blame[id(x)] if kind else ():
            mask = bad_mask(x) if mask is None else mask
            nan = mask & torch.isnan(plain(x))
            for is_nan, own in ((True, nan), (False, mask & ~nan)):
                if own.any():
                    key = frozenset(map(what, events)), is_nan
                    source = found.setdefault(key, Source(*key, [], {}))
                    source.events.extend(events)
                    source.masks[id(x)] = own | source.masks.get(id(x), False)
    # A loop over many samples has one event for each of them.
    return sources(inputs, blame, Event.fault) if len(found) > MANY and what is id else list(found.values())


def trace(birth: Birth, blame: dict[int, Parts]) -> tuple[Parts, list[tuple[Tensor, list[Source]]]]:
    """(elements that are carried on, with their events; elements that are born, with the sources they are born of).

    ``blame``: id of a bad input → who is behind it.
    """
    nan, histories = torch.isnan(plain(birth.out)), {events for parts in blame.values() for _, events in parts}
    if len(histories) == 1 and any(kind == "nan" for _, _, kind in birth.inputs) and nan.all():
        return [(None, *histories)], []  # most of what follows a NaN loss
    out, found = bad_mask(birth.out), sources(birth.inputs, blame)
    altered = any(kind and id(x) in birth.before for _, x, kind in birth.inputs)  # by an optimizer
    birth.matched = birth.pointwise() and not altered
    # log_softmax of −inf is a log of zero: a probability of zero becomes visible here, whatever masked it
    visible = birth.op in ("_log_softmax", "logsumexp")
    carried, born = [], []
    try:
        groups = behind(birth, found, out) if 0 < len(found) <= MANY and not altered else [(out, found)]
    except NotImplementedError:
        groups = [(out, found)]
    for mask, of in groups:
        for is_nan, place in ((True, mask & nan), (False, mask & ~nan)):
            if place.any() and any(s.nan == is_nan for s in of) and (is_nan or not visible):
                carried.append((place, merge(s.events for s in of)))
            elif place.any():
                born.append((place, of))
    return carried, born


def behind(birth: Birth, found: list[Source], out: Tensor) -> list[tuple[Tensor, list[Source]]]:
    """The bad elements of the output, by the sources behind them; by none where they are born of finite numbers.

    Raises NotImplementedError where the operation cannot be done again.
    """
    if birth.op in ("sort", "topk"):  # other numbers would come out in another order
        (_, x, _), (_, order), dim = birth.inputs[0], birth.returned, birth.get("dim")
        moved = [s.masks[id(x)].gather(-1 if dim is None else dim, order) for s in found]
        return split(torch.stack(moved), out, found)
    if (fresh := bad_with(birth, found, [], out)).any():
        fresh = bad_with(birth, found, [], fresh, other=1)
    if fresh.any():  # what only the size of the finite numbers does, and the sources would have done as well, is theirs
        fresh &= bad_with(birth, found, [], fresh, size=1) | ~bad_with(birth, found, found, fresh, size=1)
    left = out & ~fresh
    enough = torch.stack([bad_with(birth, found, [s], out) for s in found]) if len(found) > 1 else out[None]
    if (together := left & ~enough.any(0)).any():  # it takes several: those without which it would not be bad
        needed = ~torch.stack([bad_with(birth, found, [s for s in found if s is not one], out) for one in found])
        enough = torch.where(together, needed | ~needed.any(0), enough)
    return [(fresh, []), *split(enough, left, found)]


def split(bits: Tensor, left: Tensor, found: list[Source]) -> list[tuple[Tensor, list[Source]]]:
    """The places that are ``left``, by the sources behind them: those whose ``bits`` (first dimension) are set."""
    groups: list[tuple[Tensor, list[Source]]] = []
    while left.any():
        which = bits.reshape(len(bits), -1)[:, left.flatten().byte().argmax()]
        mask = left & (bits == which.view(-1, *[1] * left.dim())).all(0)
        if len(groups) == MANY:
            which, mask = torch.ones_like(which), left
        groups.append((mask, list(compress(found, which.tolist()))))
        left = left & ~mask
    return groups


def bad_with(b: Birth, found: list[Source], kept: list[Source], out: Tensor, other: int = 0, size: int = 0) -> Tensor:
    """Which bad elements of the output would be bad as well if of all sources there were only those of ``kept``?

    ``size``: the largest that a finite number may be; larger ones are scaled down together. 0: as they are.
    ``other``: which of ``STAND_INS`` takes the place of the other sources.
    """

    def change(x: object) -> object:
        was = b.before.get(id(x))
        numbers = x if was is None or was.numbers is None else was.numbers
        drop = [s.masks[id(numbers)] for s in found if s not in kept and id(numbers) in s.masks]
        drop += [bad_mask(x)] if was and numbers is x else []  # it has become so only now
        numbers = numbers.clone() if was or drop else numbers
        for mask in drop:
            plain(numbers)[mask] = STAND_INS[other](int(mask.sum())).to(plain(numbers))
        if size and is_float(x):
            top = plain(numbers).masked_fill(bad_mask(numbers), 0).abs().amax() if x.numel() else size
            numbers = numbers * (size / max(size, float(top)))
        return numbers

    if (again := b.again(change)) is None or again.shape != b.out.shape:  # other numbers, other duplicates
        raise NotImplementedError(b.op)
    alike = torch.isnan(plain(again)) | ~torch.isnan(plain(b.out))  # an inf that is there by design makes no NaN
    return out & bad_mask(again) & (alike if not kept else True)
