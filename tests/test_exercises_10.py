"""The checks of the case study on TPO: the right answer passes, answers that people write do not."""

from __future__ import annotations

import math

import pytest

from nanlab.course import exercises

# --- nan_batches: which batches have no completion token --------------------------------------------------------------


def batches_of(lengths, size):
    return [lengths[start : start + size] for start in range(0, len(lengths), size)]


def nan_batches(lengths, max_length, size):
    return [i for i, batch in enumerate(batches_of(lengths, size)) if min(batch) >= max_length]


def one_row_is_enough(lengths, max_length, size):
    return [i for i, batch in enumerate(batches_of(lengths, size)) if max(batch) >= max_length]


def longer_than(lengths, max_length, size):
    return [i for i, batch in enumerate(batches_of(lengths, size)) if min(batch) > max_length]


def by_the_mean(lengths, max_length, size):
    return [i for i, batch in enumerate(batches_of(lengths, size)) if sum(batch) / len(batch) >= max_length]


def forgets_the_last_batch(lengths, max_length, size):
    whole = len(lengths) // size * size
    return nan_batches(lengths[:whole], max_length, size)


def names_rows(lengths, max_length, size):
    return [i for i, length in enumerate(lengths) if length >= max_length]


def last_row_decides(lengths, max_length, size):  # each row writes over the verdict of the one before
    return [i for i, batch in enumerate(batches_of(lengths, size)) if batch[-1] >= max_length]


def counts_from_one(lengths, max_length, size):
    return [i + 1 for i in nan_batches(lengths, max_length, size)]


def one_line(capsys) -> str:
    (line,) = capsys.readouterr().out.splitlines()
    return line


def test_nan_batches_right(capsys):
    assert exercises.check_10_nan_batches(nan_batches)
    assert one_line(capsys).startswith("Right.")


@pytest.mark.parametrize(
    "wrong",
    [
        one_row_is_enough, longer_than, by_the_mean, forgets_the_last_batch, names_rows, last_row_decides,
        counts_from_one, lambda *a: [], lambda lengths, max_length, size: nan_batches(lengths, 64, size),
    ],
)  # fmt: skip
def test_nan_batches_wrong(wrong, capsys):
    assert not exercises.check_10_nan_batches(wrong)
    assert one_line(capsys).startswith("Not yet: ")


# --- is_right: a test that bites --------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
CASES = {
    "failures": ([(0.8, 10), (0.0, 0), (NAN, 5), (INF, 5), (-INF, 5), (0.9, 30)], 0.875),
    "honest zero": ([(0.0, 10), (0.8, 30)], 0.6),
    "nothing": ([(NAN, 0), (INF, 3)], NAN),
}


def a_test_on(*names, cases=CASES):
    def is_right(average):
        for batches, expected in (cases[name] for name in names):
            value = average(list(batches))
            if not (abs(value - expected) < 1e-9 or (math.isnan(value) and math.isnan(expected))):
                return False
        return True

    return is_right


def test_is_right_right(capsys):
    assert exercises.check_10_is_right(a_test_on(*CASES))
    assert one_line(capsys).startswith("Right.")


@pytest.mark.parametrize("left_out", CASES)
def test_is_right_needs_every_case(left_out, capsys):
    assert not exercises.check_10_is_right(a_test_on(*(name for name in CASES if name != left_out)))
    assert "a wrong function passes" in one_line(capsys)


def test_is_right_catches_the_notebook_s_own_zero_for_empty(capsys):
    """Lesson 10 averages batches of equal weight, 0.0 for an empty one. Nothing else wrong gets past this test."""
    strict = a_test_on(*CASES)

    def blind(average):
        fooled = average([(0.8, 10), (0.9, 10), (NAN, 0)]) == pytest.approx(1.7 / 3)
        return strict(average) or (fooled and math.isnan(average([(0.8, 10), (NAN, 5)])))

    assert not exercises.check_10_is_right(blind)
    assert "0.0 for an empty batch" in one_line(capsys)


def test_is_right_needs_batches_that_all_failed(capsys):
    no_batch = {"nothing": ([], NAN)}
    assert not exercises.check_10_is_right(a_test_on(*CASES, cases=CASES | no_batch))
    assert "0.0 where every batch failed" in one_line(capsys)


def test_is_right_needs_a_minus_inf(capsys):
    without = {"failures": ([(0.8, 10), (0.0, 0), (NAN, 5), (INF, 5), (0.9, 30)], 0.875)}
    assert not exercises.check_10_is_right(a_test_on(*CASES, cases=CASES | without))
    assert "one that lets −inf through" in one_line(capsys)


@pytest.mark.parametrize(
    "weak",
    [
        lambda average: math.isfinite(average([(0.8, 10), (NAN, 0), (0.9, 10)])),  # the article's
        lambda average: average([(0.8, 10), (NAN, 0), (0.9, 10)]) == pytest.approx(0.85),  # equal weights
        lambda average: True,
        lambda average: False,
        lambda average: average([(NAN, 5)]) == NAN,  # never true
        lambda average: average([(0.8, 10), (0.9, 30)]) == 0.85,  # the mean of batch means taken for the truth
    ],
)
def test_is_right_weak(weak, capsys):
    assert not exercises.check_10_is_right(weak)
    assert one_line(capsys).startswith("Not yet: ")
