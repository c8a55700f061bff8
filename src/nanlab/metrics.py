"""WeightedMean: a mean that does not depend on how its numbers were batched, ordered or spread over ranks."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanlab.errors import InputError

Numbers = float | Sequence[float] | Tensor
_PARTS = 3
_STATE = 2 * _PARTS + 1  # two sums and a count


def _exact_sum(numbers: Iterable[float]) -> tuple[float, ...]:
    """The sum as three floats: its rounding, the rounding of what is left, and again. Keeps over 150 bits.

    One float would lose the small terms, and which ones it lost would depend on the order.
    """
    numbers = list(numbers)
    for _ in range(_PARTS):
        numbers.append(-_finite_sum(numbers))
    return tuple(-part for part in numbers[-_PARTS:])


def _finite_sum(numbers: list[float]) -> float:
    try:
        total = math.fsum(numbers)
    except (OverflowError, ValueError):  # a partial sum beyond the largest float; inf − inf
        total = math.inf
    if not math.isfinite(total):
        raise InputError("WeightedMean: a sum of value · weight, or of weights, is beyond 1.8e308; scale them down")
    return total


@dataclass
class WeightedMean:
    """Sum of value · weight over sum of weight, with both sums kept to over 150 bits (three floats).

    Within that, the result does not change with the order of the updates, the batch size, or the order of merges. A
    value is a row with weight 1, or a mean over tokens with their number as weight.

    `excluded` is the number of entries left out: those whose value is NaN or inf and those whose weight is 0.
    """

    total: tuple[float, ...] = (0.0,) * _PARTS  # Σ value · weight
    weights: tuple[float, ...] = (0.0,) * _PARTS  # Σ weight
    excluded: int = 0

    def update(self, value: Numbers, weight: Numbers = 1.0) -> None:
        """Take in one value or a vector of them, with a weight each or one for all.

        Shapes are flattened; weights have the shape of the values, up to dimensions of size 1.

        Raises:
            InputError: what is given are not numbers, a weight is negative, NaN or inf, the shapes do not fit, or a
                sum is too large for a float. Nothing is taken in then.
        """
        values, weights = _numbers("value", value), _numbers("weight", weight)
        if weights.numel() == 1:
            weights = weights.reshape(()).expand(values.shape)
        _check_shapes(values, weights)
        values, weights = values.flatten().tolist(), weights.flatten().tolist()
        _check_weights(weights)
        kept = [(v * w, w) for v, w in zip(values, weights, strict=True) if w > 0 and math.isfinite(v)]
        self._add((p for p, _ in kept), (w for _, w in kept), len(values) - len(kept))

    def merge(self, other: WeightedMean) -> WeightedMean:
        """Take in what another rank or another part of the data has seen. Returns self."""
        self._add(other.total, other.weights, other.excluded)
        return self

    def compute(self) -> float:
        """The mean; NaN if nothing was seen, never 0.0: that would be the best loss ever."""
        weight = self.weight
        return math.fsum(self.total) / weight if weight else math.nan

    @property
    def weight(self) -> float:
        """Total weight seen: the number of rows or tokens behind the mean."""
        return math.fsum(self.weights)

    def state(self) -> list[float]:
        """Seven plain floats, for `gather_object` or, as a float64 tensor, for `all_gather`."""
        return [*self.total, *self.weights, float(self.excluded)]

    @classmethod
    def from_state(cls, state: Sequence[float] | Tensor) -> WeightedMean:
        """The inverse of `state`; merge the results of all ranks.

        Raises:
            InputError: these are not the seven numbers of one `state`, such as the flat result of an all-gather.
        """
        numbers = _numbers("state", state).flatten().tolist()
        _check_state(numbers)
        return cls(tuple(numbers[:_PARTS]), tuple(numbers[_PARTS:-1]), int(numbers[-1]))

    def _add(self, total: Iterable[float], weights: Iterable[float], excluded: int) -> None:
        self.total, self.weights = _exact_sum([*self.total, *total]), _exact_sum([*self.weights, *weights])
        self.excluded += excluded


def _numbers(name: str, numbers: Numbers) -> Tensor:
    """Any number, sequence or dense tensor as a float64 tensor on the CPU."""
    is_complex = "complex" in str(getattr(numbers, "dtype", ""))  # float64 would take the real part
    is_sparse = getattr(numbers, "layout", torch.strided) is not torch.strided  # has no place for each number
    try:
        if is_complex or is_sparse:
            raise TypeError
        if isinstance(numbers, Tensor):  # to the CPU first: not every device knows float64
            return numbers.detach().cpu().double()
        return torch.as_tensor(numbers, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        what = " ".join(reprlib.repr(numbers).split())  # a table's text has several lines
        raise InputError(f"WeightedMean: {name} is {what}; give a number, a list of numbers or a tensor") from None


def _check_shapes(values: Tensor, weights: Tensor) -> None:
    """[2, 3] and [3, 2] hold as many numbers, and yet the pairs would be wrong. [2] and [2, 1] are no riddle."""
    if values.squeeze().shape != weights.squeeze().shape:
        raise InputError(
            f"{values.numel()} values but {weights.numel()} weights, in shapes {list(values.shape)} and "
            f"{list(weights.shape)}: give one weight, or one for each value in the same shape"
        )


def _check_state(numbers: list[float]) -> None:
    if len(numbers) != _STATE:
        raise InputError(
            f"from_state: got {len(numbers)} numbers, a state has {_STATE}; give what state() returned on one rank, "
            f"for a flat all-gather each row of gathered.view(-1, {_STATE})"
        )
    weight, excluded = numbers[_PARTS], numbers[-1]  # the first part of a sum has its sign
    if not all(map(math.isfinite, numbers)) or weight < 0 or excluded < 0 or excluded % 1:
        raise InputError(f"from_state: {numbers} is no state; give what state() returned, unchanged and in its order")


def _check_weights(weights: list[float]) -> None:
    for i, weight in enumerate(weights):
        if not 0 <= weight < math.inf:
            raise InputError(f"weight {i} is {weight}: weights must be finite and not negative")
