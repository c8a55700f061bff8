"""What a birth means: a closed list of causes, one row each, tried from top to bottom on the inputs of the operation.

A row's test sees a ``Birth``: the operation, its inputs while they are still there, its output, and which elements are
newly bad. The texts are what a report prints; ``lesson`` is the stem of the notebook that reproduces the cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
LARGEST_RERUN = 1 << 22  # elements; beyond this an overflow is not computed again in float64


@dataclass
class Birth:
    """One operation with a newly non-finite output. ``inputs``: (argument, tensor, '' or its kind before the operation)."""

    op: str
    kind: str
    func: Callable
    out: Tensor
    inputs: list[tuple[str, Tensor, str]]
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    phase: str = "forward"
    native: bool = False  # autograd's own backward, not Python code
    fresh: Tensor | None = None  # which output elements, where inputs and outputs correspond one to one
    counted: Callable[[Tensor], bool] = lambda t: False  # is it the sum that counts what was selected?
    eps: object = None  # of the optimizer that is stepping

    def get(self, *names: str) -> object:
        """The argument of one of these names: a tensor or a number."""
        for name, x, _ in self.inputs:
            if name in names:
                return x
        schema = [a.name for a in self.func._schema.arguments] if hasattr(self.func, "_schema") else []
        return next(
            (v for n, v in {**dict(zip(schema, self.args, strict=False)), **self.kwargs}.items() if n in names), None
        )

    @property
    def denominator(self) -> object:
        return (
            self.get("other", "tensor2", "scalars")
            if re.search("div|remainder|fmod", self.op)
            else self.get("self", "x")
        )

    def zero(self, value: object, at: float = 0.0) -> bool:
        """Is ``value`` equal to ``at`` where the output went bad (anywhere, if places do not correspond)?"""
        if isinstance(value, (int, float)):
            return value == at
        if isinstance(value, (list, tuple)):
            return any(isinstance(v, (int, float)) and v == at for v in value)
        if not isinstance(value, Tensor):
            return False
        hit = value == at
        return bool((hit & self.fresh).any() if self.fresh is not None else hit.any())

    @property
    def from_finite(self) -> bool:
        return not any(kind for _, _, kind in self.inputs) and not self.literal

    @property
    def literal(self) -> str:
        """'nan', 'inf' or '': a non-finite number written as an argument."""
        numbers = [
            v for a in (*self.args, *self.kwargs.values()) for v in (a if isinstance(a, (list, tuple)) else (a,))
        ]
        bad = [v for v in numbers if isinstance(v, float) and not math.isfinite(v)]
        return "nan" if any(v != v for v in bad) else "inf" if bad else ""

    def empty(self) -> bool:
        """Nothing was selected: no elements, no counted target, or zero over a count of zero."""
        first = self.inputs[0][1] if self.inputs else self.out
        if first.numel() == 0 or (math.prod(first.shape) // max(self.out.numel(), 1) == 0):
            return True
        if self.op.startswith("nll_loss"):
            target, ignored = self.get("target"), self.get("ignore_index")
            weight = self.get("weight")
            seen = target[target != ignored]
            return seen.numel() == 0 or (weight is not None and not weight[seen].any())
        if self.op != "div":
            return False
        top, bottom = self.get("self"), self.get("other")
        if isinstance(bottom, Tensor):
            return self.counted(bottom) and top.numel() == bottom.numel() and self.zero(bottom)
        return top.numel() == 1 and self.zero(bottom) and self.zero(top)

    def masked_row(self) -> bool:
        """A row of scores that is all −inf, or an attention mask that allows nothing."""
        mask = self.get("attn_mask", "attn_bias")
        if isinstance(mask, Tensor):
            shut = ~mask if mask.dtype is torch.bool else mask.isneginf()
            return bool(shut.all(-1).any())
        x, dim = self.get("self", "input"), self.get("dim")
        if not isinstance(x, Tensor) or x.dim() == 0 or x.numel() == 0:
            return False
        dims = dim if isinstance(dim, (list, tuple)) else [-1 if dim is None else dim]
        return any(bool(x.isneginf().all(d).any()) for d in dims)

    def flat(self) -> bool:
        """A spread of nothing: one value, or equal values, where the operation divides by it."""
        x = self.get("self", "input")
        return isinstance(x, Tensor) and (self.op.startswith(("var", "std")) or "norm" in self.op) and not self.huge(x)

    def huge(self, x: Tensor) -> bool:
        return bool(x.numel()) and x.detach().abs().max().double().item() ** 2 * x.numel() > torch.finfo(x.dtype).max

    def has_inf(self) -> bool:
        return any("inf" in kind for _, _, kind in self.inputs) or self.literal == "inf"

    def reached(self) -> str:
        """How far past the largest number of the dtype, by doing the operation again in float64."""
        limit = torch.finfo(self.out.dtype).max
        text = f"The largest {str(self.out.dtype).removeprefix('torch.')} is {limit:.5g}"
        if sum(x.numel() for _, x, _ in self.inputs) > LARGEST_RERUN or self.op.startswith("_fused"):
            return text + "."
        if self.op == "_to_copy":
            value = self.inputs[0][1].double()
        else:
            wide = lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            inplace = self.op.endswith("_") or self.func is None or self.op.startswith("_foreach")
            try:
                value = None if inplace else self.func(*map(wide, self.args), **self.kwargs)
            except (RuntimeError, TypeError, NotImplementedError):  # no float64 kernel: the limit alone is still true
                value = None
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return text + "."
        value = value.abs()
        if not torch.isfinite(value).all():
            return text + "; even float64 (1.8e+308) is not enough here."
        top = value.max().item()
        return text + f"; the result would be {top:.3g}, {top / limit:.3g} times that."


@dataclass(frozen=True)
class Cause:
    """One row: which operations, which test on their inputs, and what to say."""

    name: str
    ops: str  # a regular expression on the operation's name
    test: Callable[[Birth], bool]
    explain: str
    advice: str
    lesson: str


SOFTMAX = r"softmax|logsumexp|attention"
DIVIDES = r"^(_foreach_)?(div|true_divide|reciprocal|rsqrt|pow|float_power|addcdiv|remainder|fmod)"
NEVER = r"(?!)"
ADVICE_EDGE = (
    "Keep the dangerous value out of the function *before* it is called (x = torch.where(ok, x, 1.0), or clamp_min), not "
    "out of its result: where() after the fact still sends 0 · inf backward. Use logsigmoid, log_softmax, norm."
)
TABLE = (
    Cause(
        "optimizer_underflow",
        DIVIDES,
        lambda b: b.phase == "optimizer" and b.zero(b.denominator),
        "The optimizer divides by √v + eps, and both came out as exactly 0 in the dtype of its state.",
        "Keep the weights that the optimizer sees in float32 (mixed precision), or use bfloat16, or the fused optimizer, "
        "or an eps that the dtype can hold (1e-4 in float16).",
        "06_fp16_overflow",
    ),
    Cause(
        "masked_row",
        SOFTMAX,
        lambda b: b.masked_row(),
        "A softmax over a row in which everything is masked: all scores are −inf, so it divides 0 by 0.",
        "Let every row see at least one position (itself, or the first), or fill with torch.finfo(dtype).min instead of −inf "
        "and drop the row's output; look for rows that are only padding.",
        "05_unk_pad",
    ),
    Cause(
        "empty_mean",
        r"mean|median|nll_loss|var|std|^div|quantile|sum",
        lambda b: b.kind == "nan" and b.empty(),
        "A mean over nothing: no element was selected, so the sum 0 is divided by the count 0.",
        "Leave the empty row or batch out, and weigh by the number of tokens (sum of losses / max(count, 1)); find out why "
        "nothing was selected: a prompt that fills max_length, labels that are all −100, a mask that is all zero.",
        "03_empty_batch",
    ),
    Cause(
        "gradient_at_edge",
        r"",
        lambda b: (
            b.native
            and b.from_finite
            and (b.kind == "nan" or (bool(re.match(DIVIDES, b.op)) and b.zero(b.denominator)))
        ),
        "The value is finite, but the slope is not: the function stands at an edge of its domain (√0, log 0, 0/0, …), "
        "where its derivative is infinite or undefined.",
        ADVICE_EDGE,
        "04_log_of_zero",
    ),
    Cause(
        "zero_over_zero",
        DIVIDES + r"|^var|^std|norm",
        lambda b: b.kind == "nan" and b.from_finite and (b.flat() or b.zero(b.denominator)),
        "0 divided by 0: numerator and denominator are zero at the same place, as with the spread of equal values.",
        "Treat the degenerate group apart (its advantage is 0), rather than adding a tiny eps: eps turns rounding noise into "
        "full-size signals. A std of one element needs correction=0 or must be left out.",
        "02_zero_std",
    ),
    Cause(
        "division_by_zero",
        DIVIDES,
        lambda b: "inf" in b.kind and b.zero(b.denominator),
        "A number other than 0 is divided by 0.",
        "Find out why the denominator is 0; clamp it to a smallest sensible value, or leave those rows out.",
        "02_zero_std",
    ),
    Cause(
        "log_of_zero",
        r"^(_foreach_)?(log|log2|log10|log1p|logit|special_log\w*|xlogy|_log_softmax|logsigmoid|log_sigmoid\w*)_?$",
        lambda b: not any(k == "nan" for _, _, k in b.inputs),
        "The logarithm of 0 (or less): a probability has underflowed to 0, or was 0 from the start.",
        "Stay in log space: log_softmax and logsigmoid instead of log(softmax) and log(sigmoid), logsumexp instead of log(sum); "
        "for log(1 − p) use log1mexp. Do not only add an eps: it changes the gradient.",
        "04_log_of_zero",
    ),
    Cause(
        "zero_times_inf",
        r"mul|^(mm|bmm|addmm|baddbmm|addmv|mv|dot|vdot|matmul|linear|lerp|addcmul|cumprod|prod|convolution)|einsum|_rms_norm",
        lambda b: b.kind == "nan" and b.has_inf(),
        "0 times inf: a mask that multiplies does not remove an infinite value, it makes NaN out of it.",
        "Select instead of multiplying: torch.where(mask, x, 0), masked_fill, or index the valid entries.",
        "04_log_of_zero",
    ),
    Cause(
        "inf_minus_inf",
        r"",
        lambda b: b.kind == "nan" and b.has_inf(),
        "inf minus inf: two infinite numbers of opposite sign meet in a sum, a difference, a mean or a normalisation.",
        "Find the inf that came first (see the story); bound the values before they are subtracted.",
        "01_inf_and_nan",
    ),
    Cause(
        "overflow",
        r"^(?!a?cosh?$|a?sinh?$|a?tan$|sqrt|erfinv|log)",
        lambda b: b.from_finite and (b.kind != "nan" or any(x.numel() and b.huge(x) for _, x, _ in b.inputs)),
        "The result is larger than the dtype can hold.",
        "In half precision: do this operation in float32 or use bfloat16. In float32: bound the argument (exp of a clamped "
        "difference), lower the learning rate or the loss scale, clip the gradients before they are inf.",
        "06_fp16_overflow",
    ),
    Cause(
        "bad_input",
        NEVER,
        lambda b: False,
        "It was already there in what the step was given.",
        "Find the rows in the data and clean or drop them before training; check the numbers where they are made (rewards, "
        "features, cached log-probs).",
        "07_learning_rate_and_dirty_data",
    ),
    Cause(
        "bad_state",
        NEVER,
        lambda b: False,
        "It was already there before the step: in the parameters, the buffers, or the optimizer.",
        "Go back to a checkpoint from before it broke; look at every tensor of what you load, at layers that are never "
        "initialised, and at the running statistics. A bad learning rate comes from the schedule.",
        "07_learning_rate_and_dirty_data",
    ),
    Cause(
        "unknown",
        r"",
        lambda b: True,
        "No row of the table fits. NaN from finite numbers is most often a function outside its domain (√ of a negative "
        "number, acos beyond 1).",
        "Look at the ranges of the inputs below, and at what the operation's documentation says about them.",
        "08_locate",
    ),
)
CAUSES = {row.name: row for row in TABLE}


def diagnose(birth: Birth) -> tuple[str, str]:
    """The first row that fits, and what can be said in numbers."""
    row = next(row for row in TABLE if re.search(row.ops, birth.op) and row.test(birth))
    if row.name == "overflow":
        return row.name, birth.reached()
    if row.name == "optimizer_underflow":
        dtype = birth.out.dtype
        held = torch.tensor(float(birth.eps), dtype=dtype).item() if birth.eps is not None else math.nan
        return (
            row.name,
            f"eps is {birth.eps}, which {str(dtype).removeprefix('torch.')} holds as {held:.3g}."
            if held == held
            else "",
        )
    return row.name, ""
