"""Arithmetic that stays right at the edges: under a mask, in an empty selection, in a group without spread.

One rule runs through all of it: what is masked is never *read*. Multiplying by a mask does not remove a number
(0 · NaN and 0 · inf are NaN), so every function here selects first and computes afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from nanlab.errors import InputError

# A group whose spread is at most this many machine epsilons of its largest reward is equal up to rounding.
_FLAT_EPSILONS = 4
# How many logits are upcast at one time. Small chunks stay in a CPU's cache; a GPU wants fewer, larger kernels.
_CHUNK_ON_CPU, _CHUNK_ELSEWHERE = 2**20, 2**22


def at_least_fp32(values: Tensor) -> Tensor:
    """`values` in fp32, or in fp64 where they came in fp64. Half types (and integers) are too coarse to add up in."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def masked_sum(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of the values where `mask` is true.

    Args:
        values: any shape and float type; half types are accumulated, and returned, in fp32.
        mask: bool or 0/1, the shape of `values`. What stands where it is false is never read: NaN and inf
            there add exactly 0, and their gradient is exactly 0.
        dim: dimension(s) to sum over; all by default.

    A sum over nothing is 0. The zero gradient ends at `values`. If the operation that *made* `values` has an
    infinite derivative there (`log` or `sqrt` at 0), its backward still computes 0 · inf = NaN: mask its input too.

    Raises:
        InputError: no tensors, or `mask` has another shape than `values`. (Broadcasting would hide a transposed mask.)
    """
    return _select(values, mask).sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean of the values where `mask` is true; arguments, types and errors as in `masked_sum`.

    The mean of an empty selection is NaN: nothing was seen, so there is no value, and 0.0 would be the best loss
    ever. Its gradient is 0, not NaN, so such a row cannot reach the weights. (`sum / 0` written by hand has a NaN
    gradient as soon as the sum depends on a parameter in any other way.) Drop and count empty rows beforehand.
    """
    total, count = _select(values, mask).sum(dim=dim), mask.bool().sum(dim=dim)
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def check_tensors(**given: object) -> None:
    """Raise `InputError` with the name of the first that is no tensor."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise InputError(f"{name} is a {type(value).__name__}: give a tensor")


def _select(values: Tensor, mask: Tensor) -> Tensor:
    check_tensors(values=values, mask=mask)
    if mask.shape != values.shape:
        raise InputError(f"mask has shape {list(mask.shape)}, values {list(values.shape)}: give both the same shape")
    return torch.where(mask.bool(), at_least_fp32(values), 0.0)


class Advantages(NamedTuple):
    """What `group_advantages` returns."""

    values: Tensor  # [N], fp32 (fp64 for fp64 rewards); exactly 0 where a row carries no signal
    missing: int  # rows left out because their reward is NaN
    flat: int  # rows that have a reward, but in a group without spread: one reward, or all equal up to rounding


def group_advantages(rewards: Tensor, group: Tensor) -> Advantages:
    """Rewards standardised within their group: (reward − mean) / std (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
        rewards: `[N]`, float. NaN means "no reward": the row is left out of its group's statistics, gets advantage
            0 and is counted in `missing`. TRL's GRPO does the same.
        group: `[N]`, int: rows with the same id form a group; ids need not be sorted or dense.

    The std is the unbiased one (n − 1), as in TRL's GRPO. The arithmetic is fp64, scaled by the group's largest
    |reward|, so that advantages(c · r + d) = advantages(r) for c > 0 whatever the units, up to the rounding of the
    rewards themselves, and unless d is so large that the spread drowns in it.

    A group whose std is at most a few machine epsilons of the *rewards' type*, relative to its largest |reward|,
    has no spread; its advantages are exactly 0. An eps added to the std cannot do this. It is absolute: rounding
    noise of 1e-8 comes out as an advantage of 0.4 with eps = 1e-8, and an honest spread of 1e-6 is crushed with
    eps = 1e-4; and 0 is never reached. Half types have large steps: keep rewards in fp32 or fp64.

    Raises:
        InputError: no tensors, shapes that differ, rewards that are not float, or an infinite one.
    """
    _check_rewards(rewards, group)
    reward, group = rewards.detach().cpu().double(), group.cpu()  # not every device knows fp64
    seen = ~reward.isnan()
    advantages, flat = torch.zeros_like(reward), torch.zeros_like(seen)
    index = torch.unique(group[seen], return_inverse=True)[1]
    floor = _FLAT_EPSILONS * torch.finfo(rewards.dtype).eps
    advantages[seen], flat[seen] = _standardise(reward[seen], index, floor)
    values = advantages.to(rewards.device, torch.promote_types(rewards.dtype, torch.float32))
    return Advantages(values, missing=int((~seen).sum()), flat=int(flat.sum()))


def _standardise(reward: Tensor, index: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """(reward − mean) / std within the groups 0, 1, … of `index`, and which rows belong to a group without spread."""
    zero = torch.zeros(len(reward), dtype=reward.dtype)  # there are at most as many groups as rows
    # In units of the group's largest |reward| equal rewards are all 1, and their mean is exactly 1. (The mean of
    # n times 0.1 need not be 0.1.) Nor can the squares overflow or vanish.
    scale = zero.scatter_reduce(0, index, reward.abs(), "amax")[index]
    scaled = reward / torch.where(scale > 0, scale, 1.0)
    count = zero.index_add(0, index, torch.ones_like(scaled))[index]
    deviation = scaled - zero.index_add(0, index, scaled)[index] / count
    std = (zero.index_add(0, index, deviation**2)[index] / (count - 1).clamp(min=1)).sqrt()
    flat = std <= floor
    return torch.where(flat, 0.0, deviation / torch.where(flat, 1.0, std)), flat


def _check_rewards(rewards: Tensor, group: Tensor) -> None:
    check_tensors(rewards=rewards, group=group)
    if rewards.ndim != 1 or group.shape != rewards.shape:
        raise InputError(
            f"rewards have shape {list(rewards.shape)}, group {list(group.shape)}: give two vectors of one length"
        )
    if not rewards.is_floating_point():
        raise InputError(f"rewards are {rewards.dtype}: convert them to float32")
    if rewards.isinf().any():
        row = int(rewards.isinf().nonzero()[0])
        raise InputError(f"rewards, row {row}: {rewards[row].item()}; use a finite reward, or NaN for a missing one")


def token_logps(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Log-probability of each label: log softmax(logits)[label].

    Args:
        logits: `[B, T, V]`, any float type; already shifted, so that `logits[b, t]` predicts `labels[b, t]`.
        labels: `[B, T]`, int32 or int64; anything, -100 too, where `mask` is false.
        mask: `[B, T]`, bool or 0/1.

    Returns:
        `[B, T]`, fp32 (fp64 for fp64 logits), exactly 0 where `mask` is false. There, neither logits nor labels are
        read, and the gradient of the logits is exactly 0, also if NaN or inf stands there. The same holds for a token
        that nothing depends on (incoming gradient 0). A NaN at a position that *is* used stays a NaN.

    Logits are upcast to fp32 a chunk of tokens at a time and the softmax is computed again in backward, so beyond
    the logits and their gradient (in the logits' type) only a chunk is alive. Not twice differentiable.

    Raises:
        InputError: shapes do not fit, labels are not int32 or int64, or a label that is used is outside the
            vocabulary.
    """
    check_tensors(logits=logits, labels=labels, mask=mask)
    if logits.ndim != 3 or labels.shape != logits.shape[:2] or mask.shape != labels.shape:
        raise InputError(
            f"logits {list(logits.shape)}, labels {list(labels.shape)}, mask {list(mask.shape)}: "
            "expected [B, T, V], [B, T] and [B, T]"
        )
    if labels.dtype not in (torch.int32, torch.int64):
        raise InputError(f"labels are {labels.dtype}: convert them to int64")
    mask = mask.bool()
    outside = mask & ((labels < 0) | (labels >= logits.shape[-1]))
    if outside.any():
        row, token = outside.nonzero()[0].tolist()
        raise InputError(
            f"labels, row {row}, token {token}: {int(labels[row, token])} is outside the vocabulary of "
            f"{logits.shape[-1]}; mask it, or use the tokenizer that belongs to the model"
        )
    return _TokenLogps.apply(logits, labels, mask)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels, mask)
        log_probs = torch.zeros_like(labels, dtype=torch.promote_types(logits.dtype, torch.float32))
        for part in _runs(mask, logits):
            log_softmax = logits[part].to(log_probs.dtype).log_softmax(dim=-1)
            log_probs[part] = log_softmax.gather(1, labels[part][:, None])[:, 0]
        return log_probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, mask = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        for part in _runs(mask & (grad != 0), logits):
            weight, label = grad[part][:, None], labels[part][:, None]
            # d log softmax(x)[label] / dx = onehot(label) − softmax(x)
            softmax = logits[part].to(grad.dtype).softmax(dim=-1)
            grad_logits[part] = softmax.mul_(-weight).scatter_add_(1, label, weight).to(logits.dtype)
        return grad_logits, None, None


def _runs(mask: Tensor, logits: Tensor) -> Iterator[tuple[int, slice]]:
    """(row, slice) of each run of true positions, cut to the size of a chunk.

    A completion is one run, and a slice, unlike an index, copies nothing. Reading the mask waits for the device once.
    """
    numbers = _CHUNK_ON_CPU if logits.device.type == "cpu" else _CHUNK_ELSEWHERE
    size = max(1, numbers // max(1, logits.shape[-1]))
    for row, flags in enumerate(mask.tolist()):
        stop = 0
        for used, run in groupby(flags):
            start, stop = stop, stop + len(list(run))
            if used:
                yield from ((row, slice(i, min(i + size, stop))) for i in range(start, stop, size))
