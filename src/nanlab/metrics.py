"""WeightedMean: a mean that does not depend on how its numbers were batched, ordered or spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanlab.errors import InputError

Numbers = float | Sequence[float] | Tensor
_PARTS = 3


def _exact_sum(numbers: Iterable[float]) -> tuple[float, ...]:
    """The sum as three floats: its rounding, the rounding of what is left, and again. Keeps over 150 bits.

    One float would lose the small terms, and which ones it lost would depend on the order.
    """
    numbers = list(numbers)
    for _ in range(_PARTS):
        numbers.append(-math.fsum(numbers))
    return tuple(-part for part in numbers[-_PARTS:])


@dataclass
class WeightedMean:
    """Sum of value · weight over sum of weight, with both sums kept exact (`math.fsum`).

    The result does not change with the order of the updates, the batch size, or the order of merges. A value is a row
    with weight 1, or a mean over tokens with their number as weight.

    `excluded` is the number of entries left out: those whose value is NaN or inf and those whose weight is 0.
    """

    total: tuple[float, ...] = (0.0,) * _PARTS  # Σ value · weight
    weights: tuple[float, ...] = (0.0,) * _PARTS  # Σ weight
    excluded: int = 0

    def update(self, value: Numbers, weight: Numbers = 1.0) -> None:
        """Take in one value or a vector of them, with a weight each or one for all.

        Raises:
            InputError: a weight is negative, NaN or inf, or there are not as many weights as values. Nothing is
                taken in then.
        """
        values, weights = _numbers(value), _numbers(weight)
        if len(weights) == 1:
            weights *= len(values)
        _check(values, weights)
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
        """The inverse of `state`; merge the results of all ranks."""
        numbers = _numbers(state)
        return cls(tuple(numbers[:_PARTS]), tuple(numbers[_PARTS:-1]), int(numbers[-1]))

    def _add(self, total: Iterable[float], weights: Iterable[float], excluded: int) -> None:
        self.total, self.weights = _exact_sum([*self.total, *total]), _exact_sum([*self.weights, *weights])
        self.excluded += excluded


def _numbers(numbers: Numbers) -> list[float]:
    """Any number, sequence or tensor as a flat list of Python floats."""
    if isinstance(numbers, Tensor):  # to the CPU first: not every device knows float64
        return numbers.detach().cpu().double().flatten().tolist()
    return torch.as_tensor(numbers, dtype=torch.float64).flatten().tolist()


def _check(values: list[float], weights: list[float]) -> None:
    if len(values) != len(weights):
        raise InputError(f"{len(values)} values but {len(weights)} weights: give one weight, or one for each value")
    for i, weight in enumerate(weights):
        if not 0 <= weight < math.inf:
            raise InputError(f"weight {i} is {weight}: weights must be finite and not negative")
