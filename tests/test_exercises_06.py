"""The checks of lesson 06 accept the right answer and refuse the wrong ones that people write."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanlab.course import exercises

# --- tune: AdamW on a prompt in fp16 ----------------------------------------------------------------------------------


def steps(weight, gradients, **options):
    optimizer = torch.optim.AdamW([weight.requires_grad_()], weight_decay=0.0, **options)
    for gradient in gradients:
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    return weight.detach()


def tune_right(prompt, gradients, lr):
    return steps(prompt.float(), gradients, lr=lr).half()


def tune_in_double(prompt, gradients, lr):
    return steps(prompt.double(), gradients, lr=lr, foreach=False).half()


def tune_in_half(prompt, gradients, lr):
    return steps(prompt.clone(), gradients, lr=lr, foreach=False)


def tune_with_larger_eps(prompt, gradients, lr):
    return steps(prompt.clone(), gradients, lr=lr, eps=1e-4)


def tune_in_float_with_larger_eps(prompt, gradients, lr):  # off by one per cent
    return steps(prompt.float(), gradients, lr=lr, eps=1e-6).half()


def tune_fused(prompt, gradients, lr):
    return steps(prompt.clone(), gradients, lr=lr, fused=True)


def tune_without_memory(prompt, gradients, lr):  # a new optimizer, and back to fp16, in every step
    for gradient in gradients:
        prompt = steps(prompt.float(), [gradient], lr=lr).half()
    return prompt


def tune_cleaned(prompt, gradients, lr):
    return steps(prompt.clone(), gradients, lr=lr, foreach=False).nan_to_num(0.0, 0.0, 0.0)


def tune_in_bfloat16(prompt, gradients, lr):
    return steps(prompt.bfloat16(), gradients, lr=lr).half()


def tune_returns_the_master(prompt, gradients, lr):
    return steps(prompt.float(), gradients, lr=lr)


def tune_with_decay(prompt, gradients, lr):  # torch's default decay, too small to see on small values
    master = prompt.float().requires_grad_()
    optimizer = torch.optim.AdamW([master], lr=lr)
    for gradient in gradients:
        master.grad = gradient.float()
        optimizer.step()
    return master.detach().half()


def tune_clipped(prompt, gradients, lr):
    return steps(prompt.float(), [g.float() / max(g.float().norm().item(), 1.0) for g in gradients], lr=lr).half()


def tune_with_amsgrad(prompt, gradients, lr):
    return steps(prompt.float(), gradients, lr=lr, amsgrad=True).half()


def tune_with_other_betas(prompt, gradients, lr):
    return steps(prompt.float(), gradients, lr=lr, betas=(0.9, 0.99)).half()


@pytest.mark.parametrize("answer", [tune_right, tune_in_double])
def test_a_right_tune_passes(answer, capsys):
    assert exercises.check_06_tune(answer)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (tune_in_half, "divides by 0"),
        (tune_with_larger_eps, "not right"),
        (tune_fused, "not right"),
        (tune_without_memory, "not right"),
        (tune_in_float_with_larger_eps, "Float64 gives [0.0, -0.002612, -0.002612], yours [0.0, -0.002577"),
        (tune_cleaned, "not right"),
        (tune_with_decay, "a large value"),
        (tune_in_bfloat16, "not right"),
        (tune_returns_the_master, "expected fp16"),
        (tune_clipped, "a large gradient, then 100 small ones"),
        (tune_with_amsgrad, "a large gradient, then 100 small ones"),
        (tune_with_other_betas, "not right"),
        (lambda prompt, gradients, lr: None, "expected a tensor"),
        (lambda prompt, gradients, lr: prompt[5], "IndexError"),
    ],
)
def test_a_wrong_tune_is_told_why(answer, hint, capsys):
    assert not exercises.check_06_tune(answer)
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out


# --- step: a scaler with a floor --------------------------------------------------------------------------------------


def scaled(scaler, optimizer, loss, clear=True):
    before = scaler.get_scale()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if clear:
        optimizer.zero_grad()
    return before, scaler.get_scale()


def stepper(
    finite=torch.isfinite,
    too_low=lambda before, after: after < min(before, 1),
    taken=lambda before, after: after >= before,
    clear=True,
):
    """A step with a floor; each wrong one below differs from the right one in a single part."""

    def step(scaler, optimizer, loss):
        if not finite(loss):
            raise FloatingPointError("loss")
        before, after = scaled(scaler, optimizer, loss, clear)
        if too_low(before, after):
            raise FloatingPointError("scale")
        return taken(before, after)

    return step


step_right = stepper()
step_without_floor = stepper(too_low=lambda before, after: False)
step_with_its_floor_too_high = stepper(too_low=lambda before, after: after < before and after <= 1)
step_that_raises_below_1_without_a_skip = stepper(too_low=lambda before, after: after < 1)
step_that_takes_growth_for_a_skip = stepper(taken=lambda before, after: after == before)
step_that_asks_for_growth = stepper(taken=lambda before, after: after > before)
step_that_tests_for_nan_only = stepper(finite=lambda loss: not torch.isnan(loss))
step_that_keeps_gradients = stepper(clear=False)


def step_plain(scaler, optimizer, loss):
    scaled(scaler, optimizer, loss)
    return True


def step_that_raises_at_each_skip(scaler, optimizer, loss):
    before, after = scaled(scaler, optimizer, loss)
    if after < before:
        raise FloatingPointError("skipped")
    return True


def step_that_looks_too_late(scaler, optimizer, loss):
    before, after = scaled(scaler, optimizer, loss)
    if not torch.isfinite(loss) or after < min(before, 1):
        raise FloatingPointError("loss")
    return after >= before


def step_that_goes_backward_first(scaler, optimizer, loss):
    scaler.scale(loss).backward()
    if not torch.isfinite(loss):
        raise FloatingPointError("loss")
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if scaler.get_scale() < min(before, 1):
        raise FloatingPointError("scale")
    return scaler.get_scale() >= before


def step_that_goes_backward_first_and_clears(scaler, optimizer, loss):
    try:
        return step_that_goes_backward_first(scaler, optimizer, loss)
    finally:
        optimizer.zero_grad(set_to_none=False)


def step_that_raises_at_any_low_scale(scaler, optimizer, loss):
    if not torch.isfinite(loss) or scaler.get_scale() < 1:
        raise FloatingPointError("loss")
    before, after = scaled(scaler, optimizer, loss)
    if after < min(before, 1):
        raise FloatingPointError("scale")
    return after >= before


def step_that_looks_at_the_gradients(scaler, optimizer, loss):
    if not torch.isfinite(loss):
        raise FloatingPointError("loss")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    finite = all(bool(p.grad.isfinite().all()) for group in optimizer.param_groups for p in group["params"])
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if not finite and scaler.get_scale() < 1:
        raise FloatingPointError("scale")
    return finite


def step_that_returns_a_tensor(scaler, optimizer, loss):
    return torch.tensor(step_right(scaler, optimizer, loss))


def step_that_returns_a_numpy_bool(scaler, optimizer, loss):
    return np.bool_(step_right(scaler, optimizer, loss))


def step_without_the_scaler(scaler, optimizer, loss):
    if not torch.isfinite(loss):
        raise FloatingPointError("loss")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return True


@pytest.mark.parametrize(
    "answer",
    [
        step_right,
        step_that_looks_at_the_gradients,
        step_that_goes_backward_first_and_clears,
        step_that_returns_a_tensor,
        step_that_returns_a_numpy_bool,
    ],
)
def test_a_right_step_passes(answer, capsys):
    assert exercises.check_06_step(answer)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (step_plain, "expected False, got True"),
        (step_without_floor, "takes the scale to 0.5"),
        (step_that_takes_growth_for_a_skip, "expected True, got False"),
        (step_that_asks_for_growth, "unchanged scale: expected True, got False"),
        (step_that_raises_below_1_without_a_skip, "healthy loss at scale 0.25: expected True"),
        (lambda *given: float(step_right(*given)), "expected True, got 1.0"),
        (step_that_raises_at_each_skip, "expected False, got FloatingPointError"),
        (step_that_looks_too_late, "its scale has changed"),
        (step_that_goes_backward_first, "a loss of inf: raise before backward"),
        (step_that_tests_for_nan_only, "a loss of inf"),
        (step_that_raises_at_any_low_scale, "healthy loss at scale 0.5"),
        (step_with_its_floor_too_high, "takes the scale to 1:"),
        (step_that_keeps_gradients, "gradients cleared"),
        (step_without_the_scaler, "a gradient that overflows once"),
        (lambda scaler, optimizer, loss: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_step_is_told_why(answer, hint, capsys):
    assert not exercises.check_06_step(answer)
    out = capsys.readouterr().out
    assert out.startswith("Not yet:")
    assert hint in out
