"""Two faults in one tensor, of which one is dropped before the loss: the other is to blame, whichever came first."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from marks import lines_of
from torch import nn

from nanlab import locate
from nanlab.tracing.causes import Birth

line = lines_of(__file__)

FAULTS = {  # (operation, what it is given), for a row of ones
    "log_of_zero": lambda row: (torch.xlogy, -row, row - 1),
    "zero_over_zero": lambda row: (torch.div, row - 1, row - 1),
    "overflow": lambda row: (torch.exp, row * 200),
    "division_by_zero": lambda row: (torch.div, row, row - 1),
}


def first(fault, row):
    operation, *given = FAULTS[fault](row)
    return operation(*given)  # the first fault


def second(fault, row):
    operation, *given = FAULTS[fault](row)
    return operation(*given)  # the second fault


def written(a, b, good):
    t = torch.zeros(3, 4) + good
    t[0], t[1] = a, b
    return t


def copied_into_views(a, b, good):
    t = good.repeat(3, 1)
    t[0].copy_(a)
    t.narrow(0, 1, 1).copy_(b[None])
    return t


def added_up(a, b, good):
    t = F.pad(a[None], (0, 0, 0, 2)) + good
    t += F.pad(b[None], (0, 0, 1, 1))
    return t


def chosen(a, b, good):
    row = torch.arange(3)[:, None]
    return torch.where(row == 0, a, torch.where(row == 1, b, good))


ROWS = torch.arange(3)[:, None].repeat(1, 4)
WAYS = {
    "stack": lambda a, b, good: torch.stack([a, b, good]),
    "cat": lambda a, b, good: torch.cat([a[:, None], b[:, None], good[:, None]], 1).T,
    "index_put": lambda a, b, good: good.repeat(3, 1).index_put((torch.tensor([0, 1]),), torch.stack([a, b])),
    "scatter": lambda a, b, good: torch.zeros(3, 4).scatter(0, ROWS, chosen(a, b, good)),
    "a product": lambda a, b, good: torch.stack([torch.ones(4)] * 3) * torch.stack([a, b, good]),
    "a matrix product": lambda a, b, good: torch.stack([a, b, good]) @ (torch.eye(4) + 1),
    "rows normalised": lambda a, b, good: torch.stack([a, b, good]).softmax(-1),
    "a sum by row": lambda a, b, good: torch.stack([a, b, good]).sum(1, keepdim=True),
    "written": written,
    "copied into views": copied_into_views,
    "added up": added_up,
    "chosen": chosen,
}
DROPS = {
    "by index": lambda t, keep: t[keep],
    "by where": lambda t, keep: torch.where(keep[:, None], t, 0.0),
    "by a slice": lambda t, keep: t[:1] if keep[0] else t[1:],
    "by writing over it": lambda t, keep: t.clone().masked_fill_(~keep[:, None], 0.0),
    "after more of it": lambda t, keep: (t.flip(1) * 1.5 - 1)[keep].T.contiguous().view(-1),
}
PAIRS = [("log_of_zero", "overflow"), ("zero_over_zero", "zero_over_zero"), ("division_by_zero", "zero_over_zero")]


@pytest.mark.parametrize("harmful", ["first", "second"])
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@pytest.mark.parametrize(("way", "drop"), list(itertools.product(WAYS, DROPS)))
def test_the_one_that_is_kept_is_to_blame(way, drop, pair, harmful):
    weight = torch.ones(4, requires_grad=True)
    keep = torch.tensor([harmful == "first", harmful == "second", True])

    def step():
        a, b = first(pair[0], weight.detach()), second(pair[1], weight.detach())
        return DROPS[drop](WAYS[way](a, b, weight), keep).sum()

    report = locate(step)
    assert report.source == line(f"the {harmful} fault"), str(report)
    assert report.cause == pair[harmful == "second"]
    assert report.others == []


@pytest.mark.parametrize("way", WAYS)
def test_both_kept_are_both_told(way):
    good = torch.ones(4)

    def step():
        return WAYS[way](first("division_by_zero", good), second("overflow", good), good).sum()

    report = locate(step)
    assert [report.source, *(o.source for o in report.others)] == [line("the first fault"), line("the second fault")]


def test_missing_rewards_are_not_to_blame_for_a_group_without_spread():
    """In GRPO NaN marks a reward that is missing; beside it a group of equal rewards is divided by its spread of 0."""
    rewards = torch.tensor([[1.0, math.nan, 0.0], [2.0, 2.0, 2.0]])
    log_probs = torch.zeros(2, 3, requires_grad=True)

    def step():
        centred = rewards - rewards.nanmean(1, keepdim=True)
        spread = centred.square().nanmean(1, keepdim=True).sqrt()
        advantages = centred / spread  # no spread in the second group
        valid = ~rewards.isnan()
        (-advantages[valid] * log_probs[valid]).mean().backward()

    report = locate(step, rewards=rewards)
    assert (report.cause, report.source, report.rows) == ("zero_over_zero", line("no spread in the second group"), [1])
    assert report.others == []


def test_a_bad_row_that_is_left_out_does_not_hide_an_overflow_beside_it():
    x, weight = torch.ones(3, 4), nn.Parameter(torch.full((4, 2), 1e38))
    x[0], x[2] = math.nan, 100

    def step():
        hidden = x @ weight  # two rows overflow beside a row of NaN
        return (hidden[1:] * 1e-30).sum()

    report = locate(step, x=x)
    wanted = ("overflow", "inf", line("two rows overflow beside a row of NaN"), [1, 2])
    assert (report.cause, report.kind, report.source, report.rows) == wanted, str(report)


def test_of_three_in_one_tensor_the_two_that_it_takes_are_to_blame():
    """A row of a softmax is NaN only where all of it is −inf; here one half of it and the other come from two lines."""
    large = torch.full((1,), 200.0, requires_grad=True)

    def step():
        dropped = -torch.exp(large)
        left = -torch.exp(large)  # one half
        right = -torch.exp(large)
        rows = torch.stack([torch.cat([dropped, large]), torch.cat([left, right])])
        return rows.softmax(1)[1].sum()

    report = locate(step)
    assert (report.cause, report.source) == ("overflow", line("one half")), str(report)


def test_a_ban_of_tokens_is_not_to_blame_for_a_probability_of_zero_in_the_same_logits():
    logits, chosen = torch.zeros(2, 5, requires_grad=True), torch.tensor([1, 2])

    def step():
        banned = logits.masked_fill(torch.arange(5) == 4, -torch.inf)
        certain = torch.stack([banned[0], torch.where(torch.arange(5) == 0, banned[1], banned[1] - 1e4)])
        log_probs = certain.softmax(-1).log()  # the chosen token of row 1 has probability 0
        return log_probs.gather(1, chosen[:, None]).mean()

    report = locate(step)
    wanted = ("log_of_zero", line("the chosen token of row 1 has probability 0"))
    assert (report.cause, report.source) == wanted, str(report)


def what_is_left(run):
    """The numbers after operations that write, draw and update buffers, on rows of NaN, of inf and healthy ones."""
    torch.manual_seed(0)
    bad, norm, left = torch.ones(4, 3), nn.BatchNorm1d(3, momentum=0.5), []
    bad[0], bad[1] = math.nan, math.inf

    def step():
        t = torch.zeros(4, 3).copy_(bad).mul_(2.0)
        t.index_add_(0, torch.tensor([2, 3]), bad[1:3]).cumsum_(1)
        dropped, _ = torch.native_dropout(t, 0.5, True)  # F.dropout on a GPU
        left.extend([t, dropped, norm(t), norm.running_mean, norm.running_var, torch.rand(2)])

    run(step)
    return left


def test_an_operation_done_again_changes_nothing():
    for plain, traced in zip(what_is_left(lambda step: step()), what_is_left(locate), strict=True):
        torch.testing.assert_close(traced, plain, rtol=0, atol=0, equal_nan=True)


OPTIMIZERS = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, foreach=False, fused=False),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_one_operation_of_the_optimizer_writes_is_no_input_of_it(make):
    """The averages of a first step have no name and no history yet; the same call fills and reads them."""
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    optimizer = make(layer.parameters())

    def step():
        loss = layer(x).mean() / (x * 0).sum()  # the only fault
        loss.backward()
        optimizer.step()

    report = locate(step)
    assert (report.cause, report.source) == ("division_by_zero", line("the only fault"))
    assert report.others == []


# -- operations that are not simply done again ------------------------------------------------------------------------
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_and_dropout_keep_the_rows_of_a_batch_apart(dropout):
    x = torch.randn(3, 2, 4, 8)
    x[0, 0, 1] = math.nan

    def step():
        late = (x[1] * 0 + 200).exp()  # the row that is kept
        z = F.dropout(torch.stack([x[0], late, x[2]]), dropout)
        return F.scaled_dot_product_attention(z, z, z)[1:].mean()

    report = locate(step, x=x)
    assert (report.cause, report.source, report.others) == ("overflow", line("the row that is kept"), []), str(report)


def test_matrices_of_a_batch_are_kept_apart():
    """A matrix of equal numbers in the place of NaN would be singular, and its solution a birth of its own."""
    matrices = torch.stack([torch.full((3, 3), math.nan), torch.rand(3, 3)])

    def step():
        spoilt = torch.stack([matrices[0], matrices[1] * 0 / (matrices[1] * 0)])  # the second matrix
        return torch.linalg.solve(spoilt, torch.ones(2, 3, 1))[1].sum()

    report = locate(step, matrices=matrices)
    assert (report.cause, report.source) == ("zero_over_zero", line("the second matrix")), str(report)
    assert report.others == []


def test_what_cannot_be_done_again_is_not_told_apart(monkeypatch):
    monkeypatch.setattr(Birth, "again", lambda *_: None)

    def step():
        return torch.stack([first("log_of_zero", torch.ones(4)), second("zero_over_zero", torch.ones(4))])[1].sum()

    report = locate(step)
    told = {report.cause, *(other.cause for other in report.others)}
    assert told == {"log_of_zero", "zero_over_zero"}, str(report)


def test_a_loop_over_many_samples_is_one_fault():
    x, weight, lengths = torch.rand(12, 4), torch.ones(4, requires_grad=True), torch.tensor([0] * 10 + [3, 4])

    def step():
        rows = [(x[i, :n] * weight[:n]).mean() for i, n in enumerate(lengths)]
        rows[10] = (weight * 200).exp().mean()  # beside ten empty completions
        return torch.stack(rows)[lengths > 0].mean()

    report = locate(step)
    assert (report.cause, report.source) == ("overflow", line("beside ten empty completions")), str(report)


@pytest.mark.parametrize("pick", [lambda t: t.topk(4).values[1:], lambda t: t.sort(descending=True).values[1:4]])
def test_what_is_sorted_keeps_its_history(pick):
    losses, weight = torch.tensor([math.nan, 1.0, 2.0, 3.0, 4.0]), torch.ones(5, requires_grad=True)

    def step():
        spoilt = losses * weight + torch.where(torch.arange(5) == 3, (weight * 200).exp(), 0.0)  # the second worst
        return pick(spoilt).mean()

    report = locate(step, losses=losses)
    assert (report.cause, report.source) == ("overflow", line("the second worst")), str(report)


def test_a_finite_number_in_place_of_a_bad_one_makes_no_birth_of_its_own():
    exponents = torch.tensor([math.nan, 2.0])  # (−2)^0.5 would be NaN as well
    report = locate(lambda: (torch.tensor([-2.0, 3.0]) ** exponents).sum(), exponents=exponents)
    assert (report.cause, report.op) == ("bad_input", "batch exponents"), str(report)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_gradient_left_over_from_before_is_state(make):
    good, spoilt = (nn.Parameter(torch.ones(3)) for _ in range(2))
    spoilt.grad = torch.tensor([math.nan, 0.0, 0.0])
    optimizer = make([good, spoilt])

    def step():
        good.sum().backward()
        optimizer.step()

    report = locate(step)
    assert (report.cause, report.op) == ("bad_state", "gradient of spoilt, left over from before"), str(report)
    assert report.others == []


def test_a_weight_that_was_bad_before_and_is_not_used_does_not_come_first():
    table = nn.Embedding(6, 4).requires_grad_(False)
    table.weight[5] = math.inf
    weight = torch.ones(4, requires_grad=True)

    def step():
        hidden = table(torch.tensor([5, 1, 2]))[1:] * weight
        return (hidden / (hidden * 0)).mean()  # this broke the loss

    report = locate(step)
    assert (report.cause, report.source) == ("division_by_zero", line("this broke the loss")), str(report)
    assert [other.cause for other in report.others] == ["bad_state"]


def test_the_gradient_of_a_number_that_was_bad_is_no_birth_of_its_own():
    """Which element is the largest is asked by ==, so that the backward of amax() divides by a count of 0."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    x[0] = math.nan
    report = locate(lambda: layer(x).amax(1).sum().backward(), x=x)
    assert (report.cause, report.others) == ("bad_input", []), str(report)
