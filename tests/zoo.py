"""A zoo of planted faults with known truths, and of healthy steps that look like faults.

Each entry builds a fresh case: a model, a step, the tensors of its batch. The guilty line carries a ``# BUG`` comment
with the entry's name, so that a truth holds the line without a number that goes stale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn

INF, NAN = math.inf, math.nan


@dataclass
class Case:
    """What ``locate`` is given: a step without arguments, and names."""

    step: Callable[[], object]
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    batch: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Truth:
    """What the report must say. ``op`` may be one of several names; an empty field is not checked."""

    name: str
    make: Callable[[], Case]
    cause: str = ""
    phase: str = ""
    op: tuple[str, ...] = ()
    module: str | None = None
    kind: str = "nan"
    rows: list[int] | None = None
    in_prototype: bool = False

    @property
    def line(self) -> str:
        return lines().get(self.name, "")

    @property
    def healthy(self) -> bool:
        return not self.cause


@functools.cache
def lines() -> dict[str, str]:
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    marked = [(text.split("# BUG ")[1].split(), i) for i, text in enumerate(source, 1) if "# BUG " in text]
    return {name: f"{Path(__file__).name}:{i}" for names, i in marked for name in names}


ZOO: dict[str, Truth] = {}


def fault(cause: str, phase: str, *op: str, **truth: object) -> Callable:
    def register(make: Callable[[], Case]) -> Callable:
        ZOO[make.__name__] = Truth(make.__name__, make, cause, phase, op, **truth)
        return make

    return register


def healthy(make: Callable[[], Case]) -> Callable:
    ZOO[make.__name__] = Truth(make.__name__, make)
    return make


class Net(nn.Module):
    """A layer, the part under test, and a layer."""

    def __init__(self, bad: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.bad = bad
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        return self.out(self.bad(self.inp(x), *extra))


class Part(nn.Module):
    """A module around a function."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def training(
    model: nn.Module, loss: Callable[[], Tensor], optimizer=None, scale: float = 1.0, steps: int = 1, **batch: Tensor
) -> Case:
    """The usual loop. ``scale`` multiplies the loss before backward, as a loss scaler does."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss()
            (value * scale).backward()
            optimizer.step()
        return value

    return Case(step, model, optimizer, batch)


def through(
    function: Callable, *extra: Tensor, rows: int = 6, x: Tensor | None = None, names: str = "", **kwargs
) -> Case:
    """A Net with ``function`` in the middle, trained on the mean square of its output."""
    x = torch.randn(rows, 8) if x is None else x
    model = Net(Part(function))
    batch = {"x": x, **dict(zip(names.split(), extra, strict=False))}
    return training(model, lambda: model(x, *extra).pow(2).mean(), **kwargs, **batch)


# -- forward ---------------------------------------------------------------------------------------------------------
@fault("zero_over_zero", "forward", "div", module="bad", rows=[0], in_prototype=True)
def group_std_of_equal_rewards() -> Case:
    def advantage(x: Tensor, reward: Tensor) -> Tensor:
        centred = reward - reward.mean(1, keepdim=True)
        scaled = centred / reward.std(1, keepdim=True)  # BUG group_std_of_equal_rewards
        return x * scaled.reshape(-1, 1)

    return through(advantage, torch.tensor([[1.0, 1, 1, 1], [0, 1, 0, 1]]), rows=8, names="reward")


@fault("empty_mean", "forward", "mean", module="", in_prototype=True)
def mean_of_nothing() -> Case:
    model, x, mask = Net(nn.Tanh()), torch.randn(6, 8), torch.zeros(6, 8, dtype=torch.bool)

    def loss() -> Tensor:
        log_probs = F.log_softmax(model(x), -1)
        return -log_probs[mask].mean()  # BUG mean_of_nothing

    return training(model, loss, x=x)


@fault("log_of_zero", "forward", "log", module="bad", kind="inf", in_prototype=True)
def log_of_softmax() -> Case:
    def log_probs(x: Tensor) -> Tensor:
        probs = torch.softmax(x * 300, -1)
        return torch.log(probs)  # BUG log_of_softmax

    model, x = Net(Part(log_probs)), torch.randn(6, 8) * 5
    return training(model, lambda: -model.bad(model.inp(x)).gather(1, torch.arange(6)[:, None]).mean(), x=x)


@fault("zero_times_inf", "forward", "mul", module="bad", rows=[2], in_prototype=True)
def minus_inf_times_mask() -> Case:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        log_probs = F.log_softmax(x, -1).masked_fill(mask == 0, -INF)
        return log_probs * mask  # BUG minus_inf_times_mask

    mask = torch.ones(6, 8)
    mask[2, 3:] = 0
    return through(masked, mask, names="mask")


@fault("masked_row", "forward", "_softmax", module="bad", rows=[3], in_prototype=True)
def row_that_sees_nothing() -> Case:
    def attend(x: Tensor, keep: Tensor) -> Tensor:
        scores = x @ x.T
        scores = scores + torch.zeros_like(scores).masked_fill(~keep, -INF)
        weights = torch.softmax(scores, -1)  # BUG row_that_sees_nothing
        return weights @ x

    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    keep[3] = False
    return through(attend, keep, names="keep")


@fault("overflow", "forward", "mm", module="bad", kind="inf", in_prototype=True)
def half_precision_product() -> Case:
    weight = torch.full((8, 8), 200.0)

    def product(x: Tensor) -> Tensor:
        y = x.abs().half() * 100 @ weight.half()  # BUG half_precision_product
        return y.float()

    model, x = Net(Part(product)), torch.randn(6, 8) * 10
    return training(model, lambda: model(x).mean(), x=x)


@fault("overflow", "forward", "exp", module="bad", kind="inf", rows=[4], in_prototype=True)
def exp_of_a_ratio() -> Case:
    def ratio(x: Tensor, old: Tensor) -> Tensor:
        r = torch.exp(x - old)  # BUG exp_of_a_ratio
        return torch.minimum(r, r * 1.0)

    old = torch.zeros(6, 8)
    old[4] = -100
    return through(ratio, old, names="old")


@fault("overflow", "forward", "addmm", "mm", module="out", in_prototype=True)
def learning_rate_that_explodes() -> Case:
    model, x = Net(nn.Identity()), torch.randn(6, 8)
    loss = lambda: model(x).abs().mean()
    return training(model, loss, torch.optim.SGD(model.parameters(), lr=1e30), steps=4, x=x)


# -- backward --------------------------------------------------------------------------------------------------------
@fault("gradient_at_edge", "backward", "SqrtBackward0", "div", module="bad", kind="inf", in_prototype=True)
def slope_of_sqrt_at_zero() -> Case:
    def part(x: Tensor) -> Tensor:
        z = x - x.detach()
        return torch.sqrt(z * z) + x  # BUG slope_of_sqrt_at_zero

    return through(part)


@fault("gradient_at_edge", "backward", "LogBackward0", "div", module="bad", in_prototype=True)
def where_after_log() -> Case:
    def part(x: Tensor) -> Tensor:
        h = x * (x > 0)
        logs = torch.log(h)  # BUG where_after_log
        return torch.where(h > 0, logs, torch.zeros_like(h))

    return through(part)


@fault("overflow", "backward", "_to_copy", module="", kind="inf", in_prototype=True)
def loss_scale_too_large() -> Case:
    model, x = Net(nn.Tanh()).half(), torch.randn(6, 8).half()

    def loss() -> Tensor:
        return model(x).float().pow(2).mean()  # BUG loss_scale_too_large

    return training(model, loss, scale=2.0**24, x=x)


# -- optimizer -------------------------------------------------------------------------------------------------------
def tiny_half_gradients(**kwargs: object) -> Case:
    model, x = Net(nn.Tanh()).half(), (torch.randn(6, 8) * 1e-2).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kwargs)
    return training(model, lambda: (model(x).float() * 1e-4).pow(2).mean(), optimizer, x=x)


@fault("optimizer_underflow", "optimizer", "addcdiv", module="", in_prototype=True)
def adam_eps_in_half() -> Case:
    return tiny_half_gradients(foreach=False)


@fault("optimizer_underflow", "optimizer", "_foreach_addcdiv", module="", in_prototype=True)
def adam_eps_in_half_foreach() -> Case:
    return tiny_half_gradients(foreach=True)


# -- data and state --------------------------------------------------------------------------------------------------
@fault("bad_input", "data", "batch x", module="inp", rows=[4], in_prototype=True)
def nan_in_the_batch() -> Case:
    x = torch.randn(6, 8)
    x[4, 2] = NAN
    return through(torch.tanh, x=x)


@fault("bad_state", "state", "buffer bad.running_mean", module="bad", rows=[5], in_prototype=True)
def nan_in_a_buffer() -> Case:
    norm = nn.BatchNorm1d(8).eval()
    norm.running_mean[5] = NAN
    model, x = Net(norm), torch.randn(6, 8)
    return training(model, lambda: model(x).pow(2).mean(), x=x)


@fault("bad_state", "state", "parameter inp.weight", module="inp", rows=[7], in_prototype=True)
def nan_in_an_embedding_row() -> Case:
    model, ids = Net(nn.Tanh()), torch.tensor([1, 7, 3])
    model.inp = nn.Embedding(16, 8)
    model.inp.weight.data[7] = NAN
    return training(model, lambda: model(ids).pow(2).mean(), ids=ids)


# -- further: leaves and losses without a model ----------------------------------------------------------------------
def leaf(*values: float, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter with these values, or random ones of this shape."""
    return nn.Parameter((torch.randn(shape) if shape else torch.tensor(values)).to(dtype))


def backward_of(loss: Callable[[], Tensor], **batch: Tensor) -> Case:
    def step() -> Tensor:
        value = loss()
        value.backward()
        return value

    return Case(step, batch=batch)


@fault("zero_over_zero", "forward", "native_layer_norm")
def layer_norm_without_eps() -> Case:
    norm, x = nn.LayerNorm(8, eps=0.0).half(), torch.ones(4, 8).half()
    return backward_of(lambda: norm(x).float().sum())  # BUG layer_norm_without_eps


@fault("zero_over_zero", "forward", "native_group_norm")
def group_norm_without_eps() -> Case:
    norm, x = nn.GroupNorm(2, 4, eps=0.0), torch.ones(2, 4, 3)
    return backward_of(lambda: norm(x).sum())  # BUG group_norm_without_eps


@fault("zero_over_zero", "forward", "div", rows=[2])
def normalised_zero_vector() -> Case:
    w, x = leaf(shape=(4, 8)), torch.randn(4, 8)
    x[2] = 0
    return backward_of(lambda: F.normalize(x * w, eps=0.0, dim=1).sum())  # BUG normalised_zero_vector


@fault("zero_over_zero", "forward", "std")
def std_of_one() -> Case:
    w = leaf(1.5)
    return backward_of(lambda: w.reshape(1).std())  # BUG std_of_one


@fault("zero_over_zero", "forward", "div")
def rescale_by_density_zero() -> Case:
    w = leaf(shape=(4,))
    return backward_of(lambda: ((w * torch.zeros(4)) / 0.0).sum())  # BUG rescale_by_density_zero


@fault("zero_over_zero", "forward", "div")
def in_place_division() -> Case:
    w = leaf(shape=(4,))

    def loss() -> Tensor:
        y = w * 0
        y.div_(w * 0)  # BUG in_place_division
        return y.sum()

    return backward_of(loss)


@fault("zero_over_zero", "forward", "div")
def one_column_of_a_buffer() -> Case:
    w = leaf(shape=(4, 3))

    def loss() -> Tensor:
        buffer = torch.full((4, 3), NAN)
        buffer[:, 0] = w[:, 0]
        buffer[:, 1] = (w[:, 1] * 0) / (w[:, 1] * 0)  # BUG one_column_of_a_buffer
        buffer[:, 2] = w[:, 2]
        return buffer.sum()

    return backward_of(loss)


@fault("zero_over_zero", "forward", "div")
def column_that_is_read() -> Case:
    w = leaf(shape=(4, 3))

    def loss() -> Tensor:
        buffer = torch.zeros(4, 3)
        buffer[:, 1] = (w[:, 1] * 0) / (w[:, 1] * 0)  # BUG column_that_is_read
        buffer[:, 2] = w[:, 2].detach() / 0
        return buffer[:, 1].sum()

    return backward_of(loss)


@fault("zero_over_zero", "forward", "div")
def real_fault_beside_a_clamped_inf() -> Case:
    w, zero = leaf(shape=(4,)), torch.zeros(4)

    def loss() -> Tensor:
        harmless = (1 / zero).clamp(max=5.0) * w
        return (harmless * 0 / (w * 0)).sum()  # BUG real_fault_beside_a_clamped_inf

    return backward_of(loss)


@fault("division_by_zero", "forward", "div", kind="inf")
def temperature_zero() -> Case:
    logits = leaf(shape=(4, 8))
    return backward_of(lambda: torch.softmax(logits / 0.0, -1).sum())  # BUG temperature_zero


@fault("empty_mean", "forward", "nll_loss_forward")
def every_label_ignored() -> Case:
    logits = leaf(shape=(2, 3))
    return backward_of(lambda: F.cross_entropy(logits, torch.tensor([-100, -100])))  # BUG every_label_ignored


@fault("empty_mean", "forward", "div")
def masked_mean_by_hand() -> Case:
    per_token, mask = leaf(shape=(3,)), torch.zeros(3)
    return backward_of(lambda: (per_token * mask).sum() / mask.sum())  # BUG masked_mean_by_hand


@fault("empty_mean", "forward", "div")
def masked_mean_by_a_python_count() -> Case:
    per_token, mask = leaf(shape=(3,)), torch.zeros(3)
    return backward_of(lambda: (per_token * mask).sum() / mask.sum().item())  # BUG masked_mean_by_a_python_count


@fault("empty_mean", "forward", "div", rows=[1])
def masked_mean_of_each_row() -> Case:
    per_token, mask = leaf(shape=(2, 3)), torch.tensor([[1.0, 1, 0], [0, 0, 0]])
    row_means = lambda: (per_token * mask).sum(-1) / mask.sum(-1)  # BUG masked_mean_of_each_row
    return backward_of(lambda: row_means().sum())


@fault("empty_mean", "forward", "mean")
def no_example_of_the_kind() -> Case:
    kl, is_kl = leaf(shape=(4,)), torch.zeros(4, dtype=torch.bool)
    return backward_of(lambda: kl[is_kl].mean() + kl.sum())  # BUG no_example_of_the_kind


@fault("log_of_zero", "forward", "log", kind="inf")
def log_of_one_minus_sigmoid() -> Case:
    logit = leaf(200.0, 200.0)
    return backward_of(lambda: -torch.log(1 - torch.sigmoid(logit)).mean())  # BUG log_of_one_minus_sigmoid


@fault("log_of_zero", "forward", "_log_softmax", kind="inf")
def label_that_the_mask_forbids() -> Case:
    logits = leaf(shape=(2, 4))

    def loss() -> Tensor:
        allowed = logits.masked_fill(torch.tensor([False, True, False, False]), -INF)
        return F.cross_entropy(allowed, torch.tensor([1, 0]))  # BUG label_that_the_mask_forbids

    return backward_of(loss)


@fault("zero_times_inf", "forward", "mul", rows=[0, 2, 3])
def additive_mask_by_multiplication() -> Case:
    scores, keep = leaf(shape=(4,)), torch.tensor([1.0, 0, 1, 1])

    def loss() -> Tensor:
        mask = (1 - keep) * -INF  # BUG additive_mask_by_multiplication
        return (scores + mask).logsumexp(0)

    return backward_of(loss)


@fault("masked_row", "forward", "_softmax", rows=[2])
def masked_row_from_outside() -> Case:
    scores, mask = leaf(shape=(4, 4)), torch.zeros(4, 4)
    mask[2] = -INF
    weights = lambda: torch.softmax(scores + mask, -1)  # BUG masked_row_from_outside
    return backward_of(lambda: (weights() @ torch.randn(4, 2)).sum(), mask=mask)


@fault("masked_row", "forward", "logsumexp", kind="inf", rows=[1])
def logsumexp_of_nothing() -> Case:
    scores, mask = leaf(shape=(4, 8)), torch.zeros(4, 8)
    mask[1] = -INF
    total = lambda: torch.logsumexp(scores + mask, -1)  # BUG logsumexp_of_nothing
    return backward_of(lambda: total().nan_to_num(0, 0, 0).sum(), mask=mask)


@fault("overflow", "forward", "exp", kind="inf")
def kl_estimate() -> Case:
    policy, reference = leaf(-100.0, -100.0), torch.zeros(2)

    def loss() -> Tensor:
        d = reference - policy
        return (torch.exp(d) - d - 1).mean()  # BUG kl_estimate

    return backward_of(loss)


@fault("overflow", "forward", "pow", kind="inf")
def square_in_half() -> Case:
    x = leaf(*[300.0] * 8, dtype=torch.float16)
    return backward_of(lambda: x.pow(2).mean().float().log())  # BUG square_in_half


@fault("overflow", "forward", "_to_copy", kind="inf")
def cast_to_half() -> Case:
    x = leaf(1e6, 1.0)
    return backward_of(lambda: x.half().float().sum())  # BUG cast_to_half


@fault("overflow", "forward", "add", kind="inf")
def residual_stream_in_half() -> Case:
    x, w = torch.full((2, 4), 40000.0).half(), leaf(1.0, 1, 1, 1, dtype=torch.float16)

    def loss() -> Tensor:
        stream = x + x * w  # BUG residual_stream_in_half
        return F.layer_norm(stream, (4,)).float().sum()

    return backward_of(loss)


@fault("overflow", "forward", "mul", kind="inf")
def bfloat16_product() -> Case:
    x = leaf(1e30, 1e30)
    return backward_of(lambda: (x.bfloat16() * x.bfloat16()).sum())  # BUG bfloat16_product


@fault("overflow", "forward", "addmm", kind="inf")
def autocast_to_half() -> Case:
    layer, x = nn.Linear(4, 4), torch.full((2, 4), 60000.0)
    layer.weight.data.fill_(3.0)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return layer(x).float().mean()  # BUG autocast_to_half

    return backward_of(loss)


@fault("unknown", "forward", "sqrt")
def root_of_a_negative_variance() -> Case:
    variance = leaf(-1e-9, 1.0)
    return backward_of(lambda: variance.sqrt().sum())  # BUG root_of_a_negative_variance


@fault("unknown", "forward", "acos")
def acos_beyond_one() -> Case:
    cosine = leaf(1.0001, 0.5)
    return backward_of(lambda: torch.acos(cosine).sum())  # BUG acos_beyond_one


# -- further: backward -----------------------------------------------------------------------------------------------
@fault("gradient_at_edge", "backward", "div", kind="inf")
def norm_of_zero_by_hand() -> Case:
    w = leaf(0.0, 0.0)
    return backward_of(lambda: (w**2).sum().sqrt())  # BUG norm_of_zero_by_hand


@fault("gradient_at_edge", "backward", "pow", kind="inf")
def power_of_one_half() -> Case:
    w = leaf(0.0, 1.0)
    return backward_of(lambda: (w**0.5).sum())  # BUG power_of_one_half


@fault("gradient_at_edge", "backward", kind="inf")
def acos_at_one() -> Case:
    w = leaf(1.0, 0.5)
    return backward_of(lambda: torch.acos(w).sum())  # BUG acos_at_one


@fault("gradient_at_edge", "backward")
def exp_behind_where() -> Case:
    w = leaf(200.0, 1.0)

    def loss() -> Tensor:
        big = torch.exp(w)  # BUG exp_behind_where
        return torch.where(w < 10, big, w).sum()

    return backward_of(loss)


@fault("gradient_at_edge", "backward")
def clamp_makes_it_finite_again() -> Case:
    w = leaf(0.0, 1.0)

    def loss() -> Tensor:
        inverse = torch.rsqrt(w * w)  # BUG clamp_makes_it_finite_again
        return inverse.clamp(max=1.0).sum()

    return backward_of(loss)


@fault("gradient_at_edge", "backward", "div")
def odds_ratio_of_a_sure_answer() -> Case:
    log_prob = leaf(-0.5, 0.0)

    def loss() -> Tensor:
        odds = log_prob - torch.log1p(-torch.exp(log_prob))  # BUG odds_ratio_of_a_sure_answer
        return -F.logsigmoid(odds).mean()

    return backward_of(loss)


@fault("gradient_at_edge", "backward")
def clipping_spreads_it() -> Case:
    w, u = leaf(0.0, 0.0), leaf(1.0, 2.0)
    optimizer = torch.optim.SGD([w, u], lr=0.1)

    def step() -> None:
        loss = (torch.sqrt(w) * 0).sum() + u.sum()  # BUG clipping_spreads_it
        loss.backward()
        torch.nn.utils.clip_grad_norm_([w, u], 1.0)
        optimizer.step()

    return Case(step, optimizer=optimizer)


class BadBackward(torch.autograd.Function):
    """Exact forward, 0/0 in its own backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x * 0) / (x * 0)  # BUG backward_of_ones_own


@fault("zero_over_zero", "backward", "div")
def backward_of_ones_own() -> Case:
    w = leaf(1.0, 2.0)
    return backward_of(lambda: BadBackward.apply(w).sum())


@fault("overflow", "backward", "add", module="", kind="inf")
def accumulated_half_gradients() -> Case:
    w, c = leaf(1.0, 1.0, dtype=torch.float16), torch.full((2,), 40000.0).half()

    def step() -> None:
        for _ in range(2):
            (w * c).float().sum().backward()  # BUG accumulated_half_gradients

    return Case(step)


def checkpointed(reentrant: bool) -> Case:
    from torch.utils.checkpoint import checkpoint

    w = leaf(0.0, 0.0)
    return backward_of(lambda: checkpoint(root_of_square, w, use_reentrant=reentrant).sum())


def root_of_square(x: Tensor) -> Tensor:
    return torch.sqrt(x * x)  # BUG checkpoint_reentrant checkpoint_not_reentrant


@fault("gradient_at_edge", "backward", "div", kind="inf")
def checkpoint_reentrant() -> Case:
    return checkpointed(reentrant=True)


@fault("gradient_at_edge", "backward", "div", kind="inf")
def checkpoint_not_reentrant() -> Case:
    return checkpointed(reentrant=False)


# -- further: optimizer, state, data ---------------------------------------------------------------------------------
def one_step(
    optimizer_of: Callable, values: tuple[float, ...] = (1.0, 2.0, 3.0), factor: float = 1.0, prepare=None
) -> Case:
    """A parameter, its square, and an optimizer whose state or settings ``prepare`` may spoil after a first, good
    step."""
    w = leaf(*values)
    optimizer = optimizer_of([w])

    def step() -> None:
        optimizer.zero_grad()
        (w * w * factor).sum().backward()
        optimizer.step()

    if prepare:
        step()
        prepare(optimizer, w)
    return Case(step, optimizer=optimizer)


@fault("overflow", "optimizer", "add", kind="inf")
def step_too_long_for_float32() -> Case:
    return one_step(lambda p: torch.optim.SGD(p, lr=1e38), factor=1e10)


@fault("overflow", "optimizer", "addcmul", kind="inf")
def second_moment_overflows() -> Case:
    return one_step(lambda p: torch.optim.AdamW(p, foreach=False), factor=1e25)


@fault("bad_state", "state", "lr of the optimizer")
def learning_rate_is_nan() -> Case:
    return one_step(torch.optim.AdamW, prepare=lambda o, w: o.param_groups[0].update(lr=NAN))


@fault("bad_state", "state", "lr of the optimizer", kind="inf")
def schedule_gives_inf() -> Case:
    w = leaf(1.0, 2.0)
    optimizer = torch.optim.SGD([w], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: INF if epoch > 1 else 0.1)

    def step() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            (w * w).sum().backward()
            optimizer.step()
            schedule.step()

    return Case(step)


def spoil(name: str, value: float) -> Callable:
    def prepare(optimizer: torch.optim.Optimizer, w: Tensor) -> None:
        optimizer.state[w][name][1] = value

    return prepare


def restored(name: str, value: float, **kwargs: object) -> Callable[[], Case]:
    return lambda: one_step(lambda p: torch.optim.AdamW(p, **kwargs), prepare=spoil(name, value))


for _moment in ("exp_avg", "exp_avg_sq"):
    for _value in (NAN, INF):
        for _flavour in ({"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": True, "foreach": False}):
            _name = f"restored_{_moment}_{_value}_{'_'.join(k for k, v in _flavour.items() if v) or 'single'}"
            ZOO[_name] = Truth(
                _name, restored(_moment, _value, **_flavour), "bad_state", "state", kind=str(_value), rows=[1],
                op=(f"optimizer state {_moment} of w",),
            )  # fmt: skip


@fault("bad_state", "state", kind="nan")
def gradient_left_over() -> Case:
    w = leaf(1.0, 2.0)
    w.grad = torch.full((2,), NAN)
    return backward_of(lambda: (w * w).sum())


@fault("bad_state", "state", "parameter norm.weight", module="norm")
def norm_never_initialised() -> Case:
    model = nn.Sequential()
    model.add_module("norm", nn.LayerNorm(4))
    model.norm.weight.data.view(torch.int32).fill_(0x7FC00000)
    x = torch.randn(2, 4)
    return training(model, lambda: model(x).sum(), x=x)


@fault("bad_input", "data", "batch x", module="bad", rows=[2])
def bad_row_before_batch_norm() -> Case:
    norm, x = nn.BatchNorm1d(8), torch.randn(6, 8)
    x[2, 1] = NAN
    model = nn.Sequential()
    model.add_module("bad", norm)
    return training(model, lambda: model(x).pow(2).mean(), x=x)


@fault("bad_input", "data", "batch reward", rows=[1])
def missing_reward() -> Case:
    w, reward = leaf(shape=(4,)), torch.tensor([1.0, NAN, 0, 1])
    advantage = lambda: (reward - reward.mean()) / (reward.std() + 1e-4)
    return backward_of(lambda: (w * advantage()).sum(), reward=reward)


@fault("bad_input", "data", "batch weight", kind="inf", rows=[2])
def infinite_class_weight() -> Case:
    logits, weight = leaf(shape=(4, 8)), torch.ones(8)
    weight[2] = INF
    return backward_of(lambda: F.cross_entropy(logits, torch.tensor([1, 2, 3, 2]), weight=weight), weight=weight)


@fault("bad_input", "data", "batch old", kind="inf", rows=[1])
def cached_log_prob_of_minus_inf() -> Case:
    new, old = leaf(shape=(4,)), torch.tensor([0.0, -INF, 1, 2])
    return backward_of(lambda: torch.exp(new - old).mean(), old=old)  # BUG cached_log_prob_of_minus_inf


@fault("bad_input", "data", "batch reward")
def sparse_gradient() -> Case:
    table, reward = nn.Embedding(8, 4, sparse=True), torch.tensor([1.0, NAN])
    return backward_of(lambda: (table(torch.tensor([1, 2])).sum(1) * reward).sum(), reward=reward)


# -- further: how the step ends --------------------------------------------------------------------------------------
@fault("log_of_zero", "forward", "log", kind="inf")
def result_is_a_python_number() -> Case:
    p = torch.zeros(3)
    return Case(lambda: {"loss": torch.log(p).mean().item(), "size": 3})  # BUG result_is_a_python_number


@fault("zero_over_zero", "forward", "div")
def step_that_raises() -> Case:
    w = leaf(shape=(4,))

    def step() -> None:
        loss = (w * 0) / (w * 0)  # BUG step_that_raises
        if not torch.isfinite(loss).all():
            raise FloatingPointError("the loss is not finite")

    return Case(step)


@fault("gradient_at_edge", "backward", "div", kind="inf")
def scaler_cannot_help() -> Case:
    w = leaf(0.0, 0.0)
    return scaled([w], lambda: torch.sqrt(w).sum(), 16.0)  # BUG scaler_cannot_help


def scaled(parameters, loss: Callable[[], Tensor], scale: float, **options) -> Case:
    parameters = list(parameters)
    optimizer, scaler = torch.optim.SGD(parameters, lr=0.1, **options), torch.amp.GradScaler("cpu", init_scale=scale)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        return value

    return Case(step, optimizer=optimizer)


@fault("division_by_zero", "forward", "div", kind="inf")
def loss_is_inf_under_a_scaler() -> Case:
    w = leaf(1.0, 2.0)
    return scaled([w], lambda: (w * w).sum() / 0, 16.0)  # BUG loss_is_inf_under_a_scaler


@fault("division_by_zero", "forward", "div", kind="inf")
def compiled_model() -> Case:
    w = leaf(1.0, 2.0)
    ratio = torch.compile(ratio_to_zero, backend="eager")
    return backward_of(lambda: ratio(w))


def ratio_to_zero(x: Tensor) -> Tensor:
    return (x / (x * 0)).sum()  # BUG compiled_model


# -- healthy: whatever is reported here is a false alarm -------------------------------------------------------------
@healthy
def causal_mask_of_minus_inf() -> Case:
    def attend(x: Tensor) -> Tensor:
        scores = x @ x.T
        return torch.softmax(scores + torch.full_like(scores, -INF).triu(1), -1) @ x

    return through(attend)


@healthy
def sentinel_that_nanmean_drops() -> Case:
    model, x = Net(nn.Tanh()), torch.randn(3, 8)
    rewards = torch.tensor([[1.0, NAN], [0.0, 2.0], [1.0, 1.0]])

    def loss() -> Tensor:
        weight = torch.nanmean(rewards * torch.tensor([1.0, 0.5]), dim=1)
        return (model(x) * weight[:, None]).pow(2).mean()

    return training(model, loss, x=x, rewards=rewards)


@healthy
def dead_log_branch() -> Case:
    model, x, count = Net(nn.Tanh()), torch.randn(6, 8), torch.tensor([0.0, 1, -1, 3, 4, 5])

    def loss() -> Tensor:
        weight = torch.where(count > 0, torch.log(count), torch.zeros(6))
        return (model(x) * weight[:, None]).pow(2).mean()

    return training(model, loss, x=x, count=count)


@healthy
def relu_stops_the_nan_gradient() -> Case:
    def part(x: Tensor) -> Tensor:
        h = torch.relu(x)
        return torch.where(h > 0, torch.log(h), torch.zeros_like(h))

    return through(part)


@healthy
def uninitialised_then_filled() -> Case:
    model, x = Net(nn.Tanh()), torch.randn(6, 8)

    def loss() -> Tensor:
        buffer = torch.empty(12, 8)
        buffer.view(torch.int32).fill_(0x7FC00000)  # what uninitialised memory may hold: NaN
        buffer.data.copy_(torch.cat([x, x]))
        return model(buffer).pow(2).mean()

    return training(model, loss, x=x)


@healthy
def nan_then_filled() -> Case:
    model, x = Net(nn.Tanh()), torch.randn(6, 8)

    def loss() -> Tensor:
        buffer = torch.full((12, 8), NAN)
        buffer[:6] = x
        buffer[6:] = x * 2
        return model(buffer).pow(2).mean()

    return training(model, loss, x=x)


@healthy
def mask_from_outside() -> Case:
    scores, mask = leaf(shape=(4, 4)), torch.full((4, 4), -INF).triu(1)
    return backward_of(lambda: (torch.softmax(scores + mask, -1) @ torch.randn(4, 2)).sum(), mask=mask)


@healthy
def boolean_mask_by_where() -> Case:
    scores, keep = leaf(shape=(4, 4)), torch.ones(4, 4, dtype=torch.bool).tril()
    return backward_of(lambda: torch.softmax(torch.where(keep, scores, -INF), -1)[:, 0].sum(), keep=keep)


@healthy
def mask_by_logarithm() -> Case:
    scores, keep = leaf(shape=(4, 4)), torch.ones(4, 4).tril()
    return backward_of(lambda: torch.softmax(scores + keep.log(), -1)[:, 0].sum(), keep=keep)


@healthy
def position_bias_with_minus_inf() -> Case:
    scores = leaf(shape=(4, 4))
    bias = -torch.arange(4.0)[:, None] + torch.arange(4.0) + torch.full((4, 4), -INF).triu(1)
    return backward_of(lambda: torch.softmax(scores + bias, -1)[:, 0].sum(), bias=bias)


@healthy
def masked_logits_are_returned() -> Case:
    logits = leaf(shape=(2, 8))

    def step() -> tuple[Tensor, Tensor]:
        top = torch.topk(logits, 3).values[:, -1:]
        kept = logits.masked_fill(logits < top, -INF)
        loss = torch.softmax(kept, -1).pow(2).sum()
        loss.backward()
        return loss, kept

    return Case(step)


@healthy
def sentinels_are_returned() -> Case:
    w, reward = leaf(shape=(4,)), torch.tensor([1.0, NAN, 0, 1])

    def step() -> tuple[Tensor, Tensor]:
        loss = (w * torch.nan_to_num(reward)).sum()
        loss.backward()
        return loss, reward

    return Case(step, batch={"reward": reward})


@healthy
def clamp_makes_an_inf_finite() -> Case:
    w, zero = leaf(shape=(4,)), torch.zeros(4)
    return backward_of(lambda: ((1 / zero).clamp(max=5.0) * w).sum())


@healthy
def minus_inf_start_of_a_maximum() -> Case:
    w = leaf(shape=(4,))
    return backward_of(lambda: torch.maximum(torch.full((4,), -INF), w).sum())


def transient_inf(**options) -> Case:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return layer(x).float().pow(2).mean()

    return scaled(layer.parameters(), loss, 2.0**40, **options)


@healthy
def transient_inf_of_a_scaler() -> Case:
    return transient_inf()


@healthy
def transient_inf_of_a_scaler_with_a_fused_optimizer() -> Case:  # it is given its gradients scaled
    return transient_inf(fused=True)


@fault("gradient_at_edge", "backward", "div", kind="inf")
def scaler_with_a_fused_optimizer_cannot_help() -> Case:
    w = leaf(0.0, 0.0)
    return scaled([w], lambda: torch.sqrt(w).sum(), 16.0, fused=True)  # BUG scaler_with_a_fused_optimizer_cannot_help


@healthy
def edges_that_torch_guards() -> Case:
    w = leaf(0.0, 0.0, 0.0)
    parts = [
        lambda: w.norm(), lambda: w.std(), lambda: w.var(), lambda: torch.prod(w), lambda: torch.cumprod(w, 0).sum(),
        lambda: torch.cdist(w[None], w[None]).sum(), lambda: F.cosine_similarity(w, torch.ones(3), dim=0),
        lambda: F.normalize(w, dim=0).sum(), lambda: F.binary_cross_entropy(w, w.detach()),
    ]  # fmt: skip
    if Version(torch.__version__) >= Version("2.13"):  # torch 2.9 does not guard this one
        parts.append(lambda: torch.atan2(w, w).sum())
    return backward_of(lambda: torch.stack([part() for part in parts]).sum())


@healthy
def additive_mask_of_the_smallest_half() -> Case:
    scores = leaf(shape=(4, 4), dtype=torch.float16)
    mask = torch.full((4, 4), torch.finfo(torch.float16).min).half().triu(1)
    return backward_of(lambda: torch.softmax(scores - 1 + mask, -1).float()[:, 0].sum(), mask=mask)


@healthy
def three_fused_steps() -> Case:
    w = leaf(1.0, 2.0)
    optimizer = torch.optim.AdamW([w], lr=1e-3, fused=True)

    def step() -> Tensor:
        for _ in range(3):
            optimizer.zero_grad()
            loss = (w * w).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([w], 1.0)
            optimizer.step()
        return loss

    return Case(step, optimizer=optimizer)
