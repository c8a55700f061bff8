"""DPO, triple-preference and token-policy losses: pure functions of log-probs, one value a row, no reduction.

The caller weighs the rows. A mean taken here would fix the weights too early: the mean of batch means moves with the
batch size. Half types are computed in fp32. Nothing is clamped and no eps is added: a log-prob that is NaN on a row
that counts gives a NaN, and that is the truth. A row that shall not count is left out *before* its loss: afterwards its
gradient is 0 · NaN.
"""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanlab.errors import InputError
from nanlab.numerics import at_least_fp32, check_tensors


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimization, sigmoid form: −log σ(β · margin) (arXiv 2305.18290, eq. 7). Returns `[B]`.

    The margin is how much more the policy prefers chosen over rejected than the frozen reference model does.

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected: `[B]`, log-prob of the whole completion, in nats:
            the sum over its tokens. No gradient is stopped here; compute the reference under `torch.no_grad()`.
        beta: strength of the pull towards the reference model.
        label_smoothing: assumed share of pairs whose order is wrong (conservative DPO); 0 up to, not with, 0.5.

    Raises:
        InputError: no tensors, shapes that do not fit (broadcasting would pair each row with every other), a `beta`
            that is not finite, or `label_smoothing`.
    """
    _check_rows(
        policy_chosen=policy_chosen, policy_rejected=policy_rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected
    )
    _check_finite(beta=beta)
    margin = (at_least_fp32(policy_chosen) - at_least_fp32(policy_rejected)) - (
        at_least_fp32(ref_chosen) - at_least_fp32(ref_rejected)
    )
    return _preference_loss(beta * margin, label_smoothing)


def triple_preference_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    reference_nll: Tensor | float,
    beta: float = 0.01,
    alpha: float = 1.0,
    gamma: float = 0.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Triple preference optimization: −log σ(β · (chosen − rejected) − γ) + α · NLL of the gold answer. Returns `[B]`.

    Source: arXiv 2405.16681. "Reference" is a gold *answer*, not a model; the preference term has no reference model.

    Args:
        chosen_logps, rejected_logps: `[B]`, log-probs of the completions, in nats. Sums over tokens give TPO
            (`loss_type="sigmoid"` in TRL); means over tokens, with `gamma`, give TPO-L (`"tpo-l"`).
        reference_nll: negative log-likelihood of the gold answer, in nats per token: the token mean over the batch
            (a scalar, as TRL takes it; it is added to every row), or `[B]`.
        beta: scale of the margin; alpha: weight of the gold answer; gamma: margin asked for (TPO-L).
        label_smoothing: as in `dpo_loss`.

    To evaluate, average the two terms on their own (`alpha=0` gives the first): rows weigh one, gold answers their
    number of tokens.

    Raises:
        InputError: no tensors, shapes that do not fit, a factor that is not finite, or `label_smoothing`.
    """
    gold = {}
    if isinstance(reference_nll, Tensor):  # a plain float has the precision of the rows
        reference_nll = at_least_fp32(reference_nll)
        gold = {"reference_nll": reference_nll} if reference_nll.ndim else {}
    elif not isinstance(reference_nll, Real):
        raise InputError(f"reference_nll is a {type(reference_nll).__name__}: give a tensor or a number")
    _check_rows(chosen_logps=chosen_logps, rejected_logps=rejected_logps, **gold)
    _check_finite(beta=beta, alpha=alpha, gamma=gamma)
    margin = at_least_fp32(chosen_logps) - at_least_fp32(rejected_logps)
    preference = _preference_loss(beta * margin - gamma, label_smoothing)
    return preference + alpha * reference_nll if alpha else preference  # 0 · NaN is NaN: without weight, not read


def _check_finite(**factors: float) -> None:
    for name, factor in factors.items():
        number = isinstance(factor, Real | Tensor) and torch.as_tensor(factor).isfinite().all()
        if not number:
            raise InputError(f"{name}={factor!r}: give a finite number")


def _check_rows(**columns: Tensor) -> None:
    check_tensors(**columns)
    shapes = [column.shape for column in columns.values()]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        found = ", ".join(f"{name} {list(shape)}" for name, shape in zip(columns, shapes, strict=True))
        raise InputError(f"shapes are {found}: expected [B] for each, one number a row")


def _preference_loss(logits: Tensor, label_smoothing: float) -> Tensor:
    """−log σ(logits), and the flipped pair's by its share. logsigmoid is linear where log(sigmoid) would be −inf."""
    if not 0.0 <= label_smoothing < 0.5:
        raise InputError(f"label_smoothing={label_smoothing}: choose a value in [0, 0.5)")
    loss = -F.logsigmoid(logits)
    if label_smoothing == 0:  # the flipped term may be inf, and 0 · inf is NaN
        return loss
    return (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-logits)


class TokenSum(NamedTuple):
    """A row's sum over its tokens and their number, both `[B]`; the loss of a batch is sums.sum() / tokens.sum()."""

    sums: Tensor
    tokens: Tensor


def token_policy_loss(log_probs: Tensor, advantages: Tensor, completion_mask: Tensor) -> TokenSum:
    """Token-level policy optimization: −advantage · log-prob, summed over each row's completion tokens.

    This is the policy gradient of GRPO (arXiv 2402.03300) taken on-policy: with samples of the current policy the
    probability ratio is 1, so clipping does nothing, and there is no KL term. Tokens weigh alike over the batch, as in
    DAPO (arXiv 2503.14476); GRPO divides each row by its own length first. Advantages come from
    `nanlab.numerics.group_advantages`. It shares only three letters with triple preference optimization.

    Args:
        log_probs: `[B, T]`, log-prob of each token, in nats (`nanlab.numerics.token_logps`).
        advantages: `[B]`, one a completion, or `[B, T]`. No gradient goes through them.
        completion_mask: `[B, T]`, bool or 0/1. Where it is false nothing is read: −inf and NaN there add exactly 0.

    A token with advantage 0 and log-prob −inf adds 0 as well, as in `torch.xlogy`: no signal, no loss, no gradient.
    NaN on a valid token stays NaN. Rows without a token have sum 0 and count 0.

    Raises:
        InputError: no tensors, or shapes that do not fit.
    """
    check_tensors(log_probs=log_probs, advantages=advantages, completion_mask=completion_mask)
    fits = log_probs.ndim == 2 and completion_mask.shape == log_probs.shape
    if not fits or advantages.shape not in (log_probs.shape[:1], log_probs.shape):
        raise InputError(
            f"log_probs have shape {list(log_probs.shape)}, advantages {list(advantages.shape)}, completion_mask "
            f"{list(completion_mask.shape)}: expected [B, T], [B] or [B, T], and [B, T]"
        )
    per_token = advantages if advantages.ndim == 2 else advantages[:, None]
    per_token = at_least_fp32(per_token.detach()).expand_as(log_probs)
    mask = completion_mask.bool()
    read = mask & ~((per_token == 0) & log_probs.isinf())
    sums = (torch.where(read, -per_token, 0.0) * torch.where(read, at_least_fp32(log_probs), 0.0)).sum(dim=1)
    return TokenSum(sums, tokens=mask.sum(dim=1))
