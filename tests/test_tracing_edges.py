"""Cases that a single condition tells from their neighbours: without it, each of them would be told wrong."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marks import healthy, leaf, lines_of, verdict
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from nanlab import locate
from nanlab.tracing.undo import freeze

line = lines_of(__file__)
INF, NAN = math.inf, math.nan


# -- names -----------------------------------------------------------------------------------------------------------
def test_what_is_made_of_a_parameter_before_the_step_is_none():
    made = leaf(1.0, 2.0) * NAN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = locate(lambda: (made * 2).sum())
    assert (report.cause, report.op) == ("bad_input", "made")


def test_a_healthy_row_does_not_lend_its_name_to_a_bad_one():
    whole = torch.tensor([[1.0, 2], [3, NAN]])

    def total(good, rest):
        return rest.sum()

    assert locate(lambda: total(whole[0, :1], whole[1:])).op == "rest"


def test_a_weight_whose_numbers_were_exchanged_is_a_weight():
    w = torch.ones(3, requires_grad=True)

    def step():
        w.data = torch.from_numpy(np.full(3, NAN, dtype=np.float32))
        (w * 2).sum().backward()

    report = locate(step)
    assert (report.cause, report.op) == ("bad_state", "w")


def test_the_graph_of_a_loss_from_before_the_step_has_no_forward_line():
    loss = torch.sqrt(leaf(0.0, 1.0)).sum()
    report = locate(loss.backward)
    assert report.cause == "gradient_at_edge"
    assert "SqrtBackward0)" in report.story[0]


@pytest.mark.parametrize("grad", [False, True])
def test_what_the_step_does_first_is_not_the_forward_line_of_an_older_graph(grad):
    root = torch.sqrt(leaf(0.0, 1.0))

    def step():
        with torch.set_grad_enabled(grad):
            weight = torch.ones(2)
        (root * weight).sum().backward()  # through the older graph

    report = locate(step)
    assert report.source == line("through the older graph"), str(report)
    assert "SqrtBackward0)" in report.story[0]


# -- operations ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inference", [False, True])
def test_an_operation_of_operations_is_one(inference):
    q = torch.full((1, 1, 16, 16), 1e30)

    def step():
        with torch.inference_mode(inference):
            return flex_attention(q, q, q).sum()  # flex attention

    report = locate(step)
    assert (report.found, report.source) == (True, line("flex attention"))


def test_an_operation_that_writes_and_refuses_is_not_tried_again():
    x, p = torch.full((3,), 7.0), torch.tensor([NAN, 0.5, 0.5])

    def step():
        x.bernoulli_(p)

    assert isinstance(locate(step).exception, RuntimeError)
    assert x.tolist() == [7, 7, 7]


def test_a_generator_of_ones_own_is_not_advanced_by_a_second_look():
    def draw() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        mean = torch.zeros(3) / torch.tensor([0.0, 1, 1])
        torch.normal(mean * torch.tensor([1.0, INF, 1]), torch.ones(3), generator=generator)
        return torch.rand(3, generator=generator)

    drawn = []
    locate(lambda: drawn.append(draw()))
    assert torch.equal(drawn[0], draw())


def test_a_buffer_that_is_written_three_times_keeps_three_histories():
    def step():
        buffer, zero = torch.zeros(3), torch.zeros(1)
        buffer[0:1] = torch.log(zero)
        buffer[1:2] = zero / zero  # the second part
        buffer[2:3] = torch.exp(zero + 200)
        return buffer[1:2].sum()

    assert verdict(locate(step))[::2] == ("zero_over_zero", line("the second part"))


def test_a_birth_that_only_the_recomputation_sees_is_told_as_such():
    w, runs = leaf(1.0, 2.0), []

    def layer(x):
        runs.append(1)
        x = x * (len(runs) == 1)
        return torch.log(x) * x  # second run

    report = locate(lambda: checkpoint(layer, w, use_reentrant=False).sum().backward())
    assert (report.phase, report.source) == ("forward", line("second run"))
    assert "(recomputed for checkpointing)" in report.story[0]


# -- causes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (lambda: torch.full((1, 2), -INF) @ torch.tensor([[1.0], [-1.0]]), "inf_minus_inf"),
        (lambda: torch.full((2, 2), -INF).sum(1) / torch.full((2, 2), INF).sum(1), "inf_minus_inf"),
        (lambda: ((torch.ones(3) - 1) / torch.zeros(3, dtype=torch.long)).sum(), "empty_mean"),
        (lambda: torch.logsumexp(torch.zeros(2, 0), 1).sum(), "unknown"),
        (lambda: torch.log_softmax(torch.tensor([6e4, -6e4, 0.5]).half(), 0), "log_of_zero"),
        (lambda: torch.ones(3).cumsum(0).fill_(NAN).sum(), "bad_input"),
        (lambda: torch.ones(3).sum().fill_(INF), "bad_input"),
    ],
)
def test_a_cause_that_is_not_its_neighbour(step, cause):
    assert locate(step).cause == cause


def test_a_bias_that_came_in_with_its_mask_did_not_mask_the_row():
    bias = torch.tensor([[0.5, -INF], [-INF, -INF]])
    report = locate(lambda: torch.softmax(torch.ones(2, 2) + bias, -1).sum())
    assert (report.cause, report.rows) == ("masked_row", [1])


def test_a_mask_of_nan_is_none():
    q, keep = torch.randn(1, 1, 4, 4), torch.ones(4, 4).tril()

    def step():
        mask = (1 - keep) * -INF  # 0 times inf
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum()

    assert locate(step).source == line("0 times inf")


def test_gathered_counts_are_counts():
    hits, counts, of = torch.zeros(3), torch.tensor([2.0, 0, 1]), torch.tensor([0, 1])
    assert locate(lambda: (hits[of] / counts[of]).sum()).cause == "empty_mean"


def test_an_optimizer_without_eps_underflows_too():
    class Rooted(torch.optim.Optimizer):
        def step(self):
            p = self.param_groups[0]["params"][0]
            self.state[p]["square"] = p.grad**2
            p.data.sub_(p.grad / self.state[p]["square"].sqrt())

    w = leaf(1.0, 2.0, dtype=torch.float16)
    optimizer = Rooted([w], {})

    def step():
        (w * 1e-5).sum().backward()
        optimizer.step()

    assert locate(step).cause == "optimizer_underflow"


def test_an_overflow_of_forward_is_told_although_a_scaler_skips_its_step():
    w = leaf(3e4, 1.0)
    optimizer, scaler = torch.optim.SGD([w], lr=0.1), torch.amp.GradScaler("cpu")

    def step():
        scaler.scale((w.half() * 4).float().sum()).backward()  # forward overflow
        scaler.step(optimizer)
        scaler.update()

    assert verdict(locate(step)) == ("overflow", "forward", line("forward overflow"))


# -- what is no finding ----------------------------------------------------------------------------------------------
def test_a_nan_of_the_code_that_the_code_looks_at_is_not_mentioned():
    def step():
        gaps = torch.full((3,), NAN)
        return 1 if torch.isnan(gaps).any() else 0

    report = locate(step)
    assert healthy(report)
    assert report.explanation == ""


def test_a_model_that_is_returned_is_no_number():
    model = nn.Linear(2, 2)

    def step():
        with torch.no_grad():
            model.weight.copy_(torch.log(model.weight * 0))
        return model

    assert locate(step, model=model).story[-1] == "It surfaced in parameter weight."


def test_a_result_may_hold_words():
    assert healthy(locate(lambda: {"words": np.array(["a", "b"]), "n": np.arange(2)}))


def test_an_optimizer_may_hold_an_empty_parameter():
    w = leaf(1.0, 2.0)
    optimizer = torch.optim.SGD([w, nn.Parameter(torch.zeros(0))], lr=0.1)

    def step():
        w.sum().backward()
        optimizer.step()

    assert healthy(locate(step))


def test_numbers_that_an_expanded_tensor_repeats_are_put_back():
    rows = torch.arange(4.0).reshape(1, 4).expand(3, 4)
    undo = freeze([[rows]])
    rows[:1].fill_(9)
    undo()
    assert rows[2].tolist() == [0, 1, 2, 3]


def test_a_tensor_with_a_history_is_frozen_without_a_warning():
    made = leaf(1.0) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        freeze([[made]])()
