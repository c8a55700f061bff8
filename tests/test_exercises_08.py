"""The checks of lesson 08: the right answer passes, answers that people write do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nanlab.course import exercises
from nanlab.numerics import masked_mean


def cosine(a, b):
    ok = (a.pow(2).sum() > 0) & (b.pow(2).sum() > 0)
    a, b = torch.where(ok, a, 1.0), torch.where(ok, b, 1.0)
    return torch.where(ok, (a * b).sum() / (a.norm() * b.norm()), 0.0)


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
    "nan_to_num": {"kept_mean": lambda v, m: (v * m).nan_to_num(0.0).sum() / m.sum()},
    "mean over all": {"kept_mean": lambda v, m: torch.where(m > 0, v, 0.0).mean()},
}


def test_the_right_functions_pass(capsys):
    assert exercises.check_08_functions(RIGHT)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_functions_fail_with_a_sentence(wrong, capsys):
    assert not exercises.check_08_functions(RIGHT | wrong)
    assert next(iter(wrong)) in capsys.readouterr().out


def test_phases():
    right = {"log1p": "backward", "adam": "optimizer", "row": "data"}
    assert exercises.check_08_phases(right)
    for name in right:
        assert not exercises.check_08_phases(right | {name: "forward"})
    assert not exercises.check_08_phases({})
