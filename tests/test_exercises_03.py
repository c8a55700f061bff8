"""The checks of lesson 03 accept the right answers and refuse the wrong ones that people write."""

from __future__ import annotations

import math
import re

import pytest
import torch

from nanlab.course import exercises
from nanlab.metrics import WeightedMean
from nanlab.numerics import masked_mean


def selected(per_token, mask):
    return per_token[mask.bool()].mean()


def two_steps(per_token, mask):
    mean = torch.where(mask.bool(), per_token, 0.0).sum() / mask.sum().clamp(min=1)
    return mean if mask.any() else mean + torch.nan


def multiplied(per_token, mask):
    return (per_token * mask).sum() / mask.sum()


def clamped(per_token, mask):
    return (per_token * mask).sum() / mask.sum().clamp(min=1)


def clamped_by_eps(per_token, mask):
    return torch.where(mask.bool(), per_token, 0.0).sum() / mask.sum().clamp(min=1e-8)


def added_eps(per_token, mask):
    return torch.where(mask.bool(), per_token, 0.0).sum() / (mask.sum() + 0.1)


def cut_off(per_token, mask):
    if not mask.any():
        return torch.tensor(0.0, requires_grad=True)
    return per_token[mask.bool()].mean()


def no_graph(per_token, mask):
    return per_token[mask.bool()].mean() if mask.any() else torch.tensor(math.nan)


def by_rows(per_token, mask):
    kept = torch.where(mask.bool(), per_token, 0.0)
    return (kept.sum(1) / mask.sum(1)).mean()


def nanmean(per_token, mask):
    kept = per_token[mask.bool()]
    return kept.nanmean() if len(kept) else kept.mean()


def of_finite_tokens(per_token, mask):
    return per_token[mask.bool() & per_token.isfinite()].mean()


def cleaned(per_token, mask):
    return per_token[mask.bool()].nan_to_num(0.0, 0.0).mean()


def no_inf(per_token, mask):
    return per_token[mask.bool() & ~per_token.isinf()].mean()


@pytest.mark.parametrize("answer", [selected, two_steps, masked_mean])
def test_right_losses_pass(answer, capsys):
    assert exercises.check_03_token_loss(answer)
    assert re.match(r"Right\. [A-Z]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (multiplied, "inf and NaN on masked tokens"),
        (lambda x, mask: multiplied(torch.where(mask.bool(), x, x.nan_to_num(0.0, 0.0)), mask), "without a token"),
        (clamped, "inf and NaN on masked tokens"),
        (clamped_by_eps, "the best loss there is"),
        (added_eps, "a usual batch"),
        (cut_off, "cut off from the model"),
        (no_graph, "cut off from the model"),
        (by_rows, "a usual batch"),
        (lambda x, mask: x.mean(), "a usual batch"),
        (nanmean, "a NaN on a token that counts"),
        (of_finite_tokens, "a NaN on a token that counts"),
        (cleaned, "a NaN on a token that counts"),
        (no_inf, "an inf on a token that counts"),
    ],
)
def test_wrong_losses_fail_with_a_hint(answer, hint, capsys):
    assert not exercises.check_03_token_loss(answer)
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out
    assert len(out.splitlines()) == 1


def by_tokens(batches):
    good = [(loss, n) for loss, n in batches if math.isfinite(loss) and n]
    seen = sum(n for _, n in good)
    mean = sum(loss * n for loss, n in good) / seen if seen else math.nan
    return mean, sum(n for loss, n in batches if not math.isfinite(loss))


def with_weighted_mean(batches):
    mean, left_out = WeightedMean(), 0
    for loss, n in batches:
        mean.update(loss, n)
        left_out += 0 if math.isfinite(loss) else n
    return mean.compute(), left_out


def of_batches(batches):
    finite = [loss for loss, n in batches if math.isfinite(loss) and n]
    return (sum(finite) / len(finite) if finite else math.nan), by_tokens(batches)[1]


def guarded(batches):
    guarded = [(loss if math.isfinite(loss) else 0.0, n) for loss, n in batches]
    return sum(loss * n for loss, n in guarded) / max(sum(n for _, n in guarded), 1), 0


def zero_for_nothing(batches):
    mean, left_out = by_tokens(batches)
    return (0.0 if math.isnan(mean) else mean), left_out


def zero_seen(batches):
    mean, left_out = by_tokens(batches)
    return (0.0 if batches and not any(n for _, n in batches) else mean), left_out


def silent(batches):
    return by_tokens(batches)[0], 0


def counts_batches(batches):
    return by_tokens(batches)[0], sum(not math.isfinite(loss) for loss, _ in batches)


def drops_zero(batches):
    return by_tokens([(loss, n) for loss, n in batches if loss])


def nan_only(batches):
    return by_tokens([(loss, n) for loss, n in batches if not math.isinf(loss)])


def keeps_minus_inf(batches):
    kept = [(loss, n) for loss, n in batches if loss == loss and loss != math.inf]
    total, left_out = sum(n for _, n in kept), sum(n for _, n in batches) - sum(n for _, n in kept)
    return (sum(loss * n for loss, n in kept) / total if total else math.nan), left_out


@pytest.mark.parametrize("answer", [by_tokens, with_weighted_mean])
def test_right_merges_pass(answer, capsys):
    assert exercises.check_03_merge(answer)
    assert re.match(r"Right\. [A-Z]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (of_batches, "unequal size, [(0.8, 10), (0.9, 30)]: the mean is 0.875, got 0.85."),
        (guarded, "loss NaN"),
        (zero_for_nothing, "crown a dead model"),
        (zero_seen, "only an empty batch that says 0.0, [(0.0, 0)]: the mean is nan, got 0."),
        (silent, "5 tokens were left out, got 0."),
        (counts_batches, "tokens were left out, got 1."),
        (drops_zero, "an honest loss of 0"),
        (nan_only, "7 tokens were left out"),
        (keeps_minus_inf, "loss −inf"),
        (lambda batches: by_tokens(batches)[0], "return a pair (loss, left_out)"),
        (lambda batches: None, "return a pair (loss, left_out)"),
        (lambda batches: (None, 0), "return a pair (loss, left_out)"),
        (lambda batches: (sum(x * n for x, n in batches) / sum(n for _, n in batches), 0), "an empty batch"),
    ],
)
def test_wrong_merges_fail_with_a_hint(answer, hint, capsys):
    assert not exercises.check_03_merge(answer)
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out
    assert len(out.splitlines()) == 1
