"""The guard: bit-identity with a run that never saw the bad batches, injections, policies, post-mortem, sync points."""

from __future__ import annotations

import copy
import io
import json
import math
import random
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nanlab.post_mortem
import nanlab.tracing
from nanlab.errors import InputError
from nanlab.guard import SCALER_PATIENCE, Event, Finding, GuardStop, Summary, replay, watch

BAD = (math.nan, math.inf, -math.inf)
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1),
}
POSITIONS = {"first": {0}, "middle": {3}, "last": {7}, "adjacent": {3, 4}, "five": {0, 2, 3, 5, 7}}


@pytest.fixture(autouse=True)
def one_thread_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a run that ends leaves a post-mortem where it ran
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model() -> nn.Module:
    """Small, with what a bad batch leaves traces in: running statistics and a random generator."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def make_batches(steps: int, accumulation: int = 1) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(6, 4, generator=generator) for _ in range(accumulation)] for _ in range(steps)]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter, every buffer, every number of the optimizer's state."""
    state = {f"model {name}": tensor for name, tensor in model.state_dict().items()}
    for i, values in optimizer.state_dict()["state"].items():
        state.update({f"optimizer {i} {key}": value for key, value in values.items() if torch.is_tensor(value)})
    return state


def assert_identical(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)]
    assert not different
    assert all(torch.isfinite(tensor).all() for tensor in got.values())


def loop(steps, policy="skip", optimizer="adamw", inject=None, **options):
    """A plain loop; `inject(moment, i, **objects)` may break anything at five moments of step i."""
    model = make_model()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(2)
    guard = watch(model, policy, optimizer=optimizer, **options)
    inject = inject or (lambda *args, **kwargs: None)
    for i, step in enumerate(steps):
        inject("between steps", i, model=model, optimizer=optimizer)
        losses = []
        for x in step:
            losses.append(model(x).square().mean() / len(step))
            losses[-1].backward()
        inject("before the decision", i, model=model, optimizer=optimizer, losses=losses)
        if guard.allow_step(losses):
            optimizer.step()
            inject("after the step", i, model=model, optimizer=optimizer)
            guard.after_step()
        optimizer.zero_grad()
    return model, optimizer, guard


def poison(steps, where, value=math.nan):
    """The same steps with one number of one micro-batch spoiled at each position."""
    spoiled = [[x.clone() for x in step] for step in steps]
    for i in where:
        spoiled[i][len(spoiled[i]) // 2][2, 1] = value
    return spoiled


# -- Bit-identity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_loop_ends_as_if_it_had_never_seen_the_bad_batches(policy, where, accumulation, optimizer):
    steps = make_batches(8, accumulation)
    bad = POSITIONS[where]
    model, opt, guard = loop(poison(steps, bad), policy, optimizer)
    clean_model, clean_opt, _ = loop([step for i, step in enumerate(steps) if i not in bad], "off", optimizer)
    assert_identical(everything(model, opt), everything(clean_model, clean_opt))
    assert [event.step for event in guard.events] == [i + 1 for i in sorted(bad)]
    assert all(event.what == "loss" and event.ranks == (0,) for event in guard.events)
    summary = guard.summary()
    assert (summary.steps_seen, summary.steps_skipped) == (8, len(bad))
    assert summary.rows_lost == 6 * accumulation * len(bad)


@pytest.mark.parametrize("policy", ["skip", "rollback", "late rollback"])
@pytest.mark.parametrize("ahead", [False, True], ids=["when needed", "one batch ahead"])
@pytest.mark.parametrize("draw", [torch.randint, np.random.randint, random.randrange], ids=["torch", "numpy", "python"])
def test_a_loop_that_draws_its_rows_does_not_draw_the_bad_ones_again(draw, ahead, policy):
    """Truth: the same rows in the same order, with the bad step left out. "late": the optimizer has spoilt it."""
    data = torch.randn(1000, 4, generator=torch.Generator().manual_seed(1))
    seen = []

    def batch():
        seen.append([int(draw(0, 1000, (1,)) if draw is torch.randint else draw(0, 1000)) for _ in range(4)])
        return data[seen[-1]]

    def run(policy, bad=(2, 3)):
        seen.clear()
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        model = nn.Linear(4, 1)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        late, policy = policy.startswith("late"), policy.removeprefix("late ")
        guard, following = watch(model, policy, optimizer=optimizer), batch() if ahead else None
        for i in range(8):
            losses = []
            for _ in range(3):
                x = following if ahead else batch()
                bad_loss = i in bad and policy != "off" and not late
                losses.append(model(x).square().mean() * (math.nan if bad_loss else 1.0))
                following = batch() if ahead else None
                with torch.no_grad():
                    model(x)
                losses[-1].backward()
            if guard.allow_step(losses) and (policy != "off" or i not in bad):
                optimizer.step()
                model.weight.data += math.nan if i in bad and late else 0.0
                guard.after_step()
            optimizer.zero_grad()
        return model.state_dict(), [list(rows) for rows in seen], guard

    got, drawn, guard = run(policy)
    expected, all_rows, _ = run("off")
    assert drawn == all_rows
    assert [event.step for event in guard.events] == [3, 4]
    assert_identical(got, expected)


@pytest.mark.parametrize(("rows", "said"), [(0, "0 rows lost"), (1, "1 row lost"), (1600, "1,600 rows lost")])
def test_an_event_says_how_many_rows_it_cost(rows, said):
    assert said in str(Event(step=3, action="skipped", reason="loss is nan", findings=(), rows=rows))


def test_without_the_guard_one_bad_batch_kills_the_model():
    model, _, _ = loop(poison(make_batches(3), {1}), "off")
    assert all(torch.isnan(p).all() for p in model.parameters())


def test_a_healthy_run_is_not_changed():
    model, opt, guard = loop(make_batches(8, 2), "rollback")
    expected, expected_opt, _ = loop(make_batches(8, 2), "off")
    assert_identical(everything(model, opt), everything(expected, expected_opt))
    assert guard.events == []


# -- What counts as bad ------------------------------------------------------------------------------


def one_step(break_it, **options):
    """(allowed, guard) of a single step on which `break_it(model, loss) -> loss` was let loose after backward."""
    model = make_model()
    guard = watch(model, optimizer=OPTIMIZERS["adamw"](model.parameters()), **options)
    loss = model(make_batches(1)[0][0]).square().mean()
    loss.backward()
    return guard.allow_step(break_it(model, loss)), guard


@pytest.mark.parametrize("value", BAD)
def test_one_entry_of_one_gradient_is_enough_and_is_named(value):
    def break_it(model, loss):
        model[4].weight.grad[0, 5] = value
        return loss

    allowed, guard = one_step(break_it)
    assert not allowed
    assert (guard.events[0].what, guard.events[0].name) == ("gradient", "4.weight")
    assert guard.events[0].findings[0].kind == ("nan" if math.isnan(value) else "inf")


@pytest.mark.parametrize("value", BAD)
def test_a_bad_loss_is_enough_even_with_clean_gradients(value):
    allowed, guard = one_step(lambda model, loss: loss.detach() * 0 + value)
    assert not allowed
    assert [f.what for f in guard.events[0].findings] == ["loss"]


def test_a_refused_step_leaves_no_gradient():
    """So that a loop which calls `zero_grad` only after a step does not carry the NaN into the next one."""
    _, guard = one_step(lambda model, loss: math.nan)
    assert all(parameter.grad is None for parameter in guard.model.parameters())


def test_a_python_float_is_a_loss_too():
    assert one_step(lambda model, loss: loss.item())[0]
    assert not one_step(lambda model, loss: math.nan)[0]


def test_large_finite_gradients_are_allowed_although_their_l2_norm_overflows():
    def break_it(model, loss):
        model[0].weight.grad.fill_(1e30)
        assert torch.isinf(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        return loss

    assert one_step(break_it)[0]


def test_half_precision_gradients_are_allowed_although_their_norm_is_beyond_65504():
    model = nn.Linear(64, 64).half()
    guard = watch(model)
    model(torch.ones(1, 64, dtype=torch.float16))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3e4)
    assert guard.allow_step(0.0)


def test_a_sparse_gradient_is_looked_into():
    model = nn.Embedding(5, 3, sparse=True)
    guard = watch(model)
    loss = (model(torch.tensor([1, 2])) * torch.tensor([1.0, math.inf, 1.0])).sum()
    loss.backward()
    assert not guard.allow_step(0.0)
    assert guard.events[0].name == "weight"


def test_a_buffer_that_holds_minus_inf_on_purpose_is_no_finding():
    model = make_model()
    model.register_buffer("mask", torch.full((3,), -math.inf))
    guard = watch(model, check_state=True, optimizer=OPTIMIZERS["sgd"](model.parameters()))
    loss = model(make_batches(1)[0][0]).mean()
    loss.backward()
    assert guard.allow_step(loss)


class FilledLater(nn.Module):
    """Its buffer is None until the first forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", None)

    def forward(self, x):
        self.mean = (torch.zeros(4) if self.mean is None else self.mean) * 0.9 + x.mean(0) * 0.1
        return self.linear(x - self.mean)


class Expanded(nn.Module):
    """Its buffer has more entries than memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.tensor([0.5]).expand(4))

    def forward(self, x):
        return self.linear(x / self.mean)


class Growing(nn.Module):
    """Its buffer has another shape after each forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        self.mean = torch.cat([self.mean, x.mean().view(1)])
        return self.linear(x)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("kind", [FilledLater, Expanded, Growing])
def test_unusual_buffers_are_put_back(kind, policy):
    model = kind()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    guard, before = watch(model, policy, optimizer=optimizer), model.mean
    for value, good in ((math.nan, False), (1.0, True)):
        loss = model(torch.full((3, 4), value)).mean()
        loss.backward()
        assert guard.allow_step(loss) is good
        assert good or model.mean is None or torch.equal(model.mean, before)
        optimizer.zero_grad()
    guard.after_step()
    assert torch.isfinite(model.mean).all()


def test_a_buffer_that_turns_bad_after_it_was_none_is_found():
    model = FilledLater()
    guard = watch(model, check_state=True, optimizer=OPTIMIZERS["sgd"](model.parameters()))
    model(torch.full((3, 4), math.nan))
    assert not guard.allow_step(0.0)
    assert [finding.name for finding in guard.events[0].findings] == ["mean"]


# -- Injections --------------------------------------------------------------------------------------


def injection(seed: int, steps: int):
    """(step, kind, inject) of the one fault that this seed stands for."""
    rng = random.Random(seed)
    kind = rng.choice(["loss", "loss only", "gradient", "buffer", "batch", "parameter", "optimizer state"])
    at, value = rng.randrange(1 if kind == "optimizer state" else 0, steps), rng.choice(BAD)

    def spoil(tensor):
        tensor.detach().view(-1)[rng.randrange(tensor.numel())] = value

    def inject(moment, i, model, optimizer, losses=None):
        if i != at:
            return
        if moment == "between steps" and kind == "buffer":
            spoil(rng.choice([model[1].running_mean, model[1].running_var]))
        if moment == "between steps" and kind == "optimizer state":
            state = optimizer.state[rng.choice(list(model.parameters()))]
            spoil(state[rng.choice([key for key in state if key != "step"])])
        if moment == "before the decision" and kind == "loss":
            (losses[0] * value).backward()
        if moment == "before the decision" and kind in ("loss", "loss only"):
            losses[0] = losses[0].detach() * value
        if moment == "before the decision" and kind == "gradient":
            spoil(rng.choice(list(model.parameters())).grad)
        if moment == "after the step" and kind == "parameter":
            spoil(rng.choice(list(model.parameters())))

    return at, kind, value, inject


SHOWS_AS = {  # where a fault shows first, if not where it was put
    "loss only": "loss",
    "batch": "loss",
}


def test_two_hundred_injections_are_all_undone_and_all_in_the_events():
    steps, seen = make_batches(5), set()
    references = {}
    for seed in range(200):
        at, kind, value, inject = injection(seed, len(steps))
        optimizer = ("adamw", "sgd")[seed % 2]
        spoiled = poison(steps, {at} if kind == "batch" else (), value)
        if kind == "loss":  # the graph is needed twice
            inject = keep_graph(at, value)
        model, opt, guard = loop(spoiled, "rollback", optimizer, inject)
        if (at, optimizer) not in references:
            references[at, optimizer] = everything(*loop(steps[:at] + steps[at + 1 :], "off", optimizer)[:2])
        assert_identical(everything(model, opt), references[at, optimizer])
        assert [(e.step, e.what) for e in guard.events] == [(at + 1, SHOWS_AS.get(kind, kind))], (seed, kind)
        seen.add(kind)
    assert len(seen) == 7


def keep_graph(at: int, value: float):
    """A loss that turned bad before its backward: every gradient is bad too."""

    def inject(moment, i, model, optimizer, losses=None):
        if i == at and moment == "before the decision":
            for parameter in model.parameters():
                parameter.grad.mul_(value)
            losses[0] = losses[0].detach() * value

    return inject


# -- Policies ----------------------------------------------------------------------------------------


def test_rollback_undoes_a_step_that_spoiled_a_parameter_and_states_its_memory():
    def inject(moment, i, model, optimizer, losses=None):
        if moment == "after the step" and i == 2:
            model[0].weight.data[0, 0] = math.nan

    model, opt, guard = loop(make_batches(4), "rollback", inject=inject)
    event = guard.events[0]
    assert (event.what, event.name, event.action) == ("parameter", "0.weight", "rolled back")
    copied = [*model.parameters(), *model.buffers(), *(v for s in opt.state.values() for v in s.values())]
    assert guard.summary().rollback_bytes == sum(t.nbytes for t in copied)
    assert "last good copy" in str(guard.summary())


def test_rollback_undoes_what_was_spoilt_between_two_steps():
    def inject(moment, i, model, optimizer, losses=None):
        if moment == "between steps" and i == 2:
            model[0].weight.data[0, 0] = math.nan

    steps = make_batches(5)
    model, opt, guard = loop(steps, "rollback", inject=inject)
    assert [(event.step, event.what, event.action) for event in guard.events] == [(3, "loss", "rolled back")]
    assert_identical(everything(model, opt), everything(*loop(steps[:2] + steps[3:], "off")[:2]))


@pytest.mark.parametrize(("keep_on", "device"), [("cpu", "cpu"), ("device", None)])
def test_the_last_good_copy_is_of_what_is_trained_and_lies_where_it_was_asked_for(keep_on, device):
    model = make_model()
    model[0].requires_grad_(False)
    guard = watch(model, "rollback", optimizer=OPTIMIZERS["sgd"](model.parameters()), keep_on=keep_on)
    assert {guard._good.device, guard._good_buffers.device} == {device}
    copied = [*model.buffers(), *(p for p in model.parameters() if p.requires_grad)]
    assert guard.summary().rollback_bytes == sum(t.nbytes for t in copied)
    assert guard.summary().rollback_device == keep_on


def load_checkpoint(model, optimizer):
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def clip_weights(model, optimizer):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.05, 0.05)


def renew_averages(model, optimizer):
    torch.optim.swa_utils.update_bn(make_batches(2, 1)[0], model)


def load_optimizer(model, optimizer):
    state = optimizer.state_dict()
    for values in state["state"].values():
        values["exp_avg"].mul_(2)
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("spoil", ["gradient", "parameter"])
@pytest.mark.parametrize("change", [load_checkpoint, clip_weights, renew_averages, load_optimizer])
def test_rollback_keeps_what_was_changed_between_steps(change, spoil):
    """Also where the very next step is bad: the last good copy is older than the change."""
    kept = {}

    def inject(moment, i, model, optimizer, losses=None):
        if i == 2 and moment == "between steps":
            change(model, optimizer)
            kept.update({name: tensor.clone() for name, tensor in everything(model, optimizer).items()})
        if i == 2 and moment == "before the decision" and spoil == "gradient":
            model[0].weight.grad[0, 0] = math.nan
        if i == 2 and moment == "after the step" and spoil == "parameter":
            model[0].weight.data[0, 0] = math.nan

    model, optimizer, guard = loop(make_batches(3), "rollback", inject=inject)
    assert [event.what for event in guard.events] == [spoil]
    assert_identical(everything(model, optimizer), kept)


class Estimates(torch.optim.Optimizer):
    """Keeps a number of its own beside the rates, as schedule-free optimizers and D-Adaptation do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01, "d": 1.0, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = nn.utils.get_total_norm([p.grad for p in group["params"]]).item()
            group["d"], group["k"] = 0.9 * group["d"] + norm * group["lr"], group["k"] + 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-0.01 * group["d"])


def test_rollback_puts_the_optimizers_own_numbers_back_and_leaves_the_schedule_its_rate():
    def run(bad):
        model = make_model()
        optimizer = Estimates(model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        guard = watch(model, "rollback", optimizer=optimizer)
        torch.manual_seed(2)
        for i, (x,) in enumerate(make_batches(4)):
            if i == 2 and not bad:
                continue
            loss = model(x).square().mean()
            loss.backward()
            assert guard.allow_step(loss)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            if i == 2:
                optimizer.param_groups[0]["d"] = model[0].weight.data[0, 0] = math.nan
            if guard.after_step():
                schedule.step()
            else:
                assert optimizer.param_groups[0]["lr"] == rate
            optimizer.zero_grad()
        group = optimizer.param_groups[0]
        return model.state_dict(), (group["d"], group["k"], group["lr"], schedule.get_last_lr())

    got, numbers = run(bad=True)
    expected, expected_numbers = run(bad=False)
    assert_identical(got, expected)
    assert numbers == expected_numbers


def test_without_a_copy_a_spoiled_parameter_ends_the_run(tmp_path):
    def inject(moment, i, model, optimizer, losses=None):
        if moment == "after the step" and i == 2:
            model[0].weight.data[0, 0] = math.nan

    with pytest.raises(GuardStop, match="policy='rollback' keeps a good copy"):
        loop(make_batches(4), "skip", inject=inject, check_state=True, folder=tmp_path)


@pytest.mark.parametrize("policy", ["stop", "raise"])
def test_stop_and_raise_end_a_plain_loop_at_the_first_bad_step(policy, tmp_path):
    with pytest.raises(GuardStop, match=r"step 3.*loss is nan") as caught:
        loop(poison(make_batches(5), {2}), policy, folder=tmp_path)
    assert caught.value.event.step == 3
    assert caught.value.folder == tmp_path / "step-000003"


def test_a_dead_run_stops_after_max_consecutive(tmp_path):
    with pytest.raises(GuardStop, match="3 steps in a row") as caught:
        loop(poison(make_batches(9), {1, 3, 4, 6, 7, 8}), max_consecutive=3, folder=tmp_path)
    assert caught.value.event.step == 9


def test_a_run_of_which_every_step_is_rolled_back_is_dead(tmp_path):
    def inject(moment, i, model, optimizer, losses=None):
        if moment == "after the step":
            model[0].weight.data[0, 0] = math.nan

    with pytest.raises(GuardStop, match="3 steps in a row") as caught:
        loop(make_batches(9), "rollback", inject=inject, max_consecutive=3, folder=tmp_path)
    assert caught.value.event.step == 3


def test_off_hooks_in_nothing():
    model = make_model()
    guard = watch(model, "off")
    assert not model._forward_pre_hooks
    assert guard.allow_step(math.nan)


def test_remove_takes_the_hook_out():
    model = make_model()
    with watch(model):
        assert model._forward_pre_hooks
    assert not model._forward_pre_hooks


def transformers_trainer():
    import transformers

    return transformers.Trainer


def watch_with(make_optimizers, policy="rollback"):
    model = make_model()
    return watch(model, policy, optimizer=make_optimizers(model))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: watch(make_model(), "skipp"), "policy 'skipp' is unknown"),
        (lambda: watch(3), "int is neither a Trainer nor"),
        (lambda: watch(transformers_trainer()), "type is neither a Trainer nor"),
        (lambda: watch(nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())), "parameters without a shape yet"),
        (lambda: watch(watch(make_model()).model), "this model is watched already"),
        (lambda: watch(make_model(), "rollback"), "need the optimizer"),
        (lambda: watch(make_model(), keep_on="disk"), "keep_on 'disk' is unknown"),
        (lambda: watch(make_model(), max_consecutive=0), "give 1 or more"),
        (lambda: watch(make_model(), max_consecutive="3"), "max_consecutive is '3'"),
        (lambda: watch(make_model(), scaler="x"), "scaler is a str"),
        (lambda: watch(make_model(), optimizer="adam"), "optimizer is a str"),
        (
            lambda: watch(make_model(), "rollback", optimizer=OPTIMIZERS["sgd"](make_model().parameters())),
            "no parameter of",
        ),
        (
            lambda: watch(make_model(), optimizer=[OPTIMIZERS["sgd"](make_model().parameters()), 3]),
            "optimizer is a int",
        ),
        (lambda: watch_with(lambda m: OPTIMIZERS["sgd"](m[0].parameters())), "does not hold 1.weight, which requires"),
        (lambda: watch(make_model(), folder=5), "folder 5 cannot be written to"),
        (lambda: watch(make_model(), folder=Path(__file__) / "below"), "test_guard.py/below cannot be written to"),
        (lambda: watch(make_model().requires_grad_(False)), "no parameter that requires a gradient"),
        (lambda: watch(make_model()).allow_step(0.0), "has not run in training mode"),
        (lambda: watch(make_model()).allow_step(0.0, make_model()), "not the model that is watched"),
        (lambda: replay("nowhere", print), "holds no batches.pt"),
    ],
)
def test_bad_input_is_refused_in_one_line(call, message):
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_folder_without_the_right_to_write_is_refused(monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(InputError, match="the folder here cannot be written to"):
        watch(make_model(), folder="here")


@pytest.mark.parametrize("loss", [None, "1", [], [None], [[1.0]], {"loss": 1.0}, torch.tensor([])])
def test_what_is_no_loss_is_refused(loss):
    model = make_model()
    guard = watch(model)
    model(make_batches(1)[0][0]).mean().backward()
    with pytest.raises(InputError, match="is no loss; give a scalar tensor"):
        guard.allow_step(loss)


@pytest.mark.parametrize(("where", "bad"), [("loss", True), ("gradient", True), ("neither", False)])
def test_complex_numbers_are_looked_into(where, bad):
    model = nn.Linear(4, 4, dtype=torch.complex64)
    guard = watch(model)
    loss = model(torch.randn(2, 4, dtype=torch.complex64)).abs().mean()
    loss.backward()
    if where == "gradient":
        model.weight.grad[0, 0] = complex(0, math.nan)
    given = torch.tensor(complex(1, math.inf)) if where == "loss" else torch.tensor(complex(1, 1))
    assert guard.allow_step(given) is not bad
    assert [event.what for event in guard.events] == [where] * bad


class Listed(nn.Module):
    """Takes a list of dicts, as detection models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, items):
        return self.linear(torch.stack([item["x"] for item in items])).mean()


def test_the_items_of_a_list_are_its_rows():
    model = Listed()
    guard = watch(model)
    assert not guard.allow_step(model([{"x": torch.ones(4)}] * 7) * math.nan)
    assert guard.events[0].rows == 7


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_is_part_of_its_step(kind, policy):
    def run(steps, policy):
        model = make_model()
        optimizer = kind(model.parameters(), lr=0.05)
        guard = watch(model, policy, optimizer=optimizer)
        torch.manual_seed(2)
        for (x,) in steps:

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            if guard.allow_step(closure()):
                optimizer.step(closure)
                guard.after_step()
        return model.state_dict(), guard.summary().rows_lost

    steps, bad = make_batches(6), {2, 4}
    got, lost = run(poison(steps, bad), policy)
    expected, _ = run([step for i, step in enumerate(steps) if i not in bad], "off")
    assert_identical(got, expected)
    assert lost == 12


def test_a_closure_is_part_of_its_step_where_accelerate_wraps_the_optimizer_too():
    from accelerate import Accelerator

    model, x = make_model(), make_batches(1)[0][0]
    optimizer = Accelerator(cpu=True).prepare_optimizer(OPTIMIZERS["sgd"](model.parameters()))
    guard = watch(model, optimizer=optimizer)
    assert guard.allow_step(model(x).mean())
    optimizer.step(lambda: model(x).mean())
    assert not guard.allow_step(model(x).mean() * math.nan)
    assert guard.events[0].rows == 6


def test_a_closure_that_fails_does_not_blind_the_guard():
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    guard, x = watch(model, optimizer=optimizer), make_batches(1)[0][0]
    assert guard.allow_step(model(x).mean())
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert guard.allow_step(model(x).mean())
    guard.remove()
    assert not optimizer._optimizer_step_pre_hooks


def test_a_forward_in_evaluation_mode_is_no_part_of_a_step():
    model, x = make_model(), make_batches(1)[0][0]
    guard = watch(model)
    model.eval()(x)
    with pytest.raises(InputError, match="has not run in training mode"):
        guard.allow_step(0.0)


def test_rollback_insists_on_after_step():
    model = make_model()
    guard = watch(model, "rollback", optimizer=OPTIMIZERS["sgd"](model.parameters()))
    for expected in (False, True):
        loss = model(make_batches(1)[0][0]).mean()
        loss.backward()
        if expected:
            with pytest.raises(InputError, match=r"need guard.after_step\(\)"):
                guard.allow_step(loss)
        else:
            assert guard.allow_step(loss)


# -- What the optimizers hold --------------------------------------------------------------------------


def held_step(guard, loss, optimizers, spoil=lambda: None):
    """One step of a loop with several optimizers; True if it counts."""
    loss.backward()
    spoil()
    kept = guard.allow_step(loss)
    if kept:
        for optimizer in optimizers:
            optimizer.step()
        kept = guard.after_step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return kept


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_layer_unfrozen_later_and_the_parameters_of_a_loss_are_guarded_too(policy):
    model, head = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), nn.Linear(4, 1)
    model[1].requires_grad_(False)
    optimizer = OPTIMIZERS["sgd"]([*model.parameters(), *head.parameters()])
    guard = watch(model, policy, optimizer=optimizer)
    model[1].requires_grad_(True)
    names = {"1.weight": model[1].weight, "parameter 4 of group 0": head.weight}
    for parameter in names.values():
        step = lambda spoil: held_step(guard, head(model(torch.ones(3, 4))).mean(), [optimizer], spoil)
        before = [p.detach().clone() for p in [*model.parameters(), *head.parameters()]]
        if policy == "rollback":
            rate = optimizer.param_groups[0]["lr"]
            assert not step(lambda: optimizer.param_groups[0].update(lr=math.nan))
            optimizer.param_groups[0]["lr"] = rate
        assert not step(lambda parameter=parameter: parameter.grad.fill_(math.inf))
        after = [*model.parameters(), *head.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert step(lambda: None)
    assert [event.name for event in guard.events if event.what == "gradient"] == list(names)


def test_several_optimizers_are_rolled_back_together():
    def run(bad):
        model = make_model()
        weights = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        optimizers = [OPTIMIZERS["sgd"](weights), OPTIMIZERS["adamw"](others)]
        guard = watch(model, "rollback", optimizer=optimizers)
        torch.manual_seed(2)
        for i, (x,) in enumerate(make_batches(6)):
            optimizers[0].param_groups[0]["momentum"] = math.nan if i == 3 else 0.9
            if i != 3 or bad:
                held_step(guard, model(x).square().mean(), optimizers)
        return everything(model, optimizers[0]) | everything(model, optimizers[1]), guard

    got, guard = run(bad=True)
    assert_identical(got, run(bad=False)[0])
    assert [(event.step, event.what) for event in guard.events] == [(4, "optimizer state")]


def test_parameters_that_no_module_names_are_rolled_back_each():
    """Of two losses: each is the first of its own optimizer."""
    model, heads = nn.Linear(4, 4), [nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)]
    optimizers = [OPTIMIZERS["sgd"](module.parameters()) for module in (model, *heads)]
    guard = watch(model, "rollback", optimizer=optimizers)
    before = [head.weight.detach().clone() for head in heads]
    for i in (1, 2):
        optimizers[i].param_groups[0]["lr"] = math.nan
        assert not held_step(guard, sum(head(model(torch.ones(3, 4))).mean() for head in heads), optimizers)
        assert guard.events[-1].name == f"parameter 0 of group 0 of optimizer {i}"
        optimizers[i].param_groups[0]["lr"] = 1e-2
    assert all(torch.equal(head.weight, weight) for head, weight in zip(heads, before, strict=True))


class Preconditioned(torch.optim.SGD):
    """Keeps nested state, as Shampoo and SOAP do."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["factors"] = {"left": [torch.full((2, 2), self.param_groups[0]["dampening"])]}


def test_nested_optimizer_state_is_looked_into_and_put_back():
    model = nn.Linear(4, 1)
    optimizer = Preconditioned(model.parameters(), lr=0.1, momentum=0.9)
    guard = watch(model, "rollback", optimizer=optimizer)
    assert held_step(guard, model(torch.ones(2, 4)).mean(), [optimizer])
    optimizer.param_groups[0]["dampening"] = math.nan
    optimizer.param_groups[0]["momentum"] = 0.0
    assert not held_step(guard, model(torch.ones(2, 4)).mean(), [optimizer])
    assert guard.events[0].name == "factors of weight"
    assert (optimizer.state[model.weight]["factors"]["left"][0] == 0).all()


def test_rolling_back_the_first_step_leaves_no_empty_state():
    """An optimizer that asks `if p not in self.state` would find one without its keys."""
    model = nn.Linear(4, 1)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    guard = watch(model, "rollback", optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = math.nan
    assert not held_step(guard, model(torch.ones(2, 4)).mean(), [optimizer])
    assert model.weight not in optimizer.state


# -- GradScaler --------------------------------------------------------------------------------------


def scaled_step(guard, model, optimizer, scaler, factor=1.0, gradient=None):
    loss = model(make_batches(1)[0][0]).square().mean() * factor
    scaler.scale(loss).backward()
    if gradient is not None:
        model[4].bias.grad.fill_(gradient)
    scaler.unscale_(optimizer)  # as one does before clipping
    if allowed := guard.allow_step(loss):
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return allowed


def scaled(tmp_path):
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    return watch(model, scaler=scaler, folder=tmp_path), model, optimizer, scaler


def test_an_inf_in_scaled_gradients_is_left_to_the_scaler(tmp_path):
    guard, model, optimizer, scaler = scaled(tmp_path)
    before = scaler.get_scale()
    assert scaled_step(guard, model, optimizer, scaler, gradient=math.inf)
    assert scaler.get_scale() == before / 2
    assert guard.events == []


def test_a_bad_loss_is_the_guards_business_and_leaves_the_scale_alone(tmp_path):
    guard, model, optimizer, scaler = scaled(tmp_path)
    before = scaler.get_scale()
    assert not scaled_step(guard, model, optimizer, scaler, factor=math.nan)
    assert scaler.get_scale() == before
    assert scaled_step(guard, model, optimizer, scaler)  # the scaler is ready for the next step
    assert len(optimizer.state) == 6


def test_a_bad_loss_may_come_before_any_was_scaled(tmp_path):
    guard, model, _, scaler = scaled(tmp_path)
    before = scaler.get_scale()
    model(make_batches(1)[0][0])
    assert not guard.allow_step(math.nan)
    assert scaler.get_scale() == before


def test_the_guard_speaks_up_when_the_scaler_never_steps(tmp_path):
    guard, model, optimizer, scaler = scaled(tmp_path)
    for _ in range(SCALER_PATIENCE - 1):
        assert scaled_step(guard, model, optimizer, scaler, gradient=math.inf)
    with pytest.raises(GuardStop, match=r"no step has been taken for 16 steps: gradient of 4\.bias is inf"):
        scaled_step(guard, model, optimizer, scaler, gradient=math.inf)
    assert "loss scale has fallen to 2" in guard.events[0].reason
    assert len(guard.events) == 1


def test_steps_that_the_scaler_skips_count_in_a_row_and_their_rows_are_their_own(tmp_path):
    guard, model, optimizer, scaler = scaled(tmp_path)
    falling = [math.inf] * (SCALER_PATIENCE - 1)
    for gradient in (*falling, None, *falling):
        assert scaled_step(guard, model, optimizer, scaler, gradient=gradient)
    assert not scaled_step(guard, model, optimizer, scaler, factor=math.nan)
    assert [event.rows for event in guard.events] == [6]


# -- Locate and post-mortem --------------------------------------------------------------------------


def fake_locate(step, *, model=None, **tensors):
    """Stands in for `nanlab.locate`: runs the step, and reports its loss and what it was given."""
    loss = step()
    return SimpleNamespace(found=not math.isfinite(loss), loss=loss, tensors=tensors, model=model)


@pytest.fixture
def located(monkeypatch):
    monkeypatch.setattr(nanlab.tracing, "locate", fake_locate, raising=False)


class WithLoss(nn.Module):
    """Returns an object with `.loss`, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, x):
        return SimpleNamespace(loss=self.inner(x).square().mean())


def test_locate_replays_the_failing_step_and_changes_nothing(located):
    results = []
    for locate in (True, False):
        torch.manual_seed(3)
        model = WithLoss()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        guard = watch(model, locate=locate)
        for (x,) in poison(make_batches(5), {2}):
            loss = model(x).loss
            loss.backward()
            if guard.allow_step(loss):
                optimizer.step()
            optimizer.zero_grad()
        results.append((everything(model, optimizer), guard))
    assert_identical(results[0][0], results[1][0])
    report = results[0][1].events[0].report
    assert math.isnan(report.loss)
    assert torch.isnan(report.tensors["argument_0"][2, 1])
    assert results[1][1].events[0].report is None


def test_a_loop_can_say_how_its_loss_is_computed(located):
    model = make_model()
    guard = watch(model, locate=True)
    x = poison(make_batches(1), {0})[0][0]
    compute = lambda: model(x).square().mean()
    loss = compute()
    loss.backward()
    assert not guard.allow_step(loss, model, replay=compute)
    assert math.isnan(guard.events[0].report.loss)
    model(x)
    assert not guard.allow_step(math.nan, replay=lambda: model(torch.ones(6, 4)).mean())
    assert guard.events[1].report is None  # nothing showed


def test_a_diagnosis_that_fails_does_not_end_the_run(monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("no luck")

    monkeypatch.setattr(nanlab.tracing, "locate", broken, raising=False)
    _, _, guard = loop(poison(make_batches(3), {1}), locate=True)
    assert guard.events[0].report is None
    assert "no luck" in caplog.text


def test_post_mortem_replays_the_same_loss_in_a_fresh_model(located, tmp_path):
    model = make_model()
    guard = watch(model, "stop", folder=tmp_path)
    x = make_batches(1)[0][0]
    loss = model(x).square().mean() * math.inf
    loss.backward()
    with pytest.raises(GuardStop) as caught:
        guard.allow_step(loss)
    folder = caught.value.folder
    names = {path.name for path in folder.iterdir()}
    assert names == {"batches.pt", "weights.pt", "log_tail.json", "report.txt", "summary.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]  # no draft is left behind
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["event"]["findings"][0] == {"what": "loss", "name": "", "kind": "inf", "rank": 0}
    assert "loss is inf" in (folder / "report.txt").read_text()
    assert json.loads((folder / "log_tail.json").read_text())["recent"] == [{"step": 1, "loss": math.inf}]

    fresh = make_model()
    fresh[0].weight.data.zero_()
    torch.manual_seed(99)
    somewhere_else = torch.get_rng_state()
    report = replay(folder, lambda x: fresh(x).square().mean(), model=fresh)
    assert torch.equal(torch.get_rng_state(), somewhere_else)  # the caller's generator is left alone
    torch.set_rng_state(torch.load(folder / "batches.pt", weights_only=True)[0]["rng"]["cpu"])
    expected = make_model_like(model)(x).square().mean()  # same weights, same dropout
    assert torch.equal(report.loss, expected)


class Inputs(nn.Module):
    """Takes what is no plain tensor: a sparse one, an array, a type, a tuple with names."""

    Pair = namedtuple("Pair", ["left", "right"])

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, sparse, array, pair=None, dtype=None):
        x = torch.sparse.mm(sparse, torch.as_tensor(array, dtype=dtype))
        return SimpleNamespace(loss=self.linear(x).square().mean() * (1 if pair is None else pair.left))


@pytest.mark.parametrize("pair", [None, Inputs.Pair(torch.ones(()), torch.ones(()))])
def test_inputs_that_are_no_plain_tensors_are_run_again(located, pair, tmp_path):
    model = Inputs()
    guard = watch(model, "stop", locate=True, folder=tmp_path)
    array = np.full((6, 4), np.nan)
    loss = model(torch.eye(6).to_sparse(), array, pair, dtype=torch.float32).loss
    loss.backward()
    with pytest.raises(GuardStop) as caught:
        guard.allow_step(loss)
    assert guard.events[0].report.loss.isnan()
    if pair is None:  # named fields are lost on disk
        assert replay(caught.value.folder, lambda *a, **k: model(*a, **k).loss, model=model).loss.isnan()


def test_replay_runs_a_frozen_layer_as_it_ran_and_leaves_every_mode_as_it_was(located, tmp_path):
    model = make_model()
    model[1].eval()
    guard, x = watch(model, "stop", folder=tmp_path), make_batches(1)[0][0]
    loss = model(x).square().mean()
    loss.backward()
    model[0].weight.grad[0, 0] = math.nan
    with pytest.raises(GuardStop) as caught:
        guard.allow_step(loss)
    fresh = make_model()
    fresh[3].eval()
    modes = [module.training for module in fresh.modules()]
    report = replay(caught.value.folder, lambda x: fresh(x).square().mean(), model=fresh)
    assert torch.equal(report.loss, loss.detach())
    assert [module.training for module in fresh.modules()] == modes


def make_model_like(model):
    state = torch.get_rng_state()
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    torch.set_rng_state(state)
    return twin


def test_evidence_is_not_overwritten(tmp_path):
    for _ in range(2):
        with pytest.raises(GuardStop):
            loop(poison(make_batches(1), {0}), "raise", folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001", "step-000001-2"}


def unwritable(monkeypatch):
    def write(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(nanlab.post_mortem, "write", write)


def test_a_post_mortem_that_cannot_be_written_does_not_hide_why_the_run_ends(monkeypatch, tmp_path):
    unwritable(monkeypatch)
    with pytest.raises(GuardStop, match=r"step 1 raised: loss is nan.*no post-mortem in .*no space left") as caught:
        loop(poison(make_batches(1), {0}), "raise", folder=tmp_path)
    assert caught.value.folder is None
    trainer = make_trainer(rows(8, {2}), tmp_path)
    _, guard = trained(trainer, "stop")
    assert trainer.state.global_step == 2
    assert "no space left" in str(guard.stopped)


@pytest.mark.parametrize("name", ["batches.pt", "weights.pt"])
@pytest.mark.parametrize("keep", [0, 2, 1000])
def test_replay_names_the_file_that_is_damaged(name, keep, tmp_path):
    with pytest.raises(GuardStop) as caught:
        loop(poison(make_batches(1), {0}), "stop", folder=tmp_path)
    file, model = caught.value.folder / name, make_model()
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InputError, match=f"{name} is damaged") as caught:
        replay(file.parent, lambda x: model(x).mean(), model=model)
    assert "\n" not in str(caught.value)


def test_replay_says_that_the_weights_are_of_another_model(tmp_path):
    with pytest.raises(GuardStop) as caught:
        loop(poison(make_batches(1), {0}), "stop", folder=tmp_path)
    folder, model = caught.value.folder, nn.Linear(4, 1)
    with pytest.raises(InputError, match=r"weights.pt does not fit this model.*Missing key") as caught:
        replay(folder, lambda x: model(x).mean(), model=model)
    assert "\n" not in str(caught.value)


# -- Copies of what is watched -----------------------------------------------------------------------


def test_a_copy_of_a_watched_model_is_not_watched():
    """An average of the weights is a deep copy, which no `allow_step` ever empties."""
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    guard = watch(model, optimizer=optimizer)
    for twin in (copy.deepcopy(model), saved_and_loaded(model)):
        twin(make_batches(1)[0][0]).mean().backward()
        with pytest.raises(InputError, match="has not run"):
            guard.allow_step(0.0)
    copy.deepcopy(optimizer).step(lambda: torch.tensor(0.0))
    model(make_batches(1)[0][0])
    assert guard.allow_step(0.0)
    watch(copy.deepcopy(model)).remove()  # it may be watched for itself


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def test_a_copy_of_a_watched_trainer_trains_itself(tmp_path):
    trainer = make_trainer(rows(8), tmp_path)
    trainer.optimizer = trainer.lr_scheduler = None  # made when training begins
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    guard = watch(trainer)
    twin = copy.deepcopy(trainer)
    twin.train()
    assert guard.steps_seen == 0
    assert_identical(trainer.model.state_dict(), before)
    assert not torch.equal(twin.model.get_output_embeddings().weight, trainer.model.get_output_embeddings().weight)
    trainer.train()
    assert guard.steps_seen == 4


def test_findings_read_as_sentences():
    assert str(Finding("loss", "", "nan", 0)) == "loss is nan"
    assert str(Finding("gradient", "w", "inf", 0)) == "gradient of w is inf"
    assert str(Finding("buffer", "bn.running_mean", "nan", 0)) == "buffer bn.running_mean is nan"


# -- In a Trainer ------------------------------------------------------------------------------------


class Syncs(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: `.item()`, `bool(tensor)`, `nonzero`."""

    WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in self.WAITS
        return func(*args, **(kwargs or {}))


def rows(count: int, bad=(), poisoned="factor") -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 50, (8,), generator=generator) for _ in range(count)]
    data = [{"input_ids": x, "labels": x, "factor": 1.0, "offset": 0.0} for x in ids]
    for i in bad:
        data[i][poisoned] = math.nan
    return data


def tiny(family: str, **options):
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{family}Config")(**size, vocab_size=64, **options)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def make_trainer(data, folder, accumulation=1, optimizer="adamw", schedule=None, model=None, **options):
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        """Rows in order. A poisoned row has a factor of nan on its loss, or an offset, which no gradient passes."""

        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            factor, offset = inputs.pop("factor").mean(), inputs.pop("offset").mean()
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) * factor + offset
            return (loss, {}) if return_outputs else loss

    model = model or tiny("GPTNeoX", hidden_dropout=0.1, attention_dropout=0.1)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule or (lambda step: 1.0))
    defaults = {"num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no", "max_grad_norm": 1.0}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        **(defaults | options),
    )
    return InOrder(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, schedule))


def trained(trainer, policy="skip", **options):
    guard = watch(trainer, policy, **options)
    trainer.train()
    return everything(trainer.model, trainer.optimizer), guard


def without(data, step_rows, bad_steps):
    return [row for i, row in enumerate(data) if i // step_rows not in bad_steps]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("where", [{0}, {1, 2}, {3}, {0, 2, 3, 4, 6}], ids=str)
def test_trainer_ends_as_if_it_had_never_seen_the_bad_batches(where, accumulation, optimizer, tmp_path):
    step_rows = 2 * accumulation
    bad_rows = {i * step_rows + step_rows // 2 for i in where}
    count = 7 * step_rows
    got, guard = trained(make_trainer(rows(count, bad_rows), tmp_path, accumulation, optimizer))
    clean = without(rows(count), step_rows, where)
    expected, _ = trained(make_trainer(clean, tmp_path, accumulation, optimizer), "off")
    assert_identical(got, expected)
    assert [event.step for event in guard.events] == [i + 1 for i in sorted(where)]
    assert guard.summary().rows_lost == step_rows * len(where)


def test_a_bad_loss_of_any_micro_batch_counts_also_where_no_gradient_shows_it(tmp_path):
    trainer = make_trainer(rows(16, {4}, "offset"), tmp_path, accumulation=2)
    _, guard = trained(trainer)
    assert [(e.step, str(e.findings[0])) for e in guard.events] == [(2, "loss of micro-batch 1 of 2 is nan")]


def test_the_optimizer_is_not_called_for_a_refused_step(tmp_path):
    trainer, calls = make_trainer(rows(12, {2, 6}), tmp_path), []
    trainer.optimizer.register_step_post_hook(lambda *args: calls.append(trainer.state.global_step + 1))
    trained(trainer)
    assert calls == [1, 3, 5, 6]


def test_the_schedule_waits_for_a_refused_step(tmp_path):
    schedule = lambda step: 1 / (1 + step)
    got, _ = trained(make_trainer(rows(12, {4}), tmp_path, schedule=schedule))
    expected, _ = trained(make_trainer(without(rows(12), 2, {2}), tmp_path, schedule=schedule), "off")
    assert_identical(got, expected)


def test_the_schedule_goes_on_when_the_guard_is_removed_after_a_refused_step(tmp_path):
    from transformers import TrainerCallback

    class Remove(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                guard.remove()

    trainer = make_trainer(rows(12, {4}), tmp_path)
    trainer.add_callback(Remove())
    guard = watch(trainer)
    trainer.train()
    assert trainer.lr_scheduler.last_epoch == 5
    trainer = make_trainer(rows(12, {10}), tmp_path)
    with watch(trainer):
        trainer.train()
    trainer.train_dataset = rows(12)
    before = trainer.lr_scheduler.last_epoch
    trainer.train()
    assert trainer.lr_scheduler.last_epoch > before


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_log_keeps_its_numbers_and_says_what_was_skipped(accumulation, tmp_path):
    last_micro_batch = 6 * accumulation - 2  # of the third step
    trainer = make_trainer(rows(10 * accumulation, {last_micro_batch}), tmp_path, accumulation)
    trained(trainer)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in log] == [1, 2, 3, 4, 5]
    assert all(math.isfinite(entry["loss"]) for entry in log)
    assert [math.isnan(entry["grad_norm"]) for entry in log] == [False, False, True, False, False]
    assert [entry.get("guard_skipped") for entry in log] == [None, None, 1, 1, 1]
    assert trainer.args.logging_nan_inf_filter


def test_with_the_filter_off_the_log_is_the_trainers_own(tmp_path):
    """Also that it never gets rid of the NaN again: the Trainer empties its sum by subtracting it from itself."""
    trainer = make_trainer(rows(6, {2}), tmp_path, logging_nan_inf_filter=False)
    trained(trainer)
    assert [math.isnan(e["loss"]) for e in trainer.state.log_history if "loss" in e] == [False, True, True]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_healthy_step_makes_no_sync_beyond_the_trainers_own(policy, accumulation, tmp_path):
    """Counted as a difference of two lengths of run, so that what happens once per run does not matter."""

    def syncs_per_step(policy):
        counts = []
        for steps in (2, 6):
            trainer = make_trainer(rows(2 * accumulation * steps), tmp_path, accumulation, logging_steps=100)
            watch(trainer, policy)
            with Syncs() as syncs:
                trainer.train()
            counts.append(syncs.count)
        return (counts[1] - counts[0]) / 4

    own = syncs_per_step("off")
    assert own >= 1
    assert syncs_per_step(policy) <= own


def test_a_healthy_step_of_a_loop_fetches_one_number():
    model = make_model()
    guard = watch(model)
    loss = model(make_batches(1)[0][0]).mean()
    loss.backward()
    with Syncs() as syncs:
        assert guard.allow_step(loss)
    assert syncs.count == 1


def test_clipping_does_not_hide_which_gradient_was_bad(tmp_path):
    trainer = make_trainer(rows(4), tmp_path, max_grad_norm=0.5)
    head = trainer.model.get_output_embeddings().weight
    head.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), math.nan))
    _, guard = trained(trainer)
    assert [event.name for event in guard.events] == [name_of(head, trainer.model)] * 2


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("half", [False, True])
def test_a_norm_that_overflows_does_not_turn_finite_gradients_into_nan(half, policy, tmp_path):
    """Without a limit the Trainer "clips" to infinity, and inf / inf is NaN: after the guard has seen them finite."""
    from transformers import Trainer

    if not hasattr(Trainer, "_clip_grad_norm"):
        pytest.skip("in this transformers a limit of 0 means that nothing is clipped")
    data = rows(12)
    data[4]["factor"] = data[5]["factor"] = 4e4 if half else 1e25
    model = tiny("GPTNeoX").half() if half else None
    trainer = make_trainer(data, tmp_path, model=model, optimizer="sgd", max_grad_norm=0.0)
    _, guard = trained(trainer, policy)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert [(event.step, event.what, event.action) for event in guard.events] == [(3, "gradient", "skipped")]


def test_gradients_that_a_callback_spoils_after_clipping_are_refused(tmp_path):
    from transformers import TrainerCallback

    class Normalise(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for parameter in model.parameters():
                parameter.grad.div_(0.0 if state.global_step == 2 else 1.0)

    trainer = make_trainer(rows(12), tmp_path)
    trainer.add_callback(Normalise())
    _, guard = trained(trainer)
    assert [(event.step, event.what) for event in guard.events] == [(3, "gradient")]


def test_a_norm_that_a_callback_asks_for_after_the_step_is_no_verdict_on_the_next(tmp_path):
    from transformers import TrainerCallback

    class Norm(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            trainer.accelerator.clip_grad_norm_(model.parameters(), math.inf)

    trainer = make_trainer(rows(8, {2}), tmp_path)
    trainer.add_callback(Norm())
    _, guard = trained(trainer)
    assert [event.step for event in guard.events] == [2]


def test_a_gradient_that_a_callback_adds_is_looked_at(tmp_path):
    from transformers import TrainerCallback

    class Add(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                extra.grad = torch.full_like(extra, math.nan)

    trainer = make_trainer(rows(8), tmp_path)
    extra = nn.Parameter(torch.zeros(2))
    trainer.optimizer.add_param_group({"params": [extra]})
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1.0)
    trainer.add_callback(Add())
    _, guard = trained(trainer)
    assert [(event.step, event.name) for event in guard.events] == [(2, "parameter 0 of group 1")]


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_clipping_healthy_gradients_costs_no_second_look(max_grad_norm, tmp_path):
    trainer = make_trainer(rows(8), tmp_path, max_grad_norm=max_grad_norm)
    guard, looks = watch(trainer), []
    findings = guard._findings
    guard._findings = lambda table: looks.append(1) or findings(table)
    trainer.train()
    assert len(looks) == 4


def name_of(parameter, model):
    return next(name for name, p in model.named_parameters() if p is parameter)


def test_the_post_mortem_of_a_trainer_runs_to_the_same_loss(located, tmp_path):
    """Which is of all tokens of the step, whatever the micro-batch."""
    trainer = make_trainer(rows(8), tmp_path, accumulation=2)
    trainer.model.get_output_embeddings().weight.register_hook(lambda grad: grad * math.nan)
    _, guard = trained(trainer, "stop")
    folder = guard.stopped.folder
    logged = json.loads((folder / "log_tail.json").read_text())["recent"][0]["loss"]
    assert replay(folder, make_trainer(rows(2), tmp_path)).loss.item() == pytest.approx(logged, rel=1e-6)


def test_a_dead_trainer_returns_from_train_and_leaves_a_post_mortem(located, tmp_path):
    trainer = make_trainer(rows(20, range(6, 20)), tmp_path, save_strategy="no")
    _, guard = trained(trainer, max_consecutive=2)
    assert trainer.state.global_step == 5
    assert [event.action for event in guard.events] == ["skipped", "stopped"]
    folder = guard.stopped.folder
    assert folder == tmp_path / "guard" / "step-000005"
    assert [entry["step"] for entry in json.loads((folder / "log_tail.json").read_text())["log"]] == [1, 2, 3, 4]
    report = replay(folder, make_trainer(rows(2), tmp_path))
    assert math.isnan(report.loss)
    assert {"input_ids", "labels", "factor"} <= report.tensors.keys()
    assert math.isnan(guard.replay(folder).loss)


@pytest.mark.parametrize("policy", ["skip", "off"])
def test_a_guard_replays_before_its_trainer_has_trained(policy, located, tmp_path):
    """As in a new process, when the run has ended."""
    _, guard = trained(make_trainer(rows(8, {2}), tmp_path), "stop")
    fresh = watch(make_trainer(rows(2), tmp_path), policy)
    assert math.isnan(fresh.replay(guard.stopped.folder).loss)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_refused_step_leaves_scaler_and_schedule_of_an_fp16_run_as_they_were(max_grad_norm, tmp_path, monkeypatch):
    def run(data):
        trainer = make_trainer(data, tmp_path, accumulation=2, max_grad_norm=max_grad_norm)
        accelerator = trainer.accelerator  # it refuses fp16 on a CPU, where it works all the same
        monkeypatch.setattr(accelerator.state, "_mixed_precision", "fp16")
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", growth_interval=3)
        got, guard = trained(trainer)
        return got, (accelerator.scaler.state_dict(), trainer.lr_scheduler.last_epoch), guard

    got, counted, guard = run(rows(20, {6, 16}))
    assert [event.step for event in guard.events] == [2, 5]
    expected, expected_counted, _ = run(without(rows(20), 4, {1, 4}))
    assert_identical(got, expected)
    assert counted == expected_counted
    assert counted[1] == 3


def test_deepspeed_is_refused_when_training_begins(tmp_path):
    from transformers import TrainerCallback

    callback = TrainerCallback()
    callback.on_train_begin = lambda *args, **kwargs: vars(trainer).update(is_deepspeed_enabled=True)
    trainer = make_trainer(rows(4), tmp_path)
    trainer.add_callback(callback)
    watch(trainer)
    with pytest.raises(InputError, match="DeepSpeed steps inside backward"):
        trainer.train()


def test_raise_in_a_trainer(tmp_path):
    with pytest.raises(GuardStop, match="step 2 raised: loss is nan"):
        trained(make_trainer(rows(8, {2}), tmp_path), "raise")


def test_locate_in_a_trainer(located, tmp_path):
    got, guard = trained(make_trainer(rows(8, {2}), tmp_path, accumulation=2), locate=True)
    expected, _ = trained(make_trainer(rows(8, {2}), tmp_path, accumulation=2))
    assert_identical(got, expected)
    assert math.isnan(guard.events[0].report.loss)


def test_a_diagnosis_does_not_count_in_what_a_trainer_logs(located, tmp_path):
    """TRL's trainers keep the numbers of every batch of which they compute the loss, until the next log entry."""
    trainer = make_trainer(rows(8, {2}), tmp_path)
    trainer.kept, trainer.batches, compute_loss = [], 0, trainer.compute_loss

    def count(*args, **kwargs):
        trainer.kept.append(trainer.state.global_step)
        trainer.batches += 1
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = count
    _, guard = trained(trainer, locate=True)
    assert guard.events[0].report.found
    assert trainer.kept == [0, 1, 2, 3]
    assert trainer.batches == 4


def test_a_trainer_that_cannot_be_put_back_does_not_die_of_the_diagnosis(tmp_path, caplog):
    class Lazy(dict):
        def keys(self):
            raise ImportError("not installed")

        __iter__ = keys

    trainer = make_trainer(rows(8, {2}), tmp_path)
    trainer.kept = Lazy(a=1)
    _, guard = trained(trainer, locate=True)
    assert [event.report for event in guard.events] == [None]
    assert "not installed" in caplog.text


def test_rollback_in_a_trainer_undoes_a_spoiled_parameter(tmp_path):
    from transformers import TrainerCallback

    class Spoil(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
            if state.global_step == 2:
                optimizer.state[model.get_output_embeddings().weight]["exp_avg"][0, 0] = math.nan

    trainer = make_trainer(rows(12), tmp_path)
    trainer.add_callback(Spoil())
    got, guard = trained(trainer, "rollback")
    name = name_of(trainer.model.get_output_embeddings().weight, trainer.model)
    assert [(e.step, e.what, e.name) for e in guard.events] == [(3, "optimizer state", f"exp_avg of {name}")]
    expected, _ = trained(make_trainer(without(rows(12), 2, {2}), tmp_path), "off")
    assert_identical(got, expected)


@pytest.mark.parametrize("policy", ["skip", "off"])
def test_remove_leaves_the_trainer_as_it_was(policy, tmp_path):
    trainer = make_trainer(rows(4), tmp_path)
    before = set(vars(trainer)), list(trainer.callback_handler.callbacks)
    guard = watch(trainer, policy)
    trainer.train()
    assert "clip_grad_norm_" not in vars(trainer.accelerator)  # taken out when training ended
    guard.remove()
    assert {"training_step", "compute_loss"}.isdisjoint(vars(trainer))
    assert trainer.callback_handler.callbacks == before[1]
    watch(trainer).remove()  # may be watched again


def test_a_trainer_is_not_watched_twice(tmp_path):
    trainer = make_trainer(rows(4), tmp_path)
    watch(trainer)
    with pytest.raises(InputError, match="watched already"):
        watch(trainer)


def test_a_trainer_brings_its_own_optimizer_and_scaler(tmp_path):
    for option in ("optimizer", "scaler"):
        trainer = make_trainer(rows(4), tmp_path)
        with pytest.raises(InputError, match="a Trainer brings its own"):
            watch(trainer, **{option: trainer.optimizer})


@pytest.mark.parametrize("moment", ["on_train_begin", "on_step_end", "on_pre_optimizer_step", "on_substep_end"])
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_run_may_be_watched_from_a_callback(policy, moment, tmp_path):
    from transformers import TrainerCallback

    guards = []
    callback = TrainerCallback()
    setattr(callback, moment, lambda *args, **kwargs: None if guards else guards.append(watch(trainer, policy)))
    trainer = make_trainer(rows(16, {6}), tmp_path, accumulation=2)
    trainer.add_callback(callback)
    trainer.train()
    assert [event.step for event in guards[0].events] == [2]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert {"training_step", "compute_loss"} <= vars(trainer).keys()
    assert "step" not in vars(trainer.optimizer)  # released at the end of training


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path):
    """On a Llama: transformers 5.24 does not load the output head when it resumes a GPT-NeoX, guard or no guard."""
    data, options = rows(16, {2, 10}), {"save_strategy": "steps", "save_steps": 4}
    make = lambda name, **more: make_trainer(data, tmp_path / name, model=tiny("Llama"), **options, **more)
    expected, _ = trained(make("whole"))
    trained(make("part", max_steps=4))
    trainer = make("part")
    guard = watch(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-4"))
    assert_identical(everything(trainer.model, trainer.optimizer), expected)
    assert [event.step for event in guard.events] == [6]
    assert guard.summary().skipped_before_resume == 1


def test_a_resumed_run_knows_what_was_skipped_after_the_last_log(tmp_path):
    data, options = rows(16, {2}), {"save_strategy": "steps", "save_steps": 4, "logging_steps": 100}
    trained(make_trainer(data, tmp_path, model=tiny("Llama"), **options, max_steps=4))
    trainer = make_trainer(data, tmp_path, model=tiny("Llama"), **options)
    guard = watch(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert guard.summary().skipped_before_resume == 1
    assert trainer.state.log_history[-1]["guard_skipped"] == 1


def test_a_step_outside_of_training_is_left_alone(tmp_path):
    trainer = make_trainer(rows(4), tmp_path)
    guard = watch(trainer)
    batch = trainer.data_collator(rows(2))
    assert math.isfinite(trainer.training_step(trainer.model, batch, torch.tensor(16)))
    trainer.model.zero_grad()
    trainer.train()
    assert guard.steps_seen == 2


def test_a_run_that_was_stopped_goes_on_when_its_trainer_is_told_to(tmp_path):
    trainer = make_trainer(rows(8, {2}), tmp_path, model=tiny("Llama"), save_strategy="steps", save_steps=2)
    _, guard = trained(trainer, "stop")
    trainer.train_dataset = rows(8)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4
    assert guard.stopped is None
    assert guard.summary().skipped_before_resume == 0  # it has the event of this guard itself
    assert trainer.state.log_history[-1]["guard_skipped"] == 1


def test_a_training_that_failed_leaves_no_verdict_to_the_next(tmp_path):
    from transformers import TrainerCallback

    class Fail(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 1 and trainer.train_dataset is bad:
                raise ZeroDivisionError

    bad = rows(8, {2})
    trainer = make_trainer(bad, tmp_path)
    trainer.add_callback(Fail())
    guard = watch(trainer)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.train_dataset = rows(8)
    trainer.train()
    assert guard.events == []


def test_the_log_of_a_second_training_does_not_count_what_the_first_skipped(tmp_path):
    trainer = make_trainer(rows(8, {2}), tmp_path)
    _, guard = trained(trainer)
    trainer.train_dataset = rows(8)
    trainer.train()
    assert not any("guard_skipped" in entry for entry in trainer.state.log_history)
    assert guard.summary().steps_skipped == 1


def test_rows_are_those_of_the_loss_where_a_trainer_is_given_more(tmp_path):
    """TRL's GRPO hands every micro-batch the rows of a whole generation, and takes its own from them."""
    trainer = make_trainer(rows(8, {4}), tmp_path, accumulation=2)
    prepare = trainer._prepare_inputs
    trainer._prepare_inputs = lambda inputs: prepare({key: value[:1] for key, value in inputs.items()})
    _, guard = trained(trainer)
    assert [event.rows for event in guard.events] == [2]


def test_rows_are_dataset_rows_also_where_a_collator_stacks_pairs(tmp_path):
    from trl.experimental.tpo.tpo_trainer import DataCollatorForTriplePreference
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    from nanlab.guard import _sequences_per_row

    assert _sequences_per_row(DataCollatorForPreference(pad_token_id=0)) == 2
    for gold in (True, False):
        assert _sequences_per_row(DataCollatorForTriplePreference(pad_token_id=0, include_reference=gold)) == 2 + gold
    assert _sequences_per_row(None) == 1


def test_the_real_locate_explains_a_bad_batch():
    locate = getattr(nanlab.tracing, "locate", None)
    if locate is None:
        pytest.skip("nanlab.tracing has no locate yet")
    model = WithLoss()
    guard = watch(model, locate=True)
    loss = model(poison(make_batches(1), {0})[0][0]).loss
    loss.backward()
    assert not guard.allow_step(loss)
    assert guard.events[0].report.found
    assert guard.events[0].report.cause == "bad_input"


def test_the_real_locate_explains_a_step_of_the_optimizer():
    model = WithLoss()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    guard, x = watch(model, "rollback", optimizer=optimizer, locate=True), make_batches(1)[0][0]
    (model(x).loss * 1e25).backward()  # finite; its square is not
    assert guard.allow_step(0.0, replay=lambda: model(x).loss * 1e25)
    optimizer.step()
    assert not guard.after_step()
    report = guard.events[0].report
    assert (report.cause, report.phase) == ("overflow", "optimizer")
    assert "exp_avg_sq of inner.0.weight" in str(report)
    assert not optimizer.state


def test_a_refused_step_puts_numpys_generator_back():
    class Draws(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.w * x * (1.0 + np.random.rand())

    model = Draws()
    guard = watch(model)
    np.random.seed(3)
    before = np.random.get_state()[1].copy(), np.random.get_state()[2]
    loss = model(torch.tensor(math.nan))
    loss.backward()
    assert np.random.get_state()[2] != before[1]
    assert not guard.allow_step(loss)
    assert (np.random.get_state()[1] == before[0]).all()
    assert np.random.get_state()[2] == before[1]


def test_a_summary_says_what_was_lost_and_why():
    whole = Summary(1000, 3, 24, 2, {"loss": 2, "gradient": 1}, ["zero_over_zero in head"], 3 * 2**20, "cpu")
    assert str(whole).splitlines() == [
        "3 of 1000 steps skipped, 24 rows lost",
        "  2 x loss",
        "  1 x gradient",
        "  and 2 before the run was resumed",
        "  last good copy: 3.0 MiB on cpu",
        "  zero_over_zero in head",
    ]
    assert str(Summary(10, 0, 0, 0, {}, [], 0, "")) == "0 of 10 steps skipped, 0 rows lost"


def test_the_ranks_of_an_event_are_those_that_saw_it_first():
    found = [Finding("loss", "", "nan", 0), Finding("loss", "", "nan", 2), Finding("gradient", "head", "nan", 1)]
    assert Event(7, "skipped", "", tuple(found), 8).ranks == (0, 2)
