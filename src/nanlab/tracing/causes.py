"""What a birth means: a closed list of causes, one row each, tried from top to bottom on the inputs of the operation.

A row is a function with ``@row(name, operations, lesson)``: it looks at a ``Birth`` (the operation, its inputs while
they are still there, its output, which elements are newly bad) and says whether the cause fits. The first paragraph
of its text explains, the second advises: that is what a report prints. ``lesson`` is the stem of the notebook that
reproduces the cause.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from nanlab.tracing.counts import LARGEST, SELECTS
from nanlab.tracing.values import as_list, bad, bad_mask, is_float, plain

CONSTANT = "a constant in"  # how the name of a number begins that is written in the code
COPIES = ("cat", "clone", "stack", "index", "gather", "_to_copy")
MASKS = ("attn_mask", "attn_bias", "mask")  # a −inf in these is meant
DIVISION = r"^(_foreach_)?(div|floor_divide|reciprocal|rsqrt|pow|float_power|addcdiv|remainder|fmod|_fused_ada)"
MODULO = r"remainder|fmod"  # by 0, of any number
PRODUCT = r"mul|^(mm|bmm|addmm|baddbmm|addmv|mv|dot|vdot|lerp|addcmul|cumprod|prod|convolution|_fused_rms_norm)"
POLES = r"a(cos|sin|tanh)|sqrt|erfinv|log|(di|l|mvl|poly)gamma|special_(?!.*i[01]$|erfcx|log_n)|.*solve|linalg_inv"
LOGARITHM = r"^(_foreach_)?(log(2|10|1p|it|_sigmoid_forward)?|xlogy|_log_softmax)_?$|ctc_loss|special_xlog1py|slogdet"


# -- one operation whose output went bad -----------------------------------------------------------------------------
class Was(NamedTuple):
    """A tensor as an operation found it: its kind, None if it does not matter; its numbers; who is behind them."""

    kind: str | None
    numbers: Tensor | None
    parts: Sequence = ()


class Birth(SimpleNamespace):
    """One operation with a newly non-finite output: ``op`` ``func`` ``args`` ``kwargs`` ``out`` ``kind``.

    ``inputs``: (argument, tensor, '' or its kind), as they were before. ``before``: id of a tensor that the operation
    has written → what it was, None if that is not known. ``returned``: all that the operation returned.
    ``fresh``: which output elements are new. ``matched``: do inputs and outputs correspond one to one? ``native``:
    autograd's own backward, not Python code. ``saved``: it meets an inf that forward has saved. ``gradient``: it writes
    into the gradient of a parameter. ``counts``: which tensors count, so that 0 means that there was nothing. ``eps``,
    ``state``: of the optimizer, numbers and dtypes.
    """

    matched, native, saved, gradient, phase, eps, state = False, False, False, False, "", (), ()

    def named(self) -> dict[str, object]:
        schema = getattr(self.func, "_schema", None)
        names = [a.name for a in schema.arguments] if schema else [f"argument {i}" for i in range(len(self.args))]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, x) for name, value in self.named().items() for x in as_list(value) if is_float(x)]

    def aligned(self, i: int, outputs: int, **fields: object) -> Birth:
        """In a ``_foreach_*`` call, the i-th output comes from the i-th entry of every list."""
        if not self.op.startswith(("_foreach", "_fused_a", "_fused_sgd", "_amp")):
            return Birth(**{**vars(self), **fields})
        count = max((len(v) for v in self.args if isinstance(v, (list, tuple))), default=1)
        pick = lambda v: [v[i % count]] if isinstance(v, (list, tuple)) and len(v) == count else v
        args, kwargs = tuple(map(pick, self.args)), {k: pick(v) for k, v in self.kwargs.items()}
        return Birth(**{**vars(self), "args": args, "kwargs": kwargs, "returned": [fields["out"]], **fields})

    def at(self, mask: Tensor, of: list) -> Birth:
        """The operation at those elements of its output that are born of these sources."""
        among = lambda x, places: bad(torch.where(torch.stack(places).any(0), plain(x), 0)) if places else ""
        matching = mask if self.matched else True
        own = lambda x: [s.masks[id(x)] & matching for s in of if id(x) in s.masks]
        inputs = [(a, x, among(x, own(x))) for a, x, _ in self.inputs]
        return Birth(**{**vars(self), "fresh": mask, "kind": among(self.out, [mask]), "inputs": inputs})

    def get(self, *names: str) -> object:
        """The argument of one of these names: a tensor or a number, the first entry of a list."""
        value = next((v for n, v in self.named().items() if n in names), None)
        return value[0] if isinstance(value, (list, tuple)) and value else value

    def pointwise(self) -> bool:
        """Does each element of the output come from one element of every input, in the memory that it has?"""
        tensors = [self.out, *(x for _, x, _ in self.inputs)]
        simple = all(t.layout is torch.strided and not t.is_complex() for t in tensors)
        return torch.Tag.pointwise in getattr(self.func, "tags", ()) and simple

    def divisor(self) -> object:
        by = self.get("other", "tensor2", "scalars", "exp_avg_sqs", "state_sums")
        return self.get("self") if by is None else by

    def divides_by_zero(self) -> bool:
        power = self.get("exponent")  # only a negative one divides
        divides = power is None or bool((torch.as_tensor(power) < 0).any())
        return bool(re.search(DIVISION, self.op)) and divides and self.zero(self.divisor())

    def zero(self, value: object) -> bool:
        """Is ``value`` 0 where the output went bad (anywhere, if places do not correspond)?"""
        if isinstance(value, Tensor):
            zero = plain(value).isinf() if value is self.out else value == 0  # written in place: 1/0 is inf by now
            return bool((zero & self.fresh if self.matched else zero).any())
        return value == 0

    def narrowest(self) -> torch.dtype:
        """Of the output and the optimizer's state, the one that loses a small number first."""
        return max({self.out.dtype, *self.state}, key=lambda dtype: torch.finfo(dtype).smallest_normal)

    def held(self, number: float) -> float:
        return torch.tensor(number, dtype=self.narrowest()).item()

    def literal(self) -> str:
        """'nan', 'inf', '-inf' or '': a non-finite number written as an argument."""
        given = [v for a in self.named().values() for v in as_list(a) if isinstance(v, float) and not math.isfinite(v)]
        return "nan" if any(v != v for v in given) else str(max(given, default=""))

    def measured(self, x: Tensor, other: object) -> bool:
        """Is x / other no mean of a selection, although ``other`` holds whole numbers?

        Then x came in as it is, or is a deviation by a given spread or by a range, or weights by their own sum, or a
        spread, or one of them is a constant to which nothing was added. ``x``: of real numbers.
        """
        made = self.counts.made(x)
        if not isinstance(other, Tensor):
            setting = made in ("div", "sub") and not self.counts.none_read  # a count is read from a tensor
            return setting or (x.dim() > 0 and (made in ("", "sub") or bool(SELECTS(made))))
        by = self.counts.made(other)
        deviation = (made in ("sub", *COPIES) and by in ("", "sub")) or (made, by) == ("sub", "add")
        weights = self.counts.whole(x) and made in ("clamp", *COPIES) and x.numel() > other.numel()
        no_sum = made in ("std", "var") or any(SELECTS(self.counts.made(t)) and t.dim() for t in (x, other))
        return not made or (deviation and is_float(other)) or weights or no_sum

    def from_finite(self) -> bool:
        return not any(kind for _, _, kind in self.inputs) and not self.literal()

    def nan_from_inf(self) -> bool:
        return self.kind == "nan" and (any("inf" in kind for _, _, kind in self.inputs) or "inf" in self.literal())

    def too_large(self) -> bool:
        """Did finite numbers give NaN because of their size? Then float64 gives none for the same numbers."""
        if "attention" in self.op:  # no edge in there: only exp(score − largest score), rounded, of huge scores
            return True
        if (wide := self.in_float64()) is not None:
            return not bad_mask(wide)[self.fresh].any()
        squares = ((x.abs().max().double() ** 2 * x.numel(), x.dtype) for _, x, _ in self.inputs if x.numel())
        return any(total > torch.finfo(dtype).max for total, dtype in squares)

    def again(self, change: Callable[[object], object]) -> Tensor | None:
        """The output of the operation with other arguments; None where it may do more than that, or fails."""
        if getattr(self.func, "namespace", "") != "aten" or self.kwargs.get("generator") is not None:
            return None
        new: dict[int, object] = {}
        one = lambda v: new.setdefault(id(v), change(v))
        swap = lambda v: [one(x) for x in v] if isinstance(v, (list, tuple)) else one(v)
        # There may be no kernel for that.
        with torch.random.fork_rng([self.out.device] * self.out.is_cuda), contextlib.suppress(RuntimeError, TypeError):
            value = self.func(*map(swap, self.args), **{k: swap(v) for k, v in self.kwargs.items()})
            pairs = zip(as_list(value), self.returned, strict=False)
            return new.get(id(self.out), next((again for again, t in pairs if t is self.out), None))
        return None

    def in_float64(self) -> Tensor | None:
        """The output with float64 arguments; None also if it is large, or written in place."""
        if re.search("^_f|_$", self.op) or sum(x.numel() for _, x, _ in self.inputs) > LARGEST:
            return None
        wide = lambda dtype: torch.complex128 if dtype.is_complex else torch.float64
        return self.again(lambda v: v.to(wide(v.dtype)) if is_float(v) else wide(v) if type(v) is torch.dtype else v)

    def excess(self) -> str:
        """How far past the largest number of the dtype."""
        if "attention" in self.op:
            return "Inside the attention kernel: q·k is too large for the dtype, or its rounding error is for exp()."
        limit, wide = torch.finfo(self.out.dtype).max, self.in_float64()
        top = plain(wide)[self.fresh].abs().max().item() if wide is not None else math.nan
        reached = f"; the result would be {top:.3g}, {top / limit:.3g} times that" if limit < top < math.inf else ""
        return f"The largest {str(self.out.dtype).removeprefix('torch.')} is {limit:.5g}{reached}."


# -- the table -------------------------------------------------------------------------------------------------------
class Cause(NamedTuple):
    """One row: which operations (a regular expression), which test on their inputs, and what to say."""

    name: str
    operations: str
    lesson: str
    test: Callable[[Birth], bool]
    explain: str
    advice: str


CAUSES: dict[str, Cause] = {}


def row(name: str, operations: str, lesson: str) -> Callable:
    def add(test: Callable[[Birth], bool]) -> Callable:
        explain, advice = (" ".join(part.split()) for part in inspect.getdoc(test).split("\n\n"))
        CAUSES[name] = Cause(name, operations, lesson, test, explain, advice)
        return test

    return add


NOTES = {  # how cause, kind and operation begin → what its row leaves out
    "log_of_zero inf _ctc_loss": "Here it is mostly a target that needs more frames than there are: see zero_infinity.",
    "log_of_zero nan": "Here it is out of range: rounding, a wrong sign, a parameter that must stay positive.",
    "masked_row -inf": "Here it gives −inf, and NaN in its gradient or where such are subtracted.",
}


def diagnose(birth: Birth) -> tuple[str, str]:
    """The first row that fits, and what can be said in numbers."""
    name = next(c.name for c in CAUSES.values() if re.search(c.operations, birth.op) and c.test(birth))
    if name == "optimizer_underflow" and birth.eps:
        dtype, eps = str(birth.narrowest()).removeprefix("torch."), min(birth.eps)
        return name, f"eps is {eps:g}, which {dtype} holds as {birth.held(eps):.3g}."
    note = next((note for case, note in NOTES.items() if f"{name} {birth.kind} {birth.op}".startswith(case)), "")
    return name, birth.excess() if name == "overflow" else note


@row("optimizer_underflow", DIVISION, "06_fp16_overflow")
def _(b: Birth) -> bool:
    """The optimizer divides by √v + eps, and both came out as exactly 0 in the dtype of its state.

    Keep the weights that the optimizer sees in float32 (mixed precision), and an eps above 0. The fused optimizer and
    an eps of 1e-4 are finite and still wrong, since √v stays 0; weights in bfloat16 round small steps away.
    """
    # Without an eps it is the range that counts: bfloat16 reaches as far down as float32.
    lost = any(b.held(e) == 0 for e in b.eps or [torch.finfo(torch.float32).tiny])
    return b.phase == "optimizer" and lost and isinstance(b.divisor(), Tensor) and b.divides_by_zero()


@row("masked_row", r"(?<!_safe_)softmax|logsumexp|attention|encoder_layer", "05_unk_pad")
def _(b: Birth) -> bool:
    """A softmax over a row in which everything is masked: all scores are −inf, so it divides 0 by 0.

    Let every row see at least one position (itself, or the first), and drop the output of rows that are only padding.
    torch.finfo(dtype).min in place of −inf gives no NaN in float32, but a mean over what was masked; in float16, and
    where two masks are added, it can be −inf again.
    """
    mask, x, dim = b.get(*MASKS), b.get("self"), b.get("dim")
    if isinstance(mask, Tensor):
        return bool((~mask if mask.dtype is torch.bool else mask.isneginf()).all(-1).any())
    return isinstance(x, Tensor) and x.numel() > 0 and bool(x.isneginf().all(-1 if dim is None else dim).any())


@row("empty_mean", r"mean|median|quantile|loss|cross_entropy|var|std|segment|^div|^fill_$", "03_empty_batch")
def _(b: Birth) -> bool:
    """A mean over nothing: no element was selected, so the sum 0 is divided by the count 0.

    Leave the empty row or batch out, count it, and weigh the rest by tokens: the sum of all losses over the number of
    all tokens. A 0.0 in its place would be finite and wrong. Find out why nothing was selected: a prompt that fills
    max_length, labels that are all −100, a mask that is all zero.
    """
    x, other, target = b.get("self"), b.get("other"), b.get("target")
    if "nll_loss" in b.op:
        weight, seen = b.get("weight"), target[target != b.get("ignore_index")]
        return seen.numel() == 0 or (b.from_finite() and weight is not None and not weight[seen].any())
    if b.op == "fill_":  # torch does so in a cross entropy with soft labels
        return b.literal() == "nan" and b.counts.made(b.out) == "sum"
    if b.op.rstrip("_") != "div":
        none = ("mean",) if b.kind == "nan" else ("max", "min")  # what gives such a number for an empty segment
        return x.numel() == 0 if isinstance(x, Tensor) else b.from_finite() and b.get("reduce") in none
    counted = b.counts.whole(other) or (not isinstance(other, Tensor) and b.counts.made(x) == "sum")
    measured = b.gradient or (is_float(x) and b.measured(x, other))
    return b.kind == "nan" and counted and b.zero(other) and not measured


@row("gradient_at_edge", r"", "04_log_of_zero")
def _(b: Birth) -> bool:
    """The loss may well be finite, but a slope on the way is not: a function stands at an edge of its domain (√0, log
    0, acos 1).

    Keep the dangerous value out of the function before it is called (x = torch.where(ok, x, 1.0), or clamp), not out
    of its result: where() after the fact still sends 0 · inf backward. Use logsigmoid, log_softmax, vector_norm. svd
    and eigh have no gradient where two values are equal: use svdvals and eigvalsh, or keep the values apart.
    """
    nan, pole = b.kind == "nan", b.divides_by_zero() or bool(re.search(LOGARITHM, b.op))
    return b.native and (pole or (nan and not b.too_large()) if b.from_finite() else nan and b.saved)


@row("zero_over_zero", DIVISION + r"|^var|^std|norm|histogram", "02_zero_std")
def _(b: Birth) -> bool:
    """0 divided by 0: numerator and denominator are zero at the same place, as with the spread of equal values.

    Treat that case apart: equal values leave nothing to normalise (their advantage is 0), a single value has no spread,
    and a zero vector no direction. No eps makes it right: rounding noise still comes through as a signal.
    """
    spread = bool(re.search(r"^var|^std|(?<!batch_)norm|histogram", b.op)) and not b.too_large()
    return b.kind == "nan" and b.from_finite() and (spread or (b.divides_by_zero() and not re.search(MODULO, b.op)))


@row("division_by_zero", DIVISION, "02_zero_std")
def _(b: Birth) -> bool:
    """A number other than 0 is divided by 0.

    Find out why the denominator is 0; clamp it to the smallest value that makes sense, or leave those rows out.
    """
    return (b.kind != "nan" or bool(re.search(MODULO, b.op))) and b.divides_by_zero()


@row("log_of_zero", LOGARITHM + "|^scalar_tensor$", "04_log_of_zero")
def _(b: Birth) -> bool:
    """The logarithm of 0 or less: a probability has underflowed to 0, or was 0 from the start.

    Stay in log space: log_softmax and logsigmoid instead of log(softmax) and log(sigmoid), logsumexp instead of
    log(sum), and for log(1 − p) a log1mexp. An added eps only moves the problem into the gradient.
    """
    # logdet() takes such a number where the determinant is negative, right after it.
    so = b.op != "scalar_tensor" or (b.kind, *[*b.counts.written.values()][-1:]) == ("nan", (False, "_linalg_slogdet"))
    return so and not any(kind == "nan" or (kind == "inf" and b.kind == "nan") for _, _, kind in b.inputs)


@row("zero_times_inf", PRODUCT, "04_log_of_zero")
def _(b: Birth) -> bool:
    """0 times inf: a mask that multiplies does not remove an infinite value, it makes a NaN of it.

    Select instead of multiplying: torch.where(mask, x, 0), masked_fill, or index the valid entries.
    """
    zero = any((x == 0).any() for _, x, _ in b.inputs) or not all(map(is_float, b.args))
    return b.nan_from_inf() and (zero or b.matched)


@row("inf_minus_inf", r"", "01_inf_and_nan")
def _(b: Birth) -> bool:
    """Infinite numbers cancel in a sum, a difference, a mean or a normalisation.

    Find the inf that came first (see the story), and bound the values before they are subtracted.
    """
    return b.nan_from_inf()


@row("overflow", rf"^(?!{POLES})", "06_fp16_overflow")
def _(b: Birth) -> bool:
    """The result, or a number on the way to it, is larger than the dtype can hold.

    In float16: do this operation in float32, or use bfloat16. In float32 and bfloat16: bound the argument (exp of a
    clamped difference), lower the learning rate or the loss scale, clip gradients before they are inf.
    """
    return b.from_finite() and (b.kind != "nan" or b.too_large())


@row("bad_input", r"(?!)", "07_learning_rate_and_dirty_data")
def _(b: Birth) -> bool:
    """It was already there in what the step was given.

    Find the rows in the data and clean or drop them before training; check the numbers where they are made: rewards,
    features, cached log-probs.
    """


@row("bad_state", r"(?!)", "07_learning_rate_and_dirty_data")
def _(b: Birth) -> bool:
    """It was already there before the step, in the parameters, the buffers or the optimizer.

    Go back to a checkpoint from before it broke; look at every tensor of what you load, at layers that are never
    initialised, and at running statistics. A bad learning rate comes from its schedule.
    """


@row("unknown", r"", "08_locate")
def _(b: Birth) -> bool:
    """No row of the table fits. NaN from finite numbers is mostly a function outside its domain (√ of less than 0,
    acos of 2, the inverse of a singular matrix), inf mostly a pole (atanh of 1).

    Look at the ranges of the inputs: a difference that rounding has made negative, a parameter that has to stay
    positive, a cosine that is 1 and a little more, columns of a matrix that depend on one another. Clamp what only
    rounding has moved; mend what is really outside.
    """
    return True
