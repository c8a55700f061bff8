"""The checks of lesson 07: the right answer passes, answers that people write do not."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from nanlab.course import exercises


def tensors(model):
    return chain(model.named_parameters(), model.named_buffers())


def bad_tensors(model):
    return [name for name, t in tensors(model) if t.isnan().any() or (t == float("inf")).any()]


WRONG_TENSORS = {
    "inf": lambda model: [name for name, t in tensors(model) if t.isnan().any()],
    "running_var": lambda model: (
        [name for name, p in model.named_parameters() if not p.isfinite().all()]
        + [name for name, b in model.named_buffers() if b.isnan().any()]
    ),
    "deliberate": lambda model: [name for name, t in tensors(model) if not t.isfinite().all()],
    "state_dict": lambda model: [
        name for name, t in model.state_dict().items() if t.isnan().any() or (t == float("inf")).any()
    ],
    "parameters()": lambda model: [name for name, p in model.named_parameters() if not p.isfinite().all()],
    "deliberate, in a parameter too": lambda model: (
        [name for name, p in model.named_parameters() if not p.isfinite().all()]
        + [name for name, b in model.named_buffers() if b.isnan().any() or (b == float("inf")).any()]
    ),
    "the NaN beside it": lambda model: [
        name for name, t in tensors(model) if not (t == -float("inf")).any() and not t.isfinite().all()
    ],
    "large and finite": lambda model: [name for name, t in tensors(model) if not abs(t.sum()) < float("inf")],
    "qualified": lambda model: [name.removeprefix("inner.") for name in bad_tensors(model)] + bad_tensors(model),
    "raised": lambda model: [name for name, t in tensors(model) if t.isnan()],
    "'scale'": lambda model: [f"{k}.{name}" for k, part in model.named_children() for name in bad_tensors(part)],
}


def test_the_right_names_pass(capsys):
    assert exercises.check_07_bad_tensors(bad_tensors)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize("hint", WRONG_TENSORS)
def test_wrong_names_fail_with_a_sentence(hint, capsys):
    assert not exercises.check_07_bad_tensors(WRONG_TENSORS[hint])
    out = capsys.readouterr().out
    assert out.startswith("Not yet: ")
    assert hint in out


def clean_batch(features, targets, fine=torch.isfinite):
    good = fine(features).all(dim=1) & fine(targets)
    if not good.any():
        raise ValueError("no row is finite")
    return features[good], targets[good], int((~good).sum())


def without_targets(features, targets):
    good = features.isfinite().all(1)
    return features[good], targets[good], int((~good).sum())


def silent(features, targets):
    good = features.isfinite().all(1) & targets.isfinite()
    return features[good], targets[good], int((~good).sum())


def raising_where(what):
    """`clean_batch`, but `what` decides whether there is a ValueError: an empty batch may go through."""

    def answer(features, targets):
        good = features.isfinite().all(1) & targets.isfinite()
        if what(features, targets):
            raise ValueError("no row is finite")
        return features[good], targets[good], int((~good).sum())

    return answer


ONLY_SOME_EMPTY_BATCHES = {
    "[[nan, 2.0], [1.0, inf]]": raising_where(lambda f, t: not f.isfinite().any()),
    "the targets [nan, -inf]": raising_where(lambda f, t: not f.isfinite().all(1).any()),
    "[[nan, nan], [nan, nan]]": raising_where(lambda f, t: not t.isfinite().any()),
}


@pytest.mark.parametrize("hint", ONLY_SOME_EMPTY_BATCHES)
def test_every_kind_of_empty_batch_must_raise(hint, capsys):
    assert not exercises.check_07_clean_batch(ONLY_SOME_EMPTY_BATCHES[hint])
    out = capsys.readouterr().out
    assert "came back empty" in out
    assert hint in out


def by_sum(features, targets):
    good = features.sum(1).isfinite() & targets.isfinite()
    return features[good], targets[good], int((~good).sum())


def unpaired(features, targets):
    good = features.isfinite().all(1)
    return features[good], targets[targets.isfinite()], 4


WRONG_BATCHES = {
    "as tensors, not as list": lambda f, t: (clean_batch(f, t)[0].tolist(), *clean_batch(f, t)[1:]),
    "Replace nothing": lambda f, t: (f.nan_to_num(0.0, 0.0, 0.0), t.nan_to_num(0.0), 0),
    "look at inf": lambda f, t: clean_batch(f, t, lambda x: ~x.isnan()),
    "the targets too": without_targets,
    "you kept 4": by_sum,
    "4 rows were dropped, you report 5": lambda f, t: (*clean_batch(f, t)[:2], len(clean_batch(f, t)[0])),
    "features are [rows, columns]": lambda f, t: (clean_batch(f, t)[0].sum(), *clean_batch(f, t)[1:]),
    "return (features, targets, dropped)": lambda f, t: clean_batch(f, t)[:2],
    "belong together": unpaired,
    "mean of nothing": silent,
    "you report": lambda f, t: (*clean_batch(f, t)[:2], 0),
    "4 rows were dropped": lambda f, t: (*clean_batch(f, t)[:2], int((~f.isfinite()).sum() + (~t.isfinite()).sum())),
    "in order": lambda f, t: tuple(x.flip(0) if torch.is_tensor(x) else x for x in clean_batch(f, t)),
}


def test_the_right_batch_passes(capsys):
    assert exercises.check_07_clean_batch(clean_batch)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize("hint", WRONG_BATCHES)
def test_wrong_batches_fail_with_a_sentence(hint, capsys):
    assert not exercises.check_07_clean_batch(WRONG_BATCHES[hint])
    out = capsys.readouterr().out
    assert out.startswith("Not yet: ")
    assert hint in out
