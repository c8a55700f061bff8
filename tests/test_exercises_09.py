"""The checks of lesson 09: the right answer passes, answers that people write do not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from nanlab.course import exercises


def losses(model, micro_batches):
    return [(model(x) - y).square().mean() / len(micro_batches) for x, y in micro_batches]


def step_if(
    fine: Callable, always_clear: bool = True, change: Callable = lambda model: None, parts_of: Callable = losses
):
    """A step of the right form, that asks `fine(gradients, losses)`."""

    def step(model, optimizer, micro_batches):
        parts = parts_of(model, micro_batches)
        for loss in parts:
            loss.backward()
        change(model)
        taken = bool(fine([p.grad for p in model.parameters() if p.requires_grad], parts))
        if taken:
            optimizer.step()
        if taken or always_clear:
            optimizer.zero_grad()
        return taken

    return step


def all_finite(gradients, parts):
    return all(bool(g.isfinite().all()) for g in gradients)


def skip_the_micro_batch(model, optimizer, micro_batches):
    for loss in losses(model, micro_batches):
        if not torch.isfinite(loss):
            optimizer.zero_grad()
            continue
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return True


def clean(model):
    for p in model.parameters():
        if p.grad is not None:
            torch.nan_to_num_(p.grad, 0.0, 0.0, 0.0)


def says_nothing(model, optimizer, micro_batches):
    step_if(all_finite)(model, optimizer, micro_batches)


def forgets_frozen_parameters(model, optimizer, micro_batches):
    for loss in losses(model, micro_batches):
        loss.backward()
    taken = all(bool(p.grad.isfinite().all()) for p in model.parameters())
    if taken:
        optimizer.step()
    optimizer.zero_grad()
    return taken


def returns_a_tensor(model, optimizer, micro_batches):
    return torch.tensor(step_if(all_finite)(model, optimizer, micro_batches))


def divides_at_the_end(model, optimizer, micro_batches):
    for x, y in micro_batches:
        (model(x) - y).square().mean().backward()
    return step_if(all_finite, change=lambda m: divide(m, len(micro_batches)))(model, optimizer, [])


def divide(model, count):
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= count


def always_two(model, micro_batches):
    return [(model(x) - y).square().mean() / 2 for x, y in micro_batches]


def all_at_once(model, micro_batches):  # the same sum in another order
    return [sum(losses(model, micro_batches[::-1]))]


def every_row_alike(model, micro_batches):  # the mean of all rows, not of the micro-batches' means
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    return [(model(x) - y).square().mean()]


def sums_over_all_rows(model, micro_batches):
    rows = sum(len(x) for x, _ in micro_batches)
    return [(model(x) - y).square().sum() / rows for x, y in micro_batches]


WRONG_STEPS = {
    "a NaN in the first of two": skip_the_micro_batch,
    "a NaN in the first": step_if(lambda g, parts: parts[-1].isfinite()),  # looks at the last loss only
    "whose gradient overflows": step_if(lambda g, parts: sum(parts).isfinite()),
    "its L2 norm overflows": step_if(lambda g, parts: get_total_norm(g).isfinite()),
    "though its L2 norm overflows": step_if(lambda g, parts: all(t.norm().isfinite() for t in g)),  # each by its own
    "though their sum overflows": step_if(lambda g, parts: all(t.sum().isfinite() for t in g)),
    "a gradient of -inf": step_if(lambda g, parts: all(t.max().isfinite() for t in g)),  # blind below
    "left over": step_if(all_finite, always_clear=False),
    "should leave no trace": step_if(all_finite, change=clean),  # nan_to_num on the gradients
    "as one plain step": step_if(all_finite, change=lambda model: clip_grad_norm_(model.parameters(), 1e-3)),
    "return True": says_nothing,
    "it raised AttributeError: 'NoneType'": forgets_frozen_parameters,
    "return True, not 1.0": lambda *given: float(step_if(all_finite)(*given)),
    "four good micro-batches": step_if(all_finite, parts_of=always_two),
    "micro-batches of one row and of two": step_if(all_finite, parts_of=every_row_alike),
    "of one row and of two: the step should be taken": step_if(all_finite, parts_of=sums_over_all_rows),
}


@pytest.mark.parametrize(
    "step", [step_if(all_finite), step_if(all_finite, parts_of=all_at_once), returns_a_tensor, divides_at_the_end]
)
def test_the_right_step_passes(step, capsys):
    assert exercises.check_09_step(step)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize("hint", WRONG_STEPS)
def test_wrong_steps_fail_with_a_sentence(hint, capsys):
    assert not exercises.check_09_step(WRONG_STEPS[hint])
    out = capsys.readouterr().out
    assert out.startswith("Not yet: ")
    assert hint in out


def log_entry(values, empty=math.nan):
    finite = [v for v in values if math.isfinite(v)]
    return {"loss": sum(finite) / len(finite) if finite else empty, "not_finite": len(values) - len(finite)}


def without_nan(values):
    rest = [v for v in values if v == v]
    return {"loss": sum(rest) / len(rest) if rest else math.nan, "not_finite": len(values) - len(rest)}


def middle(values):  # the median, which is the mean of two, and of three that are evenly spaced
    finite = [v for v in values if math.isfinite(v)]
    return statistics.median(finite) if finite else math.nan


WRONG_ENTRIES = {
    "leave out": lambda values: {
        "loss": sum(v if math.isfinite(v) else 0.0 for v in values) / len(values),
        "not_finite": 0,
    },
    "not inf": without_nan,  # NaN only
    "best loss ever": lambda values: log_entry(values, empty=0.0),
    "for [inf] the loss should be nan, not 0.0": lambda values: {  # NaN only where all are NaN
        "loss": (
            math.nan
            if all(v != v for v in values)
            else sum(v for v in values if math.isfinite(v)) / max(1, sum(map(math.isfinite, values)))
        ),
        "not_finite": sum(not math.isfinite(v) for v in values),
    },
    "'not_finite'": lambda values: {"loss": log_entry(values)["loss"]},
    "for [1.0, 2.0, nan, 6.0]": lambda values: log_entry(values) | {"loss": middle(values)},
    "for [-0.5, 1.0] the loss should be 0.25, not 1.0: it is the mean": lambda values: (
        log_entry(values) | {"loss": log_entry([v for v in values if not v < 0])["loss"]}
    ),
    "give a number for each": lambda values: log_entry(values, empty=None),
    "a number for each, NaN if": lambda values: {name: str(value) for name, value in log_entry(values).items()},
    "which is no dict": lambda values: list(log_entry(values).items()),
    "you count 0": lambda values: log_entry(values) | {"not_finite": 0},
}


def test_the_right_entry_passes(capsys):
    assert exercises.check_09_log_entry(log_entry)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize("hint", WRONG_ENTRIES)
def test_wrong_entries_fail_with_a_sentence(hint, capsys):
    assert not exercises.check_09_log_entry(WRONG_ENTRIES[hint])
    out = capsys.readouterr().out
    assert out.startswith("Not yet: ")
    assert hint in out
