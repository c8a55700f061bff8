"""nanlab.losses against the formulas in plain Python floats, at the edges too."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from nanlab.errors import InputError
from nanlab.losses import dpo_loss, token_policy_loss, triple_preference_loss

NAN, INF = math.nan, math.inf
quick = settings(max_examples=60, deadline=None)
log_prob = st.floats(-2000, 0, width=32)
smoothing = st.sampled_from([0.0, 0.1, 0.49])


def negative_log_sigmoid(x):
    return math.log1p(math.exp(-x)) if x > 0 else -x + math.log1p(math.exp(x))


def smoothed(x, share):
    return (1 - share) * negative_log_sigmoid(x) + share * negative_log_sigmoid(-x)


@quick
@given(st.lists(st.tuples(log_prob, log_prob, log_prob, log_prob), min_size=1, max_size=6), smoothing)
def test_dpo_equals_its_formula_row_by_row(rows, share):
    columns = torch.tensor(rows, dtype=torch.float64).T
    expected = [smoothed(0.1 * ((pc - pr) - (rc - rr)), share) for pc, pr, rc, rr in rows]
    assert dpo_loss(*columns, beta=0.1, label_smoothing=share).tolist() == pytest.approx(expected, abs=1e-9)


@quick
@given(
    st.lists(st.tuples(log_prob, log_prob, log_prob), min_size=1, max_size=6), st.sampled_from([0.0, 0.5]), smoothing
)
def test_triple_preference_equals_its_formula_row_by_row(rows, gamma, share):
    chosen, rejected, gold = torch.tensor(rows, dtype=torch.float64).T
    loss = triple_preference_loss(chosen, rejected, -gold, 0.01, 0.7, gamma, share)
    expected = [smoothed(0.01 * (c - r) - gamma, share) - 0.7 * g for c, r, g in rows]
    assert loss.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("margin", [1e4, -1e4, 3e38, -3e38])
def test_far_margins_stay_finite(margin):
    """log(sigmoid(x)) is −inf from about −104 on in fp32; logsigmoid is not."""
    zero, chosen = torch.zeros(1), torch.tensor([margin], requires_grad=True)
    loss = dpo_loss(chosen, zero, zero, zero)
    assert_close(loss, torch.tensor([max(0.0, -0.1 * margin)]))
    loss.sum().backward()
    assert_close(chosen.grad, torch.tensor([-0.1 if margin < 0 else 0.0]))


def test_an_infinite_margin_is_no_nan_without_smoothing():
    zero = torch.zeros(1)
    assert dpo_loss(torch.tensor([INF]), zero, zero, zero).item() == 0.0
    assert dpo_loss(torch.tensor([-INF]), zero, zero, zero).item() == INF
    assert dpo_loss(torch.tensor([-INF]), torch.tensor([-INF]), zero, zero).isnan().all()  # no answer is the answer


def test_gradcheck_of_both_preference_losses():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4)]
    assert torch.autograd.gradcheck(lambda *x: dpo_loss(*x, beta=0.5, label_smoothing=0.2), rows)
    assert torch.autograd.gradcheck(lambda *x: triple_preference_loss(*x, 0.5, 0.3, 0.2, 0.1), rows[:3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_fp32(dtype):
    rows = [
        torch.tensor([x, x + 1], dtype=dtype) for x in (-30.1, -0.3, -2.7, -100.9)
    ]  # their differences are not exact
    assert torch.equal(dpo_loss(*rows), dpo_loss(*(row.float() for row in rows)))
    large = torch.tensor([-60000.0], dtype=dtype)  # the difference is beyond fp16
    assert triple_preference_loss(large, -large, 0.0).item() == pytest.approx(-0.02 * large.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), ()])
def test_the_gold_answer_in_half_precision_is_computed_in_fp32(dtype, shape):
    zero = torch.zeros(3, dtype=dtype)
    for nll, alpha in ((7.77, 0.3), (40000.0, 2.0)):  # 80000 is beyond fp16, and no product is a number of bf16
        nll = torch.full(shape, nll, dtype=dtype)
        loss = triple_preference_loss(zero, zero, nll, alpha=alpha)
        expected = math.log(2) + alpha * nll.double()
        assert loss.dtype == torch.float32
        assert_close(loss.double(), expected.expand(3), atol=0, rtol=2e-7)


def test_rows_do_not_touch_each_other():
    good, bad = torch.tensor([-1.0, NAN, -2.0], requires_grad=True), torch.tensor([-3.0, -1.0, -INF])
    zero = torch.zeros(3)
    loss = dpo_loss(good, bad, zero, zero)
    assert loss.isnan().tolist() == [False, True, False]
    loss[[0, 2]].sum().backward()
    assert good.grad.isfinite().tolist() == [True, False, True]  # drop a bad row before its loss, not after


def test_without_weight_the_gold_answer_is_not_read():
    row = torch.tensor([-1.0])
    assert triple_preference_loss(row, row, torch.tensor(NAN), alpha=0.0).item() == pytest.approx(math.log(2))
    assert triple_preference_loss(row, row, torch.tensor(NAN), alpha=1.0).isnan().all()


@pytest.mark.parametrize("share", [-0.1, 0.5, 1.0, NAN])
def test_label_smoothing_out_of_range(share):
    row = torch.zeros(1)
    with pytest.raises(InputError, match="label_smoothing="):
        dpo_loss(row, row, row, row, label_smoothing=share)


@pytest.mark.parametrize("factor", [NAN, INF, -INF])
def test_a_factor_that_is_not_finite(factor):
    row = torch.zeros(1)
    with pytest.raises(InputError, match=rf"^beta={factor}: give a finite number$"):
        dpo_loss(row, row, row, row, beta=factor)
    for name in ("beta", "alpha", "gamma"):
        with pytest.raises(InputError, match=rf"^{name}={factor}: give a finite number$"):
            triple_preference_loss(row, row, 0.0, **{name: factor})


def test_what_is_no_tensor_is_named():
    row, table = torch.zeros(2), torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"^ref_chosen is a list: give a tensor$"):
        dpo_loss(row, row, [0.0, 0.0], row)
    with pytest.raises(InputError, match=r"^rejected_logps is a float: give a tensor$"):
        triple_preference_loss(row, 0.0, 0.0)
    with pytest.raises(InputError, match=r"^completion_mask is a list: give a tensor$"):
        token_policy_loss(table, row, table.tolist())
    with pytest.raises(InputError, match=r"^reference_nll is a NoneType: give a tensor or a number$"):
        triple_preference_loss(row, row, None)
    with pytest.raises(InputError, match=r"^beta='x': give a finite number$"):
        dpo_loss(row, row, row, row, beta="x")


# token_policy_loss

tokens = st.lists(st.tuples(log_prob, st.booleans()), min_size=4, max_size=4)
signal = st.floats(-3, 3, width=32)


@quick
@given(st.lists(st.tuples(tokens, signal), min_size=1, max_size=5), st.sampled_from([NAN, INF, -INF]))
def test_token_policy_equals_a_plain_loop(rows, junk):
    log_probs = torch.tensor([[p if valid else junk for p, valid in row] for row, _ in rows], dtype=torch.float64)
    mask = torch.tensor([[valid for _, valid in row] for row, _ in rows])
    advantages = torch.tensor([a for _, a in rows], dtype=torch.float64)
    log_probs.requires_grad_()

    loss = token_policy_loss(log_probs, advantages, mask)
    assert loss.tokens.tolist() == [sum(valid for _, valid in row) for row, _ in rows]
    assert loss.sums.tolist() == pytest.approx([math.fsum(-a * p for p, valid in row if valid) for row, a in rows])

    (grad,) = torch.autograd.grad(loss.sums.sum(), log_probs)
    assert_close(grad, torch.where(mask, -advantages[:, None], 0.0))


def test_advantages_may_differ_by_token_and_take_no_gradient():
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, 2.0], [0.5, NAN]], requires_grad=True)  # NaN under the mask
    sums, count = token_policy_loss(log_probs, advantages, torch.tensor([[1, 1], [1, 0]]))
    assert sums.tolist() == [5.0, 1.5]
    assert count.tolist() == [2, 1]
    sums.sum().backward()
    assert log_probs.grad.tolist() == [[-1.0, -2.0], [-0.5, 0.0]]
    assert advantages.grad is None


def test_zero_times_infinity_is_no_signal():
    log_probs = torch.tensor([[-INF, -1.0], [-INF, -1.0], [NAN, -1.0]], requires_grad=True)
    loss = token_policy_loss(log_probs, torch.tensor([0.0, 1.0, 0.0]), torch.ones(3, 2))
    assert loss.sums[:2].tolist() == [0.0, INF]
    assert loss.sums[2].isnan()  # not known is not zero
    (grad,) = torch.autograd.grad(loss.sums[:2].sum(), log_probs)
    assert grad.tolist() == [[0.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]


def test_a_row_without_tokens_weighs_nothing():
    loss = token_policy_loss(
        torch.tensor([[-INF, NAN], [-1.0, -2.0]]), torch.tensor([NAN, 2.0]), torch.tensor([[0, 0], [1, 1]])
    )
    assert (loss.sums.sum() / loss.tokens.sum()).item() == 3.0


def test_half_precision_rows_add_up_in_fp32():
    log_probs = torch.full((1, 3000), -30.0, dtype=torch.float16)
    assert token_policy_loss(log_probs, torch.ones(1), torch.ones(1, 3000)).sums.item() == 90000.0


def test_shapes_that_do_not_fit():
    log_probs = torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"advantages \[3\], completion_mask \[2, 3\]"):
        token_policy_loss(log_probs, torch.zeros(3), torch.ones(2, 3))
    with pytest.raises(InputError, match=r"advantages \[2\], completion_mask \[2, 2\]"):
        token_policy_loss(log_probs, torch.zeros(2), torch.ones(2, 2))
    with pytest.raises(InputError, match=r"^log_probs have shape \[3\], .*: expected \[B, T\]"):
        token_policy_loss(torch.zeros(3), torch.zeros(3), torch.ones(3))


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("shape", [(3, 1), (1,), (2,), (), (3, 3)])
def test_dpo_does_not_broadcast(place, shape):
    rows = [torch.zeros(3) for _ in range(4)]
    rows[place] = torch.zeros(shape)
    with pytest.raises(InputError, match=r"^shapes are policy_chosen \[.*: expected \[B\] for each, one number a row$"):
        dpo_loss(*rows)


def test_triple_preference_does_not_broadcast():
    rows = torch.zeros(3)
    for shape in ((3, 1), (1,), (2,), (1, 3)):
        with pytest.raises(InputError, match=r"reference_nll \[.*: expected \[B\] for each"):
            triple_preference_loss(rows, rows, torch.zeros(shape))
    with pytest.raises(InputError, match=r"chosen_logps \[3\], rejected_logps \[3, 1\]: expected"):
        triple_preference_loss(rows, rows[:, None], 0.0)
