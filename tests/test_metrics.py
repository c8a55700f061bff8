"""WeightedMean: exact, whatever the batches, the order and the ranks."""

import functools
import itertools
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanlab import WeightedMean
from nanlab.errors import InputError

NAN, INF = math.nan, math.inf
quick = settings(max_examples=80, deadline=None)
values = st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([NAN, INF, -INF, 1e12, -1e12]))
rows = st.lists(st.tuples(values, st.integers(0, 300)), max_size=30)


def seen(rows):
    mean = WeightedMean()
    for value, weight in rows:
        mean.update(value, weight)
    return mean


def exact(rows):
    kept = [(Fraction(v * w), w) for v, w in rows if w and math.isfinite(v)]
    return float(sum(p for p, _ in kept) / sum(w for _, w in kept)) if kept else NAN


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


@quick
@given(rows)
def test_it_equals_exact_fractions_and_counts_what_it_left_out(rows):
    mean = seen(rows)
    assert mean.compute() == pytest.approx(exact(rows), rel=1e-15, abs=1e-300, nan_ok=True)
    assert mean.excluded == sum(not w or not math.isfinite(v) for v, w in rows)
    assert mean.weight == sum(w for v, w in rows if math.isfinite(v))


@quick
@given(rows.flatmap(lambda r: st.tuples(st.just(r), st.permutations(r))), st.integers(1, 7))
def test_order_and_batch_size_do_not_matter_to_the_last_bit(rows_and_shuffled, size):
    rows, shuffled = rows_and_shuffled
    batched = WeightedMean()
    for start in range(0, len(shuffled), size):
        part = torch.tensor(shuffled[start : start + size], dtype=torch.float64)
        batched.update(part[:, 0], part[:, 1])
    assert same(batched.compute(), seen(rows).compute())
    assert batched.excluded == seen(rows).excluded


@quick
@given(st.lists(rows, min_size=1, max_size=4))
def test_merging_ranks_is_seeing_all_rows(ranks):
    whole = seen(itertools.chain.from_iterable(ranks))
    forward = functools.reduce(WeightedMean.merge, [seen(r) for r in ranks], WeightedMean())
    backward = functools.reduce(lambda a, b: b.merge(a), [seen(r) for r in ranks], WeightedMean())
    gathered = torch.tensor([seen(r).state() for r in ranks], dtype=torch.float64)
    restored = functools.reduce(WeightedMean.merge, map(WeightedMean.from_state, gathered), WeightedMean())
    for merged in (forward, backward, restored):
        assert same(merged.compute(), whole.compute())
        assert (merged.excluded, merged.weight) == (whole.excluded, whole.weight)


def test_it_keeps_what_one_float_loses():
    numbers = [1e16, 1.0, 1e-16, -1e16]
    for order in itertools.permutations(numbers):
        mean = WeightedMean()
        for number in order:
            mean.update(number)
        assert mean.compute() == 0.25 * (1.0 + 1e-16)


def test_nothing_seen_has_no_value():
    mean = WeightedMean()
    assert math.isnan(mean.compute())
    mean.update([NAN, INF, 3.0], [1, 1, 0])
    assert math.isnan(mean.compute())
    assert (mean.excluded, mean.weight) == (3, 0.0)


def test_tokens_weigh_not_batches():
    """Two batches, of one and of three tokens: the mean of batch means would be 2.5."""
    mean = WeightedMean()
    mean.update(torch.tensor(4.0, requires_grad=True), torch.tensor(1))
    mean.update(torch.tensor([1.0], dtype=torch.bfloat16), 3)
    assert mean.compute() == 1.75


def test_one_weight_serves_all_values_and_shapes_are_flattened():
    mean = WeightedMean()
    mean.update(torch.arange(6.0).reshape(2, 3), 2.0)
    mean.update([], [])
    mean.update(torch.tensor([True, False]))
    assert mean.compute() == (2 * 15 + 1) / (2 * 6 + 2)


@pytest.mark.parametrize("weight", [-1.0, NAN, INF])
def test_a_bad_weight_is_refused_and_nothing_is_taken_in(weight):
    mean = seen([(1.0, 1.0)])
    before = mean.state()
    with pytest.raises(InputError, match=r"weight 1 is .*: weights must be finite and not negative"):
        mean.update([5.0, 7.0], [1.0, weight])
    assert mean.state() == before


def refuses(call, match):
    with pytest.raises(InputError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "weight", "match"),
    [
        ([1.0, 2.0, 3.0], [1.0, 1.0], "3 values but 2 weights"),
        ([1.0, 2.0], [], "2 values but 0 weights"),
        (torch.ones(2, 3), torch.ones(3, 2), r"in shapes \[2, 3\] and \[3, 2\]: give one weight, or one for each"),
    ],
)
def test_weights_that_do_not_fit_are_refused(value, weight, match):
    refuses(lambda: WeightedMean().update(value, weight), match)


def test_a_dimension_of_size_one_is_no_riddle():
    mean = WeightedMean()
    mean.update(torch.tensor([1.0, 5.0]), torch.tensor([[3.0], [1.0]]))
    assert mean.compute() == 2.0


NO_NUMBERS = [
    None, "a", [1.0, None], [[1.0], [2.0, 3.0]], {"a": 1}, 1 + 2j, 10**400, torch.ones(2, device="meta"),
    torch.tensor([1 + 2j]), np.array([1 + 2j]), [1 + 2j], torch.ones(2).to_sparse(), torch.eye(2).to_sparse_csr(),
]  # fmt: skip


@pytest.mark.parametrize("what", NO_NUMBERS, ids=lambda what: type(what).__name__)
def test_what_are_not_numbers_is_refused(what):
    mean = seen([(1.0, 1.0)])
    for value, weight, name in ((what, 1.0, "value"), ([1.0, 2.0], what, "weight")):
        refuses(lambda value=value, weight=weight: mean.update(value, weight), f"^WeightedMean: {name} is .*; give a")
    refuses(lambda: WeightedMean.from_state(what), "^WeightedMean: state is .*; give a")
    assert mean.state() == seen([(1.0, 1.0)]).state()


@pytest.mark.parametrize(
    "update",
    [([1e308], [10.0]), ([-1e308], [10.0]), ([1e308] * 10, 1.0), ([1e308, -1e308], [10.0, 10.0]), ([1, 1], 1.7e308)],
)
def test_sums_beyond_a_float_are_refused_and_nothing_is_taken_in(update):
    mean = seen([(3.0, 2.0)])
    refuses(lambda: mean.update(*update), r"^WeightedMean: a sum of value · weight, or of weights, is beyond 1\.8e308")
    assert mean == seen([(3.0, 2.0)])
    large = seen([(1.7e308, 1.0)])
    refuses(lambda: large.merge(large), "is beyond")
    assert large == seen([(1.7e308, 1.0)])


def test_a_state_is_that_of_one_rank():
    one, other = seen([(1.0, 10), (2.0, 10)]), seen([(5.0, 100), (7.0, 100)])
    gathered = torch.tensor(one.state() + other.state(), dtype=torch.float64)  # as all_gather_into_tensor leaves it
    refuses(lambda: WeightedMean.from_state(gathered), r"^from_state: got 14 numbers, a state has 7; .*view\(-1, 7\)")
    parts = [WeightedMean.from_state(row) for row in gathered.view(-1, 7)]
    assert parts[0].merge(parts[1]).compute() == one.merge(other).compute() == 1230 / 220


@pytest.mark.parametrize("state", [[], [1.0, 2.0], [0.0] * 6, [0.0] * 8])
def test_a_state_of_another_length_is_refused(state):
    refuses(lambda: WeightedMean.from_state(state), f"^from_state: got {len(state)} numbers, a state has 7")


@pytest.mark.parametrize(
    "state",
    [
        [NAN] * 7,
        [0.0, 0.0, 0.0, INF, -INF, 0.0, 0.0],
        [0.0] * 6 + [INF],
        [0.0] * 6 + [-1.0],
        [0.0] * 6 + [0.5],
        [1.0, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0],
    ],
)
def test_seven_numbers_that_are_no_state_are_refused(state):
    refuses(lambda: WeightedMean.from_state(state), "is no state; give what")


def test_it_survives_pickling():
    mean = seen([(0.1, 3), (NAN, 2), (1e300, 1)])
    assert pickle.loads(pickle.dumps(mean)) == mean
    assert mean.compute() == pytest.approx(2.5e299)
