"""The checks of lesson 04 accept the right answers and refuse the wrong ones that people write."""

from __future__ import annotations

import re

import pytest
import torch

from nanlab.course import exercises


def log1mexp_right(x):
    near = x > -0.693
    close, far = torch.where(near, x, -1.0), torch.where(near, -1.0, x)
    return torch.where(near, (-close.expm1()).log(), (-far.exp()).log1p())


def log1mexp_clamped(x):  # another right way: every branch is clamped to where it is good
    close, far = x.clamp(min=-0.693), x.clamp(max=-0.693)
    return torch.where(x > -0.693, (-close.expm1()).log(), (-far.exp()).log1p())


def log1mexp_where_after(x):
    return torch.where(x > -0.693, (-x.expm1()).log(), (-x.exp()).log1p())


def log1mexp_split_at(threshold, x):
    small = x > threshold
    by_expm1 = (-torch.where(small, x, -0.5).expm1()).log()
    return torch.where(small, by_expm1, (-torch.where(small, -1.0, x).exp()).log1p())


@pytest.mark.parametrize("answer", [log1mexp_right, log1mexp_clamped, lambda x: log1mexp_right(x.double()).float()])
def test_a_right_log1mexp_passes(answer, capsys):
    assert exercises.check_04_log1mexp(answer)
    assert re.match(r"Right\. [A-Z]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda x: (1 - x.exp()).log(), "value"),
        (lambda x: (1 - x.exp() + 1e-8).log(), "value"),
        (lambda x: (-x.exp()).log1p(), "value"),
        (lambda x: (-x.expm1()).log(), "value"),
        (lambda x: log1mexp_split_at(-10.0, x), "at x = -9.7"),
        (lambda x: log1mexp_split_at(-15.0, x), "at x = -13"),
        (lambda x: log1mexp_split_at(-19.0, x), "at x = -16.5"),
        (log1mexp_where_after, "gradient is nan"),
        (lambda x: log1mexp_right(x.clamp(max=-1e-30)), "at x = 0:"),
        (lambda x: log1mexp_right(x).clamp(min=-60), "at x = 0:"),
        (lambda x: log1mexp_where_after(x).nan_to_num(), "gradient is nan"),
        (lambda x: log1mexp_right(x.detach()), "cut off from its input"),
        (lambda x: log1mexp_right(x).sum(), "shape"),
    ],
)
def test_a_wrong_log1mexp_is_told_where(answer, hint, capsys):
    assert not exercises.check_04_log1mexp(answer)
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out


def entropy_right(logits):
    log_p = logits.log_softmax(-1).masked_fill(logits.isneginf(), 0.0)
    return -(logits.softmax(-1) * log_p).sum(-1)


def entropy_of_the_finite(logits):  # another right way: a large negative number in place of −inf
    log_p = logits.clamp(min=-1e4).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("answer", [entropy_right, entropy_of_the_finite])
def test_a_right_entropy_passes(answer, capsys):
    assert exercises.check_04_entropy(answer)
    assert re.match(r"Right\. [A-Z]", capsys.readouterr().out)


def entropy_by_hand(logits):
    log_p = logits.clamp(min=-1e4) - logits.exp().sum(-1, keepdim=True).log()  # no shift: exp(1000) is inf
    return -(log_p.exp() * log_p).sum(-1)


def entropy_with_eps(logits):  # the eps is small beside p = 0.1, and not beside 1 / 150,000
    p = logits.softmax(-1)
    return -(p * (p + 1e-8).log()).sum(-1)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda x: -(x.softmax(-1) * x.softmax(-1).log()).sum(-1), "a forbidden token"),
        (lambda x: -(x.softmax(-1) * x.log_softmax(-1)).nansum(-1), "gradient"),
        (lambda x: -(x.softmax(-1) * x.log_softmax(-1)).nan_to_num().sum(-1), "gradient"),
        (lambda x: torch.special.entr(x.softmax(-1)).sum(-1), "gradient"),
        (lambda x: entropy_right(x.nan_to_num(neginf=0.0)), "a forbidden token"),
        (lambda x: -entropy_right(x), "ordinary logits"),
        (lambda x: entropy_right(x).mean(), "has the shape [], and should have [2]"),
        (lambda x: entropy_right(x)[:, None], "has the shape [2, 1], and should have [2]"),
        (lambda x: entropy_right(x)[:1].repeat(2), "[0.0, 0.0, 1.0, 1.0]: the value is [0.878281], and"),
        (entropy_by_hand, "logits of 1000"),
        (lambda x: entropy_right(x) / torch.tensor(2.0).log(), "ordinary logits"),  # in bits
        (entropy_with_eps, "150,000 tokens"),
    ],
)
def test_a_wrong_entropy_is_told_where(answer, hint, capsys):
    assert not exercises.check_04_entropy(answer)
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out


def test_the_message_shows_the_digits_that_are_wrong(capsys):
    assert not exercises.check_04_entropy(lambda x: entropy_right(x) + 3e-5)
    got, right = re.search(r"is \[(.+)\], and should be \[(.+)\]", capsys.readouterr().out).groups()
    assert got != right
