"""Every operator that torch tests itself with: ``locate`` changes nothing, blames no healthy step, finds a bad row."""

import itertools
import math
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from nanlab import locate
from nanlab.tracing import Report

SHARDS = 8
# How the names begin of those that leave, or for NaN read, memory that nobody has written.
UNINITIALISED = ("empty", "new_empty", "resize", "special.chebyshev_polynomial_u")
# Below any dispatch mode torch derives it without a division, which gives other NaN.
DERIVED_OTHERWISE = {"prod"}
# What comes out has a cause of its own.
TOLD_OTHERWISE = {
    "nan_to_num",  # in place of inf the largest float32, which overflows in what follows
    "nextafter",  # the same
    "nanmean",  # when it has dropped the only number it is a mean over nothing
    "histogram",  # with the only number outside of its bins, the densities are 0/0
    "nn.functional.softmin",  # of an inf alone: a row of nothing but −inf
    "nn.functional.softmin.with_dtype",
    "masked.softmin",
}

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="the exceptions are those of torch 2.13"
)


class Run(NamedTuple):
    """What a step has left behind: output, loss and gradients; the random generator; warnings; the bad tensor."""

    numbers: list[Tensor]
    noise: Tensor
    warned: set[str]
    x: Tensor | None
    report: Report | None


def alone(step: Callable, **named: Tensor) -> None:
    step()


def operators(shard: int) -> Iterator[tuple[str, Callable, tuple, bool]]:
    """(name, function, a sample of its arguments, does it write into the first) for the operators of a shard."""
    needed = ModuleType("expecttest")  # the table imports it for tests of its own
    needed.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", needed)
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db[shard::SHARDS]:
        if torch.float32 in op.dtypes and not op.name.startswith(UNINITIALISED):
            torch.manual_seed(1)
            samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
            *_, sample = itertools.islice(samples, 3)  # the first is mostly a single number
            for function in filter(None, (op.op, op.inplace_variant)):
                arguments = (sample.input, sample.args, sample.kwargs)
                yield op.full_name, function, arguments, function is not op.op


def is_number(t: object) -> bool:
    return isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.layout is torch.strided


def run(around: Callable, function: Callable, arguments: tuple, writes: bool, bad: float | None) -> Run:
    """The operator, a projection to a single number, and backward. ``bad``: what is put into its first tensor."""
    slope = lambda t: torch.zeros_like(t).requires_grad_() if is_number(t) and t.requires_grad else None
    slopes = list(map(slope, tree_leaves(arguments)))
    given = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, arguments)
    x = next((t for t in tree_leaves(given) if is_number(t) and t.numel()), None) if bad is not None else None
    if x is not None:
        x[(0,) * x.dim()] = bad
    numbers, noise = [], []

    def step():
        torch.manual_seed(0)
        left = iter(slopes)
        first, args, kwargs = tree_map(lambda t: t if (s := next(left)) is None else t + s, given)
        out = function(first.clone() if writes else first, *args, **kwargs)
        numbers.extend(filter(is_number, tree_leaves(out)))
        loss = torch.zeros(())
        for part in (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in numbers):
            loss = loss + (part * torch.arange(part.numel()).reshape(part.shape).cos().add(2)).sum()
        if loss.requires_grad:
            loss.backward()
        numbers.append(loss)
        noise.append(torch.get_rng_state())
        return loss

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        report = around(step, **({} if x is None else {"x": x}))
    numbers += [s.grad for s in slopes if s is not None and s.grad is not None]
    return Run([t.detach() for t in numbers], noise[0], {str(w.message) for w in warned}, x, report)


def faults(name: str, expected: Run, seen: Run) -> Iterator[str]:
    """What ``locate`` has done wrong."""
    # Below any dispatch mode torch takes another way for a few of them, and rounds otherwise.
    equal = lambda s, t: s.shape == t.shape and torch.allclose(s, t, rtol=1e-4, atol=1e-5, equal_nan=True)
    finite, report, x = all(bool(t.isfinite().all()) for t in expected.numbers), seen.report, seen.x
    same = len(seen.numbers) == len(expected.numbers) and all(map(equal, seen.numbers, expected.numbers))
    if not same and (finite or name not in DERIVED_OTHERWISE):
        yield "other numbers"
    if not torch.equal(seen.noise, expected.noise) or not seen.warned <= expected.warned:
        yield f"other random numbers, or a warning: {seen.warned}"
    if report.found == finite or report.exception is not None:
        yield f"found: {report}"
    if x is not None and report.found and name not in TOLD_OTHERWISE:
        rows = x.isfinite().logical_not().reshape(len(x), -1).any(1).nonzero().flatten().tolist() if x.dim() else []
        if (report.cause, report.op, report.rows) != ("bad_input", "batch x", rows):
            yield f"told: {report}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_an_operator_is_left_as_it_is_and_a_bad_number_in_it_is_found(shard):
    wrong, looked_at = [], 0
    for name, *how in operators(shard):
        for bad in (None, math.nan, math.inf):
            try:
                expected = run(alone, *how, bad)
            except Exception:  # not with these arguments
                break
            looked_at += 1
            wrong += [f"{name} with {bad}: {fault}" for fault in faults(name, expected, run(locate, *how, bad))]
            if bad is None and not all(bool(t.isfinite().all()) for t in expected.numbers):
                break
    assert looked_at > 100
    assert not wrong, "\n".join(wrong)
