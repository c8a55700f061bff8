"""The checks of lesson 01 accept the right answer and refuse the wrong ones that people write."""

from __future__ import annotations

import re

import pytest
import torch

from nanlab.course import exercises


def greedy_right(logits):
    usable = logits.amax(-1).isfinite()
    if not usable.all():
        raise ValueError(f"row {int((~usable).nonzero()[0])}: no most likely token")
    return logits.argmax(-1)


def greedy_plain(logits):
    return logits.argmax(-1)


def greedy_no_nan(logits):
    for i, row in enumerate(logits):
        if row.isnan().any():
            raise ValueError(f"row {i}")
    return logits.argmax(-1)


def greedy_all_finite(logits):
    for i, row in enumerate(logits):
        if not row.isfinite().all():
            raise ValueError(f"row {i}")
    return logits.argmax(-1)


def greedy_cleaned(logits):
    return logits.nan_to_num().argmax(-1)


def greedy_nameless(logits):
    if not logits.amax(-1).isfinite().all():
        raise ValueError("bad logits")
    return logits.argmax(-1)


def greedy_equals(logits):
    if (logits == float("nan")).any():
        raise ValueError("row 2")
    return logits.argmax(-1)


def greedy_last_row(logits):
    if not logits[-1].amax().isfinite():
        raise ValueError(f"row {len(logits) - 1}")
    return logits.argmax(-1)


def greedy_gives_up_on_a_dead_model(logits):
    bad = [i for i, row in enumerate(logits) if not row.amax().isfinite()]
    if bad:
        raise ValueError(f"row {bad[0]}" if len(bad) == 1 else "all rows are bad")
    return logits.argmax(-1)


def greedy_shows_the_numbers(logits):
    for row in logits:
        if not row.amax().isfinite():
            raise ValueError(f"bad logits: {logits}")
    return logits.argmax(-1)


def greedy_names_all(logits):
    bad = (~logits.amax(-1).isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"rows {bad}: no most likely token")
    return logits.argmax(-1)


def greedy_one_bad_row(logits):
    bad = (~logits.amax(-1).isfinite()).nonzero()
    if len(bad):
        raise ValueError(f"row {bad.item()}")  # fails where two rows are bad
    return logits.argmax(-1)


def greedy_silent_when_all_are_bad(logits):
    bad = (~logits.amax(-1).isfinite()).nonzero().flatten().tolist()
    if bad and len(bad) < len(logits):
        raise ValueError(f"row {bad[0]}")
    return logits.argmax(-1)


@pytest.mark.parametrize("answer", [greedy_right, greedy_names_all])
def test_the_right_greedy_passes(answer, capsys):
    assert exercises.check_01_greedy(answer)
    assert re.match(r"Right\. [A-Z]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (greedy_plain, "without a word"),
        (greedy_no_nan, "+inf"),
        (greedy_all_finite, "forbidden"),
        (greedy_cleaned, "without a word"),
        (greedy_nameless, "name the row"),
        (greedy_equals, "without a word"),
        (greedy_last_row, "without a word"),
        (greedy_shows_the_numbers, "name the row"),
        (greedy_gives_up_on_a_dead_model, "name one of the rows"),
        (greedy_one_bad_row, "a dead model"),
        (greedy_silent_when_all_are_bad, "a dead model"),
        (lambda logits: None, "forbidden"),
    ],
)
def test_a_wrong_greedy_is_told_why(answer, hint, capsys):
    assert not exercises.check_01_greedy(answer)
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out


def named(bad):
    return lambda model: [name for name, p in model.named_parameters() if bad(p.grad)]


def test_the_right_bad_gradients_passes(capsys):
    assert exercises.check_01_bad_gradients(named(lambda g: g is not None and not g.isfinite().all()))
    assert exercises.check_01_bad_gradients(named(lambda g: g is not None and (g.isnan() | g.isinf()).any()))
    assert capsys.readouterr().out.count("Right.") == 2


@pytest.mark.parametrize(
    ("bad", "hint"),
    [
        (lambda g: not g.isfinite().all(), "None"),  # crashes on a parameter without a gradient
        (lambda g: g is not None and g == float("nan"), "Compare nothing"),
        (lambda g: g is not None and (g == float("nan")).any(), "was not found"),
        (lambda g: g is not None and g.isnan().any(), "was not found"),
        (lambda g: g is not None and g.isinf().any(), "was not found"),
        (lambda g: g is not None and not g.sum().isfinite(), "was reported"),
        (lambda g: g is None or not g.isfinite().all(), "was reported"),
        (lambda g: g is not None and not torch.isfinite(g).any(), "was not found"),
        (lambda g: g is not None and (g.isnan() | (g == float("inf"))).any(), "-inf, 3.0] is bad and was not found"),
        (lambda g: g is not None and not g.amax().isfinite(), "-inf, 3.0] is bad and was not found"),
    ],
)
def test_wrong_bad_gradients_are_told_why(bad, hint, capsys):
    assert not exercises.check_01_bad_gradients(named(bad))
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out


def test_the_order_counts(capsys):
    right = named(lambda g: g is not None and not g.isfinite().all())
    assert not exercises.check_01_bad_gradients(lambda model: right(model)[::-1])
    assert "order" in capsys.readouterr().out
