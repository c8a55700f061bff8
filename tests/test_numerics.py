"""nanlab.numerics against exact or float64 references, and with NaN and inf wherever nothing must be read."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from nanlab import numerics
from nanlab.errors import InputError
from nanlab.numerics import group_advantages, masked_mean, masked_sum, token_logps

NAN, INF = math.nan, math.inf
JUNK = [NAN, INF, -INF]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
quick = settings(max_examples=60, deadline=None)
fp32 = st.floats(-1e3, 1e3, width=32)
masked_values = st.lists(st.tuples(fp32, st.booleans()), min_size=1, max_size=30)


# masked_sum, masked_mean


@quick
@given(masked_values, st.sampled_from(JUNK))
def test_masked_values_are_never_read(pairs, junk):
    mask = torch.tensor([keep for _, keep in pairs])
    values = torch.tensor([value if keep else junk for value, keep in pairs], dtype=torch.float64, requires_grad=True)
    kept = [value for value, keep in pairs if keep]

    total = masked_sum(values, mask)
    assert total.item() == pytest.approx(math.fsum(kept), abs=1e-9)
    (grad,) = torch.autograd.grad(total, values)
    assert grad.tolist() == mask.double().tolist()

    mean = masked_mean(values, mask)
    assert mean.item() == pytest.approx(statistics.fmean(kept) if kept else NAN, abs=1e-9, nan_ok=True)
    (grad,) = torch.autograd.grad(mean, values)
    assert_close(grad, mask.double() / max(1, len(kept)))


@pytest.mark.parametrize("junk", JUNK)
def test_masked_mean_over_a_dimension(junk):
    values = torch.tensor([[1.0, 2.0, junk], [junk, junk, junk], [4.0, junk, 8.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    assert_close(masked_mean(values, mask, dim=1), torch.tensor([1.5, NAN, 6.0]), equal_nan=True)
    assert masked_sum(values, mask, dim=1).tolist() == [3.0, 0.0, 12.0]
    assert masked_sum(values, mask, dim=(0, 1)).item() == 15.0


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_mean_of_nothing_has_no_value_and_does_not_reach_the_weights():
    weight = torch.tensor(2.0, requires_grad=True)
    values = weight * torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    means = masked_mean(values, torch.tensor([[True, True], [False, False]]), dim=1)
    assert means[0].item() == 4.0
    assert means[1].isnan()
    for loss in (means.sum(), means[0]):
        with torch.autograd.detect_anomaly(check_nan=True):  # no NaN on the way back either
            (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
        assert grad.item() == 2.0


@pytest.mark.parametrize("dtype", FLOATS)
def test_half_types_are_accumulated_in_fp32(dtype):
    ones = torch.ones(5000, dtype=dtype)  # bf16 alone cannot count beyond 256, fp16 not beyond 2048
    total = masked_sum(ones, ones.bool())
    assert total.item() == 5000.0
    assert total.dtype == torch.promote_types(dtype, torch.float32)
    large = torch.full((4,), 60000.0, dtype=dtype, requires_grad=True)  # the sum is beyond fp16
    mean = masked_mean(large, large.bool())
    assert mean.item() == large[0].item()
    assert torch.autograd.grad(mean, large)[0].dtype == dtype


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(InputError, match=r"mask has shape \[2\], values \[2, 2\]"):
        masked_mean(torch.ones(2, 2), torch.ones(2))


# group_advantages


def reference_advantages(rewards, group):
    """With Python's `statistics`, which computes in exact fractions."""
    advantages = []
    for reward, own in zip(rewards, group, strict=True):
        peers = [r for r, g in zip(rewards, group, strict=True) if g == own and not math.isnan(r)]
        signal = len(peers) > 1 and len(set(peers)) > 1 and not math.isnan(reward)
        advantages.append((reward - statistics.mean(peers)) / statistics.stdev(peers) if signal else 0.0)
    return advantages


rewards_in_groups = st.lists(
    st.tuples(st.sampled_from([NAN, 0.0, 0.1, -0.5, 1.0, 2.25, 1e3]), st.sampled_from([-7, 0, 3, 10**12])),
    max_size=24,
)


@quick
@given(rewards_in_groups, st.sampled_from([1e-30, 1e-3, 1.0, 7.0, 1e30]), st.sampled_from([0.0, -2.0, 5.0]))
def test_advantages_equal_an_exact_reference_in_any_unit(rows, unit, offset):
    rewards, group = [r for r, _ in rows], [g for _, g in rows]
    rewards = [unit * r + unit * offset for r in rewards]
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(group, dtype=torch.long))
    assert result.values.tolist() == pytest.approx(reference_advantages([r for r, _ in rows], group), abs=1e-9)
    assert result.missing == sum(math.isnan(r) for r in rewards)


@quick
@given(rewards_in_groups.flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(range(len(rows))))))
def test_advantages_move_with_their_rows(rows_and_order):
    rows, order = rows_and_order
    rewards, group = torch.tensor([r for r, _ in rows]), torch.tensor([g for _, g in rows], dtype=torch.long)
    order = torch.tensor(order, dtype=torch.long)
    straight, shuffled = group_advantages(rewards, group), group_advantages(rewards[order], group[order])
    assert_close(shuffled.values, straight.values[order])
    assert shuffled[1:] == straight[1:]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 100_000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_rewards_are_exactly_zero(size, dtype):
    rewards = torch.tensor([0.1, -1 / 3, 0.0, 1e-30, 6e4], dtype=dtype).repeat(size)
    result = group_advantages(rewards, torch.arange(5).repeat(size))
    assert result.values.count_nonzero() == 0
    assert result.flat == 5 * size


@pytest.mark.parametrize(
    ("rewards", "dtype"),
    [
        ([0.1 + 0.2, 0.3], torch.float64),
        ([1 - 2**-53, 1.0, 1.0], torch.float64),
        ([0.1, math.nextafter(0.1, 1)] * 50, torch.float64),
        ([1.0, 1 + 2**-23], torch.float32),
        ([1e6, 1e6 + 0.0625], torch.float32),
    ],
)
def test_equal_up_to_rounding_is_equal(rewards, dtype):
    rewards = torch.tensor(rewards, dtype=dtype)
    assert rewards.std() > 0  # there is noise to be blown up
    assert group_advantages(rewards, torch.zeros(len(rewards), dtype=torch.long)).values.count_nonzero() == 0


def test_an_eps_in_the_divisor_is_no_substitute():
    """Claims A8 and A9: noise comes out large, a small honest spread comes out crushed."""
    equal, spread = torch.full((7,), 0.1), torch.tensor([1e-6, 2e-6, 3e-6])
    popular = lambda r, eps: (r - r.mean()) / (r.std() + eps)
    assert popular(equal, 1e-8).abs().max() > 0.1
    assert popular(spread, 1e-4).abs().max() < 0.1
    assert group_advantages(equal, torch.zeros(7, dtype=torch.long)).values.tolist() == [0.0] * 7
    assert_close(group_advantages(spread, torch.zeros(3, dtype=torch.long)).values, torch.tensor([-1.0, 0.0, 1.0]))


def test_a_small_spread_on_a_large_offset_is_kept():
    rewards = torch.tensor([1e6, 1e6 + 1, 1e6 + 2])
    assert_close(group_advantages(rewards, torch.zeros(3, dtype=torch.long)).values, torch.tensor([-1.0, 0.0, 1.0]))


@pytest.mark.parametrize("unit", [5e-324, 1e-300, 1e300, 1.7e308])
def test_units_at_the_ends_of_the_range(unit):
    rewards = unit * torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    values = group_advantages(rewards, torch.zeros(3, dtype=torch.long)).values
    assert_close(values, torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))


def test_missing_and_lonely_rewards_are_counted():
    rewards = torch.tensor([1.0, NAN, 3.0, NAN, 8.0, 4.0])
    result = group_advantages(rewards, torch.tensor([5, 5, 5, 2, 9, 2]))
    assert_close(result.values, torch.tensor([-(0.5**0.5), 0.0, 0.5**0.5, 0.0, 0.0, 0.0]))
    assert (result.missing, result.flat) == (2, 2)


def test_no_rows():
    result = group_advantages(torch.tensor([]), torch.tensor([], dtype=torch.long))
    assert (result.values.tolist(), result.missing, result.flat) == ([], 0, 0)


@pytest.mark.parametrize(
    ("rewards", "group", "message"),
    [
        (torch.tensor([1.0, INF]), torch.tensor([0, 0]), "rewards, row 1: inf"),
        (torch.tensor([1, 2]), torch.tensor([0, 0]), "rewards are torch.int64"),
        (torch.tensor([1.0, 2.0]), torch.tensor([0]), r"rewards have shape \[2\], group \[1\]"),
    ],
)
def test_unusable_rewards_are_named(rewards, group, message):
    with pytest.raises(InputError, match=message):
        group_advantages(rewards, group)


# token_logps


def token_batch(dtype=torch.float32, shape=(3, 5, 13), seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(shape, generator=generator)).to(dtype)
    labels = torch.randint(shape[-1], shape[:-1], generator=generator)
    mask = torch.rand(shape[:-1], generator=generator) > 0.4
    return logits, labels, mask


def reference_log_probs(logits, labels, mask):
    """The textbook form in fp64."""
    chosen = logits.double().log_softmax(-1).gather(-1, labels.where(mask, 0)[..., None])[..., 0]
    return torch.where(mask, chosen, 0.0)


@quick
@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from(FLOATS),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 20)),
)
def test_token_logps_equal_a_float64_reference(seed, dtype, shape):
    logits, labels, mask = token_batch(dtype, shape, seed)
    logits.requires_grad_()
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    log_probs = token_logps(logits, labels, mask)
    expected = reference_log_probs(logits, labels, mask)
    assert log_probs.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(log_probs.double(), expected, atol=3e-6, rtol=1e-6)

    (grad,) = torch.autograd.grad((log_probs * weight).sum(), logits)
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), logits)
    assert grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert_close(grad.double(), expected_grad.double(), atol=max(1e-5, eps), rtol=max(1e-5, 2 * eps))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("junk", JUNK)
def test_nothing_under_the_mask_is_read(dtype, junk):
    logits, labels, mask = token_batch(dtype)
    clean = token_logps(logits, labels, mask)
    dirty_logits = logits.where(mask[..., None], junk).requires_grad_()
    dirty_labels = labels.where(mask, -100)
    dirty_labels[~mask] = torch.tensor([-100, 10**9, -(2**63)])[torch.arange(int((~mask).sum())) % 3]

    log_probs = token_logps(dirty_logits, dirty_labels, mask)
    assert torch.equal(log_probs, clean)
    assert log_probs[~mask].count_nonzero() == 0
    log_probs.backward(torch.ones_like(log_probs).where(mask, junk))  # not even the incoming gradient
    assert dirty_logits.grad[~mask].count_nonzero() == 0  # NaN counts as nonzero
    assert dirty_logits.grad[mask].isfinite().all()


def test_a_token_that_nothing_depends_on_sends_no_gradient():
    logits, labels, _ = token_batch()
    logits[1] = NAN
    logits.requires_grad_()
    log_probs = token_logps(logits, labels, torch.ones_like(labels))
    assert log_probs[1].isnan().all()  # a NaN that is used stays visible
    log_probs[[0, 2]].sum().backward()
    assert logits.grad[1].count_nonzero() == 0
    assert logits.grad[[0, 2]].isfinite().all()


def test_a_vocabulary_entry_that_is_ruled_out():
    logits = torch.tensor([[[0.0, -INF, 0.0], [0.0, -INF, 0.0]]], requires_grad=True)
    log_probs = token_logps(logits, torch.tensor([[0, 1]]), torch.ones(1, 2))
    assert_close(log_probs, torch.tensor([[-math.log(2), -INF]]))
    log_probs.sum().backward()
    assert_close(logits.grad, torch.tensor([[[0.5, 0.0, -0.5], [-0.5, 1.0, -0.5]]]))


def test_token_logps_gradcheck():
    logits, labels, mask = token_batch(torch.float64)
    assert torch.autograd.gradcheck(lambda x: token_logps(x, labels, mask), logits.requires_grad_())


def test_shifted_logits_and_any_chunk_give_the_same(monkeypatch):
    logits, labels, mask = token_batch()
    logits.requires_grad_()
    shifted = logits[:, :-1], labels[:, 1:], mask[:, 1:]
    assert not shifted[0].is_contiguous()
    whole = token_logps(*shifted)
    (whole_grad,) = torch.autograd.grad(whole.sum(), logits)
    assert_close(whole.double(), reference_log_probs(*shifted), atol=3e-6, rtol=1e-6)
    for numbers in (1, 13, 30):
        monkeypatch.setattr(numerics, "_CHUNK_ON_CPU", numbers)
        log_probs = token_logps(*shifted)
        assert torch.equal(log_probs, whole)
        assert torch.equal(torch.autograd.grad(log_probs.sum(), logits)[0], whole_grad)


def test_all_masked_or_no_rows():
    for shape in ((2, 3, 5), (0, 3, 5), (2, 0, 5)):
        logits = torch.full(shape, NAN, requires_grad=True)
        log_probs = token_logps(logits, torch.full(shape[:2], -100), torch.zeros(shape[:2]))
        log_probs.sum().backward()
        assert log_probs.shape == shape[:2]
        assert log_probs.count_nonzero() == logits.grad.count_nonzero() == 0


class Allocations(TorchDispatchMode):
    """By dtype, the size in numbers of the largest tensor that an operation made; a view of an argument is none."""

    def __init__(self):
        super().__init__()
        self.largest = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.largest[result.dtype] = max(self.largest.get(result.dtype, 0), result.numel())
        return result


def test_no_full_log_softmax_is_made(monkeypatch):
    monkeypatch.setattr(numerics, "_CHUNK_ON_CPU", 500)
    logits, labels, _ = token_batch(torch.bfloat16, (4, 16, 100))
    logits.requires_grad_()
    mask = torch.ones_like(labels)
    with Allocations() as forward:
        total = token_logps(logits, labels, mask).sum()
    with Allocations() as backward:
        total.backward()
    assert max(forward.largest.values()) <= 500
    assert backward.largest[torch.float32] <= 500
    assert backward.largest[torch.bfloat16] == logits.numel()  # the gradient itself


def test_under_autocast_it_stays_fp32():
    logits, labels, mask = token_batch()
    with torch.autocast("cpu", torch.bfloat16):
        log_probs = token_logps(logits, labels, mask)
    assert torch.equal(log_probs, token_logps(logits, labels, mask))


@pytest.mark.parametrize("label", [-100, 13, -1])
def test_a_label_outside_the_vocabulary_is_named(label):
    logits, labels, mask = token_batch()
    mask[:], labels[2, 3] = True, label
    with pytest.raises(InputError, match=rf"labels, row 2, token 3: {label} is outside the vocabulary of 13"):
        token_logps(logits, labels, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.uint8])
def test_labels_that_are_no_ids_are_refused(dtype):
    logits, labels, mask = token_batch()
    with pytest.raises(InputError, match=f"^labels are {dtype}: convert them to int64$"):
        token_logps(logits, labels.to(dtype), mask)
    assert torch.equal(token_logps(logits, labels.int(), mask), token_logps(logits, labels, mask))


def test_shapes_that_do_not_fit_are_named():
    logits, labels, mask = token_batch()
    for wrong in ((logits[0], labels, mask), (logits, labels[:, 1:], mask), (logits, labels, mask[:, 1:])):
        with pytest.raises(InputError, match=r"expected \[B, T, V\], \[B, T\] and \[B, T\]"):
            token_logps(*wrong)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: group_advantages([1.0, 2.0], torch.zeros(2)), "rewards"),
        (lambda: group_advantages(torch.zeros(2), [0, 0]), "group"),
        (lambda: masked_mean([1.0], torch.ones(1)), "values"),
        (lambda: masked_sum(torch.ones(1), [True]), "mask"),
        (lambda: token_logps([[[0.0]]], torch.zeros(1, 1), torch.ones(1, 1)), "logits"),
    ],
)
def test_what_is_no_tensor_is_named(call, name):
    with pytest.raises(InputError, match=rf"^{name} is a list: give a tensor$"):
        call()
