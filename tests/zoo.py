"""A zoo of planted faults with known truths, and of healthy steps that look like faults.

Each entry builds a fresh case: a model, a step, the tensors of its batch. The guilty line carries a ``# BUG`` comment with
the entry's name, so that a truth holds the line without a number that goes stale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
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
    marked = ((text.split("# BUG ")[1].strip(), i) for i, text in enumerate(source, 1) if "# BUG " in text)
    return {name: f"{Path(__file__).name}:{i}" for name, i in marked if '"' not in name}


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


# -- forward ------------------------------------------------------------------------------------------------------------
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


@fault("overflow", "forward", "addmm", "mm", module="inp", kind="inf", in_prototype=True)
def learning_rate_that_explodes() -> Case:
    model, x = Net(nn.Identity()), torch.randn(6, 8)
    loss = lambda: model(x).abs().mean()  # BUG learning_rate_that_explodes_call
    return training(model, loss, torch.optim.SGD(model.parameters(), lr=1e30), steps=4, x=x)


# -- backward -----------------------------------------------------------------------------------------------------------
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


# -- optimizer ----------------------------------------------------------------------------------------------------------
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


# -- data and state -----------------------------------------------------------------------------------------------------
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


# -- healthy: whatever is reported here is a false alarm -------------------------------------------------------------------
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
