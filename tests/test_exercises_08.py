"""The checks of lesson 08: the right answer passes, answers that people write do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nanlab import locate
from nanlab.course import exercises
from nanlab.numerics import masked_mean


def cosine_if(ok, a, b):
    a, b = torch.where(ok, a, 1.0), torch.where(ok, b, 1.0)
    return torch.where(ok, (a * b).sum() / (a.norm() * b.norm()), 0.0)


def cosine_in_fp32(a, b):  # the square of a small number is 0 in fp32
    return cosine_if((a != 0).any() & (b != 0).any(), a, b)


def cosine(a, b):
    return cosine_in_fp32(a.double(), b.double())


def cosine_by_the_largest(a, b):
    ok = (a != 0).any() & (b != 0).any()
    a, b = torch.where(ok, a, 1.0), torch.where(ok, b, 1.0)
    return torch.where(ok, F.cosine_similarity(a / a.abs().max().detach(), b / b.abs().max().detach(), dim=0), 0.0)


def cosine_that_hides_a_nan(a, b):  # NaN > 0 is False
    return cosine_if((a.pow(2).sum() > 0) & (b.pow(2).sum() > 0), a, b)


def cosine_masked_too_late(a, b):  # finite value, NaN gradient
    result = (a * b).sum() / (a.pow(2).sum().sqrt() * b.pow(2).sum().sqrt())
    return torch.where(result.isnan(), 0.0, result)


RIGHT = {
    "log_sigmoid": F.logsigmoid,
    "cosine": cosine,
    "kept_mean": lambda values, mask: masked_mean(values, mask),
}
WRONG = {
    "an eps inside the logarithm": {"log_sigmoid": lambda x: torch.log(torch.sigmoid(x) + 1e-8)},
    "clamped": {"log_sigmoid": lambda x: torch.log(torch.sigmoid(x).clamp(min=1e-30))},
    "where after the fact": {"cosine": cosine_masked_too_late},
    "clamped before": {"log_sigmoid": lambda x: F.logsigmoid(x.clamp(min=-500))},
    "only negative numbers": {"log_sigmoid": lambda x: x - torch.log1p(torch.exp(x))},  # e^200 overflows
    "a NaN becomes 0": {"log_sigmoid": lambda x: F.logsigmoid(x.nan_to_num(0.0))},
    "right for large numbers only": {"log_sigmoid": lambda x: torch.where(x < 0, x, F.logsigmoid(x))},
    "squares in fp32": {"cosine": cosine_in_fp32},
    "only a in float64": {"cosine": lambda a, b: cosine_in_fp32(a.double(), b)},
    "scaled by a constant": {"cosine": lambda a, b: cosine_in_fp32(a * 1e15, b * 1e15)},  # 1e30 overflows
    "b has no gradient": {"cosine": lambda a, b: cosine(a, b.detach())},
    "only a is guarded": {"cosine": lambda a, b: cosine_if((a != 0).any(), a, b)},
    "a NaN is hidden": {"cosine": cosine_that_hides_a_nan},
    "nan_to_num": {"kept_mean": lambda v, m: (v * m).nan_to_num(0.0).sum() / m.sum()},
    "every finite number": {"kept_mean": lambda v, m: torch.where(v.isinf(), 0.0, v).sum() / (~v.isinf()).sum()},
    "only -inf is left out": {"kept_mean": lambda v, m: (v.masked_fill(v == -torch.inf, 0.0) * m).sum() / m.sum()},
    "a counted -inf is clamped": {"kept_mean": lambda v, m: masked_mean(v.clamp(min=-1e4), m)},
    "0.0 for nothing": {"kept_mean": lambda v, m: torch.where(m > 0, v, 0.0).sum() / m.sum().clamp(min=1)},
    "mean over all": {"kept_mean": lambda v, m: torch.where(m > 0, v, 0.0).mean()},
}


@pytest.mark.parametrize("right", [{}, {"cosine": lambda a, b: cosine(a, b)[None]}, {"cosine": cosine_by_the_largest}])
def test_the_right_functions_pass(right, capsys):
    assert exercises.check_08_functions(RIGHT | right)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_functions_fail_with_a_sentence(wrong, capsys):
    assert not exercises.check_08_functions(RIGHT | wrong)
    assert next(iter(wrong)) in capsys.readouterr().out


BROKEN = {
    "cut off from its input": lambda x: torch.tensor(F.logsigmoid(x).tolist(), requires_grad=True),
    "has no gradient": lambda x: F.logsigmoid(x).detach(),
    "which is no tensor": lambda x: F.logsigmoid(x).tolist(),
    "raises ZeroDivisionError": lambda x: 1 / 0,
    "raises TypeError": None,
    "gives -200.3, the right value is [-200.0, -0.3133]": lambda x: F.logsigmoid(x).sum(),
    "log_sigmoid([-200.0, 1.0]) gives [-inf, -0.3133], the right value": lambda x: torch.log(torch.sigmoid(x)),
    "has the gradient [0.0, 0.2689], the right one is [1.0, 0.2689]": lambda x: F.logsigmoid(
        torch.where(x > 0, x, x.detach())
    ),
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_function_is_told_in_one_sentence_with_short_numbers(said, capsys):
    assert not exercises.check_08_functions(RIGHT | {"log_sigmoid": BROKEN[said]})
    out = capsys.readouterr().out
    assert said in out
    assert out.count("\n") == 1


def test_both_arguments_are_shown(capsys):
    assert not exercises.check_08_functions(RIGHT | WRONG["only a is guarded"])
    assert "cosine([3.0, 0.0], [0.0, 0.0]) gives nan, the right value is 0.0." in capsys.readouterr().out


def test_a_function_that_is_not_there_is_named(capsys):
    assert not exercises.check_08_functions({"cosine": cosine})
    assert "log_sigmoid is missing" in capsys.readouterr().out


def test_phases():
    right = {"log1p": "backward", "adam": "optimizer", "row": "data"}
    assert exercises.check_08_phases(right)
    for name in right:
        assert not exercises.check_08_phases(right | {name: "forward"})
    assert not exercises.check_08_phases({})


def test_phases_are_words_however_they_are_written(capsys):
    assert exercises.check_08_phases({"log1p": "Backward", "adam": "optimizer ", "row": "DATA"})
    assert not exercises.check_08_phases({"log1p": "gradient", "adam": "optimizer", "row": "data"})
    assert "log1p: 'gradient' is none of forward, backward, optimizer, data." in capsys.readouterr().out


def test_the_phase_of_log1p_is_that_of_the_first_bad_number_that_reached_anything(capsys):
    assert not exercises.check_08_phases({"log1p": "forward"})
    said = capsys.readouterr().out
    assert "log1p(−1) is −inf in forward" in said
    assert "its gradient" in said

    log_prob = torch.zeros(1, requires_grad=True)  # a token of probability 1
    log_odds = log_prob - torch.log1p(-log_prob.exp())
    assert log_odds.item() == torch.inf
    loss = -F.logsigmoid(log_odds).mean()
    assert loss.isfinite()
    assert not torch.autograd.grad(loss, log_prob)[0].isfinite()
    step = lambda: (-F.logsigmoid(log_prob - torch.log1p(-log_prob.exp())).mean()).backward()
    assert locate(step, weight=log_prob).phase == "backward"
