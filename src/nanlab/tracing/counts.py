"""Which tensors count, or say what counts: a 0 in one of them means that there was nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from nanlab.tracing.values import as_list, is_float, key_of

LARGEST = 1 << 22  # elements; a larger tensor is not looked at again
SELECTS = re.compile(r"(new_)?(zeros|ones|full)(_like)?|eye|scalar_tensor").fullmatch
KEEPS = re.compile(  # counts of counts, and parts of them, are counts
    r"(nan)?sum|mean|cumsum|b?mm|mv|dot|bincount|histc|(scatter|index)_add_?|(div|mul|add|r?sub|copy|fill|masked_fill)_?"
    r"|_to_copy|neg|roll|flip|cat|stack|clone|index|index_put_?|scatter(_|_reduce)?|gather|where|repeat.*|tril|triu"
    r"|clamp.*|(max|min)imum|(cum)?prod|nan_to_num|constant_pad_nd|.*pool.*|upsample.*|embedding|(index|masked)_select"
).fullmatch


class Counts:
    """``written``: storage that forward has written → (does it count? by which operation). ``none_read``: was the last
    0 that was read into Python a count? ``forwards``: is the step in its forward pass?"""

    def __init__(self, forwards: Callable[[], bool]) -> None:
        self.written, self.none_read, self.forwards = {}, False, forwards

    def note(self, name: str, args: tuple, out: object, outs: list[Tensor]) -> None:
        """An operation was done: do its outputs count?"""
        if outs and self.forwards():
            counts = bool(SELECTS(name))
            if KEEPS(name):
                given = [t for a in args for t in as_list(a) if isinstance(t, Tensor)]
                none = (name, len(given)) == ("sub", 1) or (name in ("mul", "dot") and args[0] is args[1])  # n − 1, n²
                counts = all(map(self.whole, given)) and not none
            self.written |= dict.fromkeys(map(key_of, outs), (counts, name))
        if name == "_local_scalar_dense" and out == 0:
            self.none_read = self.whole(args[0])

    def whole(self, value: object) -> bool:
        """Does it count, or select? Of what came in, all that holds whole numbers."""
        if not is_float(value):
            return isinstance(value, (int, Tensor)) or (isinstance(value, float) and self.none_read)
        if (key := key_of(value)) in self.written or not self.forwards():
            return self.written.get(key, (False,))[0]
        plainly = value.layout is torch.strided and not value.is_complex() and value.element_size() > 1
        given = plainly and not value.requires_grad and value.numel() <= LARGEST
        return given and bool((value == value.round()).all())

    def made(self, t: Tensor) -> str:
        """The operation of the step's forward pass that wrote it last; '' if it came in."""
        return self.written.get(key_of(t), (False, ""))[1]
