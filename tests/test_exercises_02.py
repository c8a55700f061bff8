"""The checks of lesson 02 accept the right answers and refuse the wrong ones that people write."""

from __future__ import annotations

import re

import pytest
import torch

from nanlab.course import exercises


def parts(rewards, correction=0):
    deviation = rewards - rewards.mean(1, keepdim=True)
    std = (deviation.pow(2).sum(1, keepdim=True) / max(rewards.shape[1] - correction, 1)).sqrt()
    return deviation, std


def relative_limit(rewards, correction=0):
    deviation, std = parts(rewards.double(), correction)
    flat = std <= 1e-6 * rewards.double().abs().amax(1, keepdim=True)
    return torch.where(flat, 0.0, deviation / torch.where(flat, 1.0, std)).float()


def unbiased(rewards):
    return relative_limit(rewards, correction=1)


def range_limit(rewards):
    high, low = rewards.amax(1, keepdim=True), rewards.amin(1, keepdim=True)
    deviation, std = parts(rewards)
    flat = (high - low) <= 1e-6 * high.abs()
    return torch.where(flat, 0.0, deviation / std.clamp(min=1e-30))


def eps_added(rewards):
    deviation, std = parts(rewards)
    return deviation / (std + 1e-8)


def eps_inside(rewards):
    deviation, std = parts(rewards)
    return deviation / (std**2 + 1e-8).sqrt()


def eps_of_trl(rewards):
    deviation, std = parts(rewards)
    return deviation / (std + 1e-4)


def cleaned(rewards):
    deviation, std = parts(rewards)
    return (deviation / std).nan_to_num(0.0, 0.0, 0.0)


def std_equals_zero(rewards):
    deviation, std = parts(rewards)
    return torch.where(std == 0, 0.0, deviation / std)


def all_equal(rewards):
    flat = (rewards == rewards[:, :1]).all(1, keepdim=True)
    deviation, std = parts(rewards)
    return torch.where(flat, 0.0, deviation / std)


def tiny_limit(rewards):
    deviation, std = parts(rewards)
    return torch.where(std < 1e-6, 0.0, deviation / std)


def large_limit(rewards):
    deviation, std = parts(rewards)
    return torch.where(std < 1e-3, 0.0, deviation / std)


def limit_of_a_share(rewards):
    deviation, std = parts(rewards)
    return torch.where(std <= 0.01 * rewards.abs().amax(1, keepdim=True), 0.0, deviation / std)


def limit_without_abs(rewards):
    deviation, std = parts(rewards)
    return torch.where(std <= 1e-5 * rewards.amax(1, keepdim=True), 0.0, deviation / std)


def one_decision(of_all):
    """Flat or not is asked of the whole tensor, by a function that joins the answers of the groups."""

    def answer(rewards):
        deviation, std = parts(rewards.double())
        flat = of_all(std <= 1e-6 * rewards.double().abs().amax(1, keepdim=True))
        return torch.zeros_like(rewards) if flat else (deviation / std).float()

    return answer


def limit_of_the_whole_tensor(rewards):
    deviation, std = parts(rewards.double())
    flat = std <= 1e-6 * rewards.double().abs().max()
    return torch.where(flat, 0.0, deviation / torch.where(flat, 1.0, std)).float()


def lost_where_honest(rewards):
    flat = relative_limit(rewards) == 0
    return torch.where(flat.all(1, keepdim=True), 0.0, torch.nan).expand_as(rewards)


def not_divided(rewards):
    return rewards - rewards.mean(1, keepdim=True)


def whole_batch(rewards):
    return relative_limit(rewards.reshape(1, -1)).view_as(rewards)


@pytest.mark.parametrize("answer", [relative_limit, unbiased, range_limit])
def test_right_advantages_pass(answer, capsys):
    assert exercises.check_02_standardise(answer)
    assert re.match(r"Right\. [A-Z]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (eps_added, "exactly 0 for each, got [-0.427, -0.427, -0.427]."),
        (eps_inside, "exactly 0"),
        (eps_of_trl, "exactly 0"),
        (cleaned, "seven rewards of 0.1"),
        (std_equals_zero, "seven rewards of 0.1"),
        (all_equal, "one rounding step apart"),
        (tiny_limit, "seven rewards of 1000.7"),
        (large_limit, "the honest group [1.0, 1.001"),
        (lost_where_honest, "the honest group [0.0, 0.5, 1.0, 0.1]"),
        (not_divided, "exactly 0"),
        (whole_batch, "honest group"),
        (limit_of_a_share, "the honest group [0.7, 0.71, 0.7, 0.7]"),
        (limit_without_abs, "seven rewards of −0.1"),
        (one_decision(torch.all), "flat and honest groups together: the flat group [0.1, 0.1, 0.1, 0.1]"),
        (one_decision(torch.any), "flat and honest groups together: the honest group [0.0, 5e-07, 1e-06, 1e-07]"),
        (limit_of_the_whole_tensor, "flat and honest groups together: the honest group [0.0, 5e-07, 1e-06, 1e-07]"),
        (lambda rewards: None, "expected a tensor"),
        (lambda rewards: rewards / 0, "exactly 0"),
    ],
)
def test_wrong_advantages_fail_with_a_hint(answer, hint, capsys):
    assert not exercises.check_02_standardise(answer)
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out
    assert len(out.splitlines()) == 1


def where_nobody(per_function, weights):
    return torch.where(per_function.isnan().all(1), torch.nan, (per_function * weights).nansum(1))


def by_loop(per_function, weights):
    totals = []
    for row in per_function:
        seen = ~row.isnan()
        totals.append((row[seen] * weights[seen]).sum() if seen.any() else torch.tensor(torch.nan))
    return torch.stack(totals)


@pytest.mark.parametrize("answer", [where_nobody, by_loop])
def test_right_totals_pass(answer, capsys):
    assert exercises.check_02_total_reward(answer)
    assert re.match(r"Right\. [A-Z]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda p, w: (p * w).nansum(1), "real, bad score"),
        (lambda p, w: (p * w).sum(1), "one function has no opinion"),
        (lambda p, w: (p * w).nanmean(1), "all three"),
        (lambda p, w: torch.where(p.nansum(1) == 0, torch.nan, (p * w).nansum(1)), "honest zeros"),
        (lambda p, w: (p.nan_to_num() * w).sum(1), "nobody scored"),
        (lambda p, w: p.nansum(1), "all three"),
        (lambda p, w: (p * w).nansum(), "one number for each"),
        (lambda p, w: p @ w.half(), "raised"),
    ],
)
def test_wrong_totals_fail_with_a_hint(answer, hint, capsys):
    assert not exercises.check_02_total_reward(answer)
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out
    assert len(out.splitlines()) == 1
