"""The checks of lesson 05 accept the right answer and refuse the wrong ones that people write."""

from __future__ import annotations

import pytest
import torch

from nanlab.course import exercises

# --- collate: labels by position --------------------------------------------------------------------------------------


def padded(rows, pad):
    width = max(map(len, rows))
    return torch.tensor([row + [pad] * (width - len(row)) for row in rows])


def by_length(rows):
    lengths = torch.tensor([len(row) for row in rows])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def batch_of(ids, keep, counted=None):
    counted = keep if counted is None else counted
    return {"input_ids": ids, "attention_mask": keep.long(), "labels": ids.masked_fill(~counted, -100)}


def collate_right(rows, pad_id):
    return batch_of(padded(rows, pad_id), by_length(rows))


def collate_lists(rows, pad_id):
    width = max(map(len, rows))
    fill = lambda bodies, value: torch.tensor([body + [value] * (width - len(body)) for body in bodies])
    ones = [[1] * len(row) for row in rows]
    return {"input_ids": fill(rows, pad_id), "attention_mask": fill(ones, 0), "labels": fill(rows, -100)}


def collate_as_floats(*names):  # torch.zeros, torch.full_like and the like, without a dtype
    def collate(rows, pad_id):
        batch = collate_right(rows, pad_id)
        return {name: value.float() if name in names else value for name, value in batch.items()}

    return collate


def collate_by_id(rows, pad_id):
    ids = padded(rows, pad_id)
    return batch_of(ids, ids != pad_id)


def collate_labels_by_id(rows, pad_id):
    ids = padded(rows, pad_id)
    return batch_of(ids, by_length(rows), ids != pad_id)


def collate_last_eos_back(rows, pad_id):  # repairs the final eos, and loses the ones inside
    ids, keep = padded(rows, pad_id), by_length(rows)
    counted = ids != pad_id
    for i, row in enumerate(rows):
        counted[i, len(row) - 1] = True
    return batch_of(ids, keep, counted)


def collate_padding_learned(rows, pad_id):
    ids, keep = padded(rows, pad_id), by_length(rows)
    return batch_of(ids, keep, torch.ones_like(keep))


def collate_left(rows, pad_id):
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows])
    return batch_of(ids, by_length(rows).flip(1))


def collate_first_padding_counts(rows, pad_id):  # "count one eos": right only where pad = eos
    ids, keep = padded(rows, pad_id), by_length(rows)
    counted = keep.clone()
    counted[:, 1:] |= keep[:, :-1]
    return batch_of(ids, keep, counted)


@pytest.mark.parametrize("answer", [collate_right, collate_lists, collate_as_floats("attention_mask")])
def test_a_right_collate_passes(answer, capsys):
    assert exercises.check_05_collate(answer)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (collate_by_id, "attention_mask"),
        (collate_labels_by_id, "pad = eos: labels"),
        (collate_last_eos_back, "pad = eos: labels"),
        (collate_padding_learned, "a pad token of its own: labels"),
        (collate_left, "input_ids"),
        (collate_first_padding_counts, "labels"),
        (collate_as_floats("input_ids"), "input_ids holds floats"),
        (collate_as_floats("labels"), "labels holds floats"),
        (lambda rows, pad_id: {"input_ids": padded(rows, pad_id)}, "attention_mask is missing"),
        (lambda rows, pad_id: batch_of(padded(rows[:2], pad_id), by_length(rows[:2])), "3 rows, but input_ids"),
        (lambda rows, pad_id: None, "it gives back None"),
        (lambda rows, pad_id: {name: x[0] for name, x in collate_right(rows, pad_id).items()}, "has the shape [5]"),
        (lambda rows, pad_id: {name: x.tolist() for name, x in collate_right(rows, pad_id).items()}, "be a tensor"),
    ],
)
def test_a_wrong_collate_is_told_why(answer, hint, capsys):
    assert not exercises.check_05_collate(answer)
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out


# --- causal_mask: no query sees nothing -------------------------------------------------------------------------------


def causal(keep):
    width = keep.shape[1]
    return torch.ones(width, width, dtype=torch.bool).tril() & keep[:, None, :].bool()


def additive(allowed, dtype, low):
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, low)


def mask_with_diagonal(keep, dtype):
    return additive(causal(keep) | torch.eye(keep.shape[1], dtype=torch.bool), dtype, -float("inf"))


def mask_with_diagonal_and_lowest_number(keep, dtype):
    return additive(causal(keep) | torch.eye(keep.shape[1], dtype=torch.bool), dtype, torch.finfo(dtype).min)


def mask_with_lowest_number(keep, dtype):  # in fp16 a score of -16 or less takes it to -inf
    return additive(causal(keep), dtype, torch.finfo(dtype).min)


def mask_with_half_the_lowest_number(keep, dtype):
    return additive(causal(keep), dtype, torch.finfo(dtype).min / 2)


def mask_padding_sees_all(keep, dtype):
    return additive(causal(keep) | ~keep.bool()[:, :, None], dtype, -float("inf"))


def mask_plain(keep, dtype):
    return additive(causal(keep), dtype, -float("inf"))


def mask_cast(keep, dtype):
    return additive(causal(keep), torch.float32, -1e9).to(dtype)


def mask_first_key_open(keep, dtype):
    allowed = causal(keep)
    allowed[:, :, 0] = True
    return additive(allowed, dtype, -float("inf"))


def mask_without_causality(keep, dtype):
    return additive(keep.bool()[:, None, :].expand(-1, keep.shape[1], -1), dtype, torch.finfo(dtype).min)


def mask_without_padding(keep, dtype):
    return additive(causal(torch.ones_like(keep)), dtype, torch.finfo(dtype).min)


def mask_of(low):
    return lambda keep, dtype: additive(causal(keep), dtype, low)


def mask_not_zero(keep, dtype):  # a softmax does not see what is added everywhere
    return mask_with_diagonal(keep, dtype) + 5.0


@pytest.mark.parametrize(
    "answer",
    [
        mask_with_diagonal,
        mask_with_diagonal_and_lowest_number,
        mask_with_half_the_lowest_number,
        mask_padding_sees_all,
        mask_of(-1e4),
        mask_of(-3e4),
    ],
)
def test_a_right_mask_passes(answer, capsys):
    assert exercises.check_05_causal_mask(answer)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (mask_plain, "float32: with keep [0, 0, 1, 1, 1] query 0 gives NaN"),
        (mask_cast, "float16: with keep [0, 0, 1, 1, 1] query 0 gives NaN"),
        (mask_with_lowest_number, "float16: with keep [0, 0, 1, 1, 1] query 0 gives NaN"),
        (mask_with_lowest_number, "its scores are -32."),
        (mask_first_key_open, "should not see key 0"),
        (mask_without_causality, "should not see"),
        (mask_without_padding, "should not see"),
        (mask_of(-10.0), "should not see"),
        (mask_of(-30.0), "should not see"),
        (mask_of(-100.0), "should not see"),
        (mask_of(-210.0), "query 2 should not see key 0: its weight is 4."),
        (mask_not_zero, "query 2 may see key 2: the mask is 0 there, yours holds 5.0."),
        (lambda keep, dtype: mask_with_diagonal(keep, torch.float32), "expected torch.float16"),
        (lambda keep, dtype: mask_with_diagonal(keep, dtype)[:, None], "of shape [4, 5, 5]"),
        (lambda keep, dtype: None, "expected a tensor"),
    ],
)
def test_a_wrong_mask_is_told_why(answer, hint, capsys):
    assert not exercises.check_05_causal_mask(answer)
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out
