"""Kinds of fault beyond the zoo: what a step makes for itself, attention that overflows, a run that diverges."""

import copy
import linecache
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from marks import healthy, lines_of
from torch import nn

from nanlab import locate
from nanlab.tracing.causes import CAUSES

line = lines_of(__file__)
INF, NAN = math.inf, math.nan


# -- a run that diverges ---------------------------------------------------------------------------------------------
def diverging(model: nn.Module, loss, lr: float):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step():
        for _ in range(40):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

    return step


@pytest.mark.parametrize("lr", [1.0, 10.0, 100.0, 1e3, 1e5])
def test_a_learning_rate_far_too_high_is_an_overflow_with_its_growth(lr):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 1)]
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    report = locate(diverging(nn.Sequential(*layers), lambda m: F.mse_loss(m(x), y), lr))
    assert report.cause == "overflow", str(report)
    assert report.growth[-1] > 1e4 * report.growth[0]


def test_the_backward_of_a_norm_that_overflows_is_no_edge():
    x = (torch.arange(8.0)[None] * 1e15).requires_grad_()
    norm = nn.LayerNorm(8)

    def step():
        (norm(x) * 1e38).backward(torch.linspace(-3, 3, 8)[None] * 1e0)  # backward of a norm

    report = locate(step)
    assert (report.cause, report.phase) == ("overflow", "backward"), str(report)


@pytest.mark.parametrize("lr", [10.0, 100.0, 1e6])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_transformer_that_diverges_does_not_blame_its_mask(lr, attention):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=64,
        max_position_embeddings=32, attn_implementation=attention,
    )  # fmt: skip
    ids, mask = torch.randint(3, 64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    loss = lambda m: m(input_ids=ids, attention_mask=mask, labels=ids).loss
    report = locate(diverging(GPTNeoXForCausalLM(config), loss, lr))
    assert report.cause == "overflow", str(report)
    assert "already" not in report.story[0]
    assert "constant" not in str(report.story)
    assert report.growth[-1] > 100 * report.growth[0]


@pytest.mark.parametrize("mask", [None, torch.full((6, 6), -INF).triu(1)], ids=["no mask", "mask"])
def test_scores_that_overflow_inside_an_attention_kernel(mask):
    q = (torch.randn(2, 2, 6, 4) * 1e20).requires_grad_()
    report = locate(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward())  # kernel
    assert (report.cause, report.source) == ("overflow", line("kernel"))
    assert "attention kernel" in report.explanation
    assert not any("already" in sentence for sentence in report.story)


# -- made inside the step --------------------------------------------------------------------------------------------
def embedding_of_the_step():
    table = nn.Embedding(4, 3)
    table.weight.data[1] = NAN
    return table(torch.tensor([0, 1])).sum()


def weight_used_by_a_function():
    layer = nn.Linear(4, 3)
    layer.weight.data[1] = NAN
    return F.linear(torch.ones(2, 4), layer.weight, layer.bias).sum()


def parameter_of_the_step():
    w = nn.Parameter(torch.ones(3))
    with torch.no_grad():
        w[1] = NAN
    return (w * 2).sum()


def loaded_inside():
    layer = nn.Linear(4, 3)
    layer.load_state_dict({"weight": torch.full((3, 4), NAN), "bias": torch.zeros(3)})
    return layer(torch.ones(2, 4)).sum()


def buffer_of_the_step():
    norm = nn.BatchNorm1d(3).eval()
    norm.running_var[2] = NAN
    return norm(torch.ones(2, 3)).sum()


@pytest.mark.parametrize(
    ("step", "name", "rows"),
    [
        (embedding_of_the_step, "parameter table.weight", [1]),
        (weight_used_by_a_function, "layer.weight", [1]),
        (parameter_of_the_step, "w", [1]),
        (loaded_inside, "parameter layer.weight", [0, 1, 2]),
        (buffer_of_the_step, "buffer norm.running_var", [2]),
    ],
)
def test_a_weight_made_inside_the_step_is_bad_state_by_its_name(step, name, rows):
    report = locate(step)
    assert (report.cause, report.phase, report.op, report.rows) == ("bad_state", "state", name, rows), str(report)
    assert name in report.story[0]


class Holder:
    def __init__(self, **values):
        vars(self).update(values)


@pytest.mark.parametrize(
    ("hold", "name"),
    [
        (lambda t: [t], "held[0]"),
        (lambda t: {"x": [t]}, "held['x'][0]"),
        (lambda t: Holder(x=t), "held.x"),
        (lambda t: (torch.ones(1), t), "held[1]"),
    ],
)
def test_a_tensor_is_named_where_it_is_held(hold, name):
    first = lambda h: next(
        t for t in (h if isinstance(h, (list, tuple)) else vars(h).values()) if bool(t.isnan().any())
    )

    def step():
        held = hold(torch.tensor([1.0, NAN, 3.0]))
        x = held["x"][0] if isinstance(held, dict) else first(held)
        del x
        return (held["x"][0] if isinstance(held, dict) else first(held)).mul(2).sum()

    report = locate(step)
    assert (report.cause, report.op, report.rows) == ("bad_input", name, [1]), str(report)


def test_a_view_goes_by_the_name_of_the_whole_and_its_rows():
    data = torch.ones(6, 4)
    data[4, 2] = NAN
    report = locate(lambda: (data[3:5] * 2).sum())
    assert (report.op, report.rows) == ("data", [4])


# -- masks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("named", [True, False])
def test_a_mask_of_minus_inf_in_the_batch_is_deliberate_and_has_a_name(named):
    batch = {"attention_mask": torch.full((2, 1, 4, 4), -INF).triu(1)}
    batch["attention_mask"][1, 0, 2] = -INF
    scores = torch.randn(2, 3, 4, 4, requires_grad=True)

    def step():
        mask = batch["attention_mask"].expand(2, 3, 4, 4)
        return torch.softmax(scores + mask, -1).sum()  # masked by the batch

    report = locate(step, **({"batch": batch} if named else {}))
    assert (report.cause, report.source, report.rows) == ("masked_row", line("masked by the batch"), [1])
    assert "unnamed" not in str(report)
    assert "attention_mask" in report.story[0] or "mask was" in report.story[0]


def test_log_softmax_hands_a_mask_on_and_the_product_makes_the_nan():
    logits, target = torch.randn(2, 4, requires_grad=True), F.one_hot(torch.tensor([0, 2]), 4).float()

    def step():
        masked = logits.masked_fill(torch.tensor([False, True, False, False]), -INF)
        loss = -(target * masked.log_softmax(-1)).sum()  # zero of a target
        loss.backward()

    report = locate(step)
    assert (report.cause, report.kind, report.source) == ("zero_times_inf", "nan", line("zero of a target"))


# -- the optimizer ---------------------------------------------------------------------------------------------------
class Unit(torch.optim.Optimizer):
    """A step of length one: the gradient divided by its norm."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p -= 0.1 * p.grad / p.grad.norm()  # length of nothing


@pytest.mark.parametrize("settings", [{}, {"eps": 1e-8}])
def test_an_optimizer_that_divides_by_a_norm_of_zero_has_not_lost_its_eps(settings):
    w = nn.Parameter(torch.ones(3))
    optimizer = Unit([w], **settings)

    def step():
        (w * 0).sum().backward()
        optimizer.step()

    report = locate(step)
    assert (report.cause, report.phase, report.source) == ("zero_over_zero", "optimizer", line("length of nothing"))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("slope", [0.0, 1e-25])
def test_adagrad_without_an_eps_underflows_also_where_it_is_fused(fused, slope):
    w = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adagrad([w], lr=0.1, eps=0, fused=fused)

    def step():
        (w * slope).sum().backward()
        optimizer.step()

    report = locate(step)
    assert (report.cause, report.phase) == ("optimizer_underflow", "optimizer"), str(report)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("slope", [0.0, 1.0])
@pytest.mark.parametrize("wrapped", [float, torch.tensor])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RAdam])
def test_a_learning_rate_that_is_not_finite_is_named(value, slope, wrapped, optimizer):
    w = nn.Parameter(torch.ones(3))
    moved = optimizer([w], lr=0.1, foreach=False)
    moved.param_groups[0]["lr"] = wrapped(value)

    def step():
        (w * slope).sum().backward()
        moved.step()

    report = locate(step)
    assert (report.cause, report.phase, report.op) == ("bad_state", "state", "lr of the optimizer"), str(report)


# -- what the report says --------------------------------------------------------------------------------------------
def test_the_text_and_the_card_show_the_line_and_its_function():
    def step():
        return torch.log(torch.zeros(2)).sum()  # shown

    report = locate(step)
    said = f"{report.source}  in step():  return torch.log(torch.zeros(2)).sum()  # shown"
    assert f"  Line: {said}" in str(report)
    assert said in report._repr_html_()


def test_a_cell_shows_its_line_although_it_is_no_file():
    file, text = "<ipython-input-9-abc>", "def step():\n    x = torch.zeros(2)\n    return (x / x).sum()\n"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope = {"torch": torch}
    exec(compile(text, file, "exec"), scope)
    report = locate(scope["step"])
    assert report.source == "cell:3"
    assert "Line: cell:3  in step():  return (x / x).sum()" in str(report)


def test_every_gradient_that_it_surfaced_in_is_named():
    w = torch.tensor([100.0, 1.0], requires_grad=True)

    def step():
        loss = (w - 2 + 0.0 * w.exp()).mean()
        loss.backward()

    report = locate(step)
    assert report.cause == "overflow"
    assert "gradient of w" in report.story[-1]
    assert report.others == []


def test_the_advice_for_zero_over_zero_holds_for_every_way_there():
    advice = CAUSES["zero_over_zero"].advice
    assert "correction=0" not in advice
    assert "their advantage is 0" in advice
    assert "No eps makes it right" in advice


def test_an_overflow_beside_a_mask_is_still_an_overflow():
    scores = torch.tensor([[300.0, 1.0, 2.0], [1.0, 2.0, 3.0]], requires_grad=True)

    def step():
        masked = scores.masked_fill(torch.ones(2, 3, dtype=torch.bool).triu(1), -INF)
        grown = torch.exp(masked)  # beside a mask
        (grown / grown.sum(-1, keepdim=True)).sum().backward()

    report = locate(step)
    assert (report.cause, report.kind, report.rows) == ("overflow", "inf", [0]), str(report)
    assert report.source == line("beside a mask")
    assert "times that" not in report.explanation or "1.94e+130" in report.explanation


def test_an_entropy_with_a_masked_answer_that_where_drops_is_an_edge():
    logits = torch.randn(2, 4, requires_grad=True)

    def step():
        allowed = torch.tensor([True, True, False, True])
        log_probs = logits.masked_fill(~allowed, -INF).log_softmax(-1)
        products = torch.exp(log_probs) * log_probs  # slope of a masked answer
        torch.where(allowed, products, 0.0).sum().backward()

    report = locate(step)
    assert (report.cause, report.phase) == ("gradient_at_edge", "backward")
    assert report.source == line("slope of a masked answer")


def test_a_number_that_the_step_writes_into_a_tensor_goes_by_the_name_of_the_tensor():
    layer = nn.Conv2d(3, 4, 3)

    def step():
        image = torch.randn(2, 3, 8, 8)
        image[1, 2, 3, 3] = NAN
        product = image * 2
        return F.relu(layer(product)).mean()

    report = locate(step)
    assert (report.cause, report.op, report.rows) == ("bad_input", "image", [1]), str(report)


class Unwilling(dict):
    """A mapping that loads its entries when asked for them, and fails."""

    def items(self):
        raise ValueError("not here")


def test_a_variable_that_cannot_be_read_does_not_hide_the_name():
    unwilling, x = Unwilling(a=1), torch.tensor([1.0, NAN])

    def step():
        assert unwilling is not None
        return (x * 2).sum()

    assert (locate(step).cause, locate(step).op) == ("bad_input", "x")


def test_a_row_of_scores_that_overflowed_is_not_a_masked_row():
    scores = (torch.rand(2, 3) + 1).requires_grad_()

    def step():
        scaled = -scores * 3e38 * 10  # below the smallest number
        torch.softmax(scaled, -1).sum().backward()

    report = locate(step)
    assert (report.cause, report.source) == ("overflow", line("below the smallest number")), str(report)


def test_complex_numbers_are_no_count():
    z = torch.complex(torch.ones(3), torch.ones(3)).requires_grad_()
    report = locate(lambda: (z[:1] * 0 / (z[:1] * 0)).abs().sum())
    assert report.cause == "zero_over_zero", str(report)


def test_what_detect_anomaly_stops_is_explained():
    w = torch.tensor([0.0, 1.0], requires_grad=True)

    def step():
        with torch.autograd.detect_anomaly(check_nan=True):
            (torch.sqrt(w) * 0).sum().backward()  # stopped by detect_anomaly

    report = locate(step)
    assert isinstance(report.exception, RuntimeError)
    assert (report.cause, report.source) == ("gradient_at_edge", line("stopped by detect_anomaly")), str(report)


class KeepsItsMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((6, 6), -INF).triu(1))
        self.bias = nn.Parameter(torch.full((6, 6), -INF).triu(1), requires_grad=False)

    def forward(self, x):
        h = self.layer(x)
        return (torch.softmax(h @ h.transpose(-1, -2) + self.mask + self.bias, -1) @ h).sum()


def test_a_mask_kept_as_a_buffer_or_as_a_frozen_parameter_is_no_finding():
    model, x = KeepsItsMask(), torch.randn(2, 6, 4)
    assert not locate(lambda: model(x).backward(), model=model).found
    assert not locate(lambda: KeepsItsMask()(x).backward()).found


def test_a_report_changes_no_random_number_and_runs_no_custom_operation_twice():
    calls = []

    @torch.library.custom_op("nanlab_test::boom", mutates_args=())
    def boom(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 1e30 * 1e30

    def step():
        lost = F.dropout(torch.full((4,), 3e38) * 2, 0.5).sum() + boom(torch.ones(3)).sum()
        return torch.rand(3), lost

    drawn = []
    torch.manual_seed(1)
    F.dropout(torch.ones(4), 0.5)
    expected = torch.rand(3)
    torch.manual_seed(1)
    report = locate(lambda: drawn.append(step()) or drawn[0][1])
    assert report.cause == "overflow"
    assert torch.equal(drawn[0][0], expected)
    assert calls == [1]


# -- what torch's own table of operators has shown -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (lambda: torch.linalg.det(torch.eye(4) * 1e30), "overflow"),  # a polynomial: it has no pole
        (lambda: torch.special.i1(torch.tensor([1.0, 200])).sum(), "overflow"),
        (lambda: torch.special.modified_bessel_i0(torch.tensor([1.0, 200])).sum(), "overflow"),
        (lambda: torch.special.erfcx(torch.tensor([1.0, -20])).sum(), "overflow"),
        (lambda: torch.special.log_ndtr(torch.tensor([1.0, -1e30])).sum(), "overflow"),
        (lambda: torch.mvlgamma(torch.tensor([0.0, 1]), 1).sum(), "unknown"),  # a pole
        (lambda: torch.special.bessel_y0(torch.tensor([0.0, 1])).sum(), "unknown"),
        (lambda: torch.special.modified_bessel_k0(torch.tensor([0.0, 1])).sum(), "unknown"),
    ],
)
def test_what_grows_without_bound_overflows_and_a_pole_does_not(step, cause):
    report = locate(step)
    assert (report.cause, report.kind) == (cause, "inf"), str(report)


def counted(x: torch.Tensor) -> torch.Tensor:
    return torch.histogram(x, bins=torch.tensor([0.0, 1, 2]), density=True).hist.sum()


def by_segment(how: str, size: float = 1.0) -> torch.Tensor:
    return torch.segment_reduce(torch.tensor([size, size, 1]), how, lengths=torch.tensor([3, 0])).sum()


@pytest.mark.parametrize(
    ("step", "cause", "kind"),
    [
        (lambda: counted(torch.full((3,), 9.0)), "zero_over_zero", "nan"),
        (lambda: by_segment("mean"), "empty_mean", "nan"),
        (lambda: by_segment("max"), "empty_mean", "inf"),
        (lambda: by_segment("min"), "empty_mean", "inf"),
        (lambda: by_segment("sum", 3e38), "overflow", "inf"),
        (lambda: torch.logdet(-torch.eye(3)), "log_of_zero", "nan"),
        (lambda: torch.where(torch.eye(3) > 0, torch.eye(3), NAN).sum(), "bad_input", "nan"),  # a number of the code
    ],
)
def test_an_operation_that_divides_or_takes_a_logarithm_inside(step, cause, kind):
    report = locate(step)
    assert (report.cause, report.kind) == (cause, kind), str(report)


def test_the_logarithm_of_a_determinant_makes_no_later_nan_its_own():
    x, there = torch.eye(2, requires_grad=True), torch.tensor([True, False])

    def step():
        loss = torch.logdet(x) + x.sum()
        return {"loss": loss, "by column": torch.where(there, x.detach().sum(0), NAN)}  # a sentinel handed back

    assert not (report := locate(step)).found, str(report)
    report = locate(lambda: sum(v.sum() for v in step().values()))
    assert (report.cause, report.phase) == ("bad_input", "data"), str(report)


def largest(dtype=torch.float32):
    return torch.finfo(dtype).max


@pytest.mark.parametrize(
    ("bound", "apart"),
    [
        (torch.nan_to_num, True),
        (torch.nan_to_num, False),
        (lambda t: torch.minimum(torch.tensor(largest()), t), False),
        (lambda t: torch.zeros(3).add_(torch.nan_to_num(t)), False),
    ],
    ids=["apart", "its own", "minimum, the second", "added in place"],
)
def test_an_inf_made_finite_is_behind_an_overflow_only_of_what_it_went_into(bound, apart):
    w = torch.ones(3, requires_grad=True)

    def step():
        shown = bound(1 / torch.tensor([1.0, 0.0, 2.0]))
        scores = w.masked_fill(torch.tensor([False, True, False]), -largest()) if apart else w * shown
        scores = scores / 0.5
        return (scores.softmax(-1) * scores).sum()

    report = locate(step)
    assert (report.cause, report.rows) == ("overflow" if apart else "division_by_zero", [1]), str(report)


def test_an_inf_made_finite_is_not_behind_a_division_by_0_nor_behind_what_was_small_since():
    bounded = lambda: torch.nan_to_num(1 / torch.tensor([1.0, 0.0, 2.0]))
    report = locate(lambda: (bounded() / torch.zeros(3)).sum())
    assert (report.cause, report.op) == ("division_by_zero", "div"), str(report)
    report = locate(lambda: (torch.cat([bounded().clamp(max=5.0), torch.ones(3)]) * 3e38)[3:].mul(2).sum())
    assert report.cause == "overflow", str(report)


def test_a_mask_made_finite_is_not_the_beginning_of_an_overflow():
    mask = torch.tensor([False, True, False])

    def step():
        scores = torch.ones(3, requires_grad=True) + torch.zeros(3).masked_fill(mask, -INF).clamp(min=-largest())
        scores = scores * 2
        return (scores.softmax(-1) * scores).sum()

    report = locate(step)
    assert report.cause == "overflow", str(report)
    assert report.story[0].startswith("forward: mul made inf"), str(report)


def test_a_softmax_that_is_safe_from_masked_rows_is_none():
    x = torch.tensor([[-INF, -INF], [INF, 1]])
    report = locate(lambda: torch.ops.aten._safe_softmax(x, -1).sum(), x=x)
    assert (report.cause, report.op) == ("bad_input", "batch x")


def test_unique_rows_with_two_histories_go_by_both():
    x, y = torch.tensor([[1, NAN], [1, 2]]), torch.tensor([[1, INF], [1, 2]])
    report = locate(lambda: torch.unique(torch.cat([x, y, torch.ones(5, 2)]), dim=0).sum(), x=x, y=y)
    assert (report.cause, report.op, report.rows) == ("bad_input", "batch x", [0]), str(report)


# -- complex numbers -------------------------------------------------------------------------------------------------
def test_a_single_complex_number_has_no_rows():
    x = torch.tensor(complex(NAN, 1))
    report = locate(lambda: (x * 2).abs(), x=x)
    assert (report.cause, report.op, report.rows, report.length) == ("bad_input", "batch x", [], 0)


def test_a_second_look_at_complex_numbers_keeps_their_imaginary_part():
    x = torch.tensor([1e30 + 0j, 1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.set_warn_always(True)
        report = locate(lambda: x.var())
        torch.set_warn_always(False)
    assert (report.cause, report.kind) == ("overflow", "inf")
    assert "times that" in locate(lambda: (torch.tensor([1e30j, 1]) ** 2).abs().sum()).explanation


def test_what_a_sparse_tensor_holds_is_in_no_row_that_is_known():
    x = torch.eye(3)[1:].to_sparse()
    x.values()[1] = NAN
    report = locate(lambda: (x @ torch.ones(3, 1)).sum(), x=x)
    assert (report.cause, report.op, report.rows) == ("bad_input", "batch x", [])


def test_sparse_complex_numbers_are_looked_at():
    x = torch.eye(3, dtype=torch.complex64).to_sparse_csr()
    assert healthy(locate(lambda: (x @ torch.ones(3, 1, dtype=torch.complex64)).abs().sum(), x=x))
    x.values()[1] = NAN
    assert locate(lambda: (x @ torch.ones(3, 1, dtype=torch.complex64)).abs().sum(), x=x).op == "batch x"
