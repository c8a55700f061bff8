"""What locate promises: every fault of a step, no fault that is meant, numbers that match, one line for misuse."""

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from marks import healthy, leaf, lines_of, verdict
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from nanlab import locate
from nanlab.errors import InputError

line = lines_of(__file__)
INF, NAN = math.inf, math.nan


def others(report) -> list[tuple]:
    return [(other.cause, other.source) for other in report.others]


def net(dtype=torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(dtype)


def sgd(*models, lr: float = 0.1):
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=lr)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# -- several processes: what this rank holds itself is not blamed on others -------------------------------------------
@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_bad_row_of_the_second_micro_batch():
    model = DistributedDataParallel(net())
    o, batches = sgd(model), [torch.randn(4, 8), torch.randn(4, 8)]
    batches[1][2] = NAN

    def step():
        for x in batches:
            o.zero_grad()
            loss = model(x).mean()  # second micro-batch
            loss.backward()
            o.step()
        return loss

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("second micro-batch")), str(report)
    assert report.rows == [2]


@pytest.mark.usefixtures("group")
def test_a_reward_of_nan_in_the_second_step():
    model, x = DistributedDataParallel(net()), torch.randn(4, 8)

    def step():
        for rewards in [[1.0, 2, 3, 4], [1, NAN, 3, 4]]:
            w = torch.tensor(rewards)
            (model(x).mean(1) * w).mean().backward()  # reward of the second step

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("reward of the second step")), str(report)
    assert report.rows == [1]


class Holder:
    def __init__(self, *models):
        self.models = models


@pytest.mark.usefixtures("group")
def test_a_teacher_that_is_met_after_the_first_backward():
    model, holder, x = DistributedDataParallel(net()), Holder(net()), torch.randn(4, 8)
    holder.models[0][2].weight.data[1, 1] = NAN

    def step():
        model(x).mean().backward()
        with torch.no_grad():
            y = F.linear(x, holder.models[0][2].weight)  # teacher after the backward
        (model(x) - y).pow(2).mean().backward()

    assert verdict(locate(step)) == ("bad_state", "state", line("teacher after the backward"))


# -- a scaler excuses the overflow that it took care of, and nothing else ---------------------------------------------
def test_an_edge_in_every_step_after_one_that_the_scaler_skipped():
    model, x = net(), torch.randn(4, 8)
    o, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-12)

    def step():
        for k in range(3):
            o.zero_grad()
            h = model(x).half().float() * 100
            edge = (h - h.detach()).pow(2).sum(1).sqrt().mean()  # edge after a skip
            scaler.scale(h.pow(2).mean() + (edge if k else 0)).backward()
            scaler.step(o)
            scaler.update()

    report = locate(step, model=model)
    assert verdict(report) == ("gradient_at_edge", "backward", line("edge after a skip")), str(report)


def test_an_edge_after_a_half_loss_that_the_scaler_skipped():
    model, x = net(), torch.randn(4, 8)
    o, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**16, backoff_factor=2.0**-10)

    def step():
        for k in range(2):
            o.zero_grad()
            h = model(x) * 20
            loss = h.pow(2).mean().half()
            if k:
                loss = loss + (h - h.detach()).pow(2).sum(1).sqrt().mean().half()  # edge after a half loss
            scaler.scale(loss).backward()
            scaler.step(o)
            scaler.update()

    report = locate(step, model=model)
    assert verdict(report) == ("gradient_at_edge", "backward", line("edge after a half loss")), str(report)


# -- several results: the earliest birth is the verdict, the others are listed ----------------------------------------
def test_three_births_in_a_tuple_are_in_order():
    model, x, w, none = net(), torch.randn(4, 8), torch.tensor([1.0, NAN, 1, 1]), torch.zeros(4, dtype=torch.bool)

    def step():
        a = (model(x).mean(1) * w).mean()  # tuple 1
        b = model(x)[none].mean()  # tuple 2
        c = torch.log(F.relu(-model(x).exp())).mean()  # tuple 3
        return a, b, c

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("tuple 1")), str(report)
    assert report.rows == [1]
    assert others(report) == [("empty_mean", line("tuple 2")), ("log_of_zero", line("tuple 3"))]
    assert "2 more" in str(report)


@dataclass
class Out:
    loss: torch.Tensor
    kl: torch.Tensor


@pytest.mark.parametrize(
    "holder", [Out, lambda loss, kl: (loss, kl), lambda *both: list(both)], ids=["dataclass", "tuple", "list"]
)
def test_the_order_of_the_births_counts_and_not_that_of_the_result(holder):
    x, w = leaf(0.5, 1.0, 1.5, 2.0), torch.tensor([1.0, NAN, 1, 1])

    def step():
        kl = (x * w).mean()  # born first
        loss = x[x > 100].mean()  # born second
        return holder(loss, kl)

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("born first")), str(report)
    assert others(report) == [("empty_mean", line("born second"))]


def test_a_tensor_without_history_that_was_born_first():
    x = leaf(0.5, 1.0)

    def step():
        kl = torch.log(torch.zeros(3)).mean()  # without history
        return x[x > 100].mean(), kl

    report = locate(step)
    assert verdict(report) == ("log_of_zero", "forward", line("without history")), str(report)
    assert len(report.others) == 1


def test_the_loss_of_a_model_and_a_metric():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model, ids = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), torch.randint(1, 64, (3, 8))

    def step():
        out = model(input_ids=ids, labels=torch.full_like(ids, -100))  # loss of a model
        accuracy = torch.zeros(0).mean()  # accuracy of none
        return out.loss, accuracy

    report = locate(step, model=model)
    assert verdict(report) == ("empty_mean", "forward", line("loss of a model")), str(report)
    assert others(report) == [("empty_mean", line("accuracy of none"))]


def test_two_micro_batches_with_two_faults():
    model, xs, y = net(), [torch.randn(3, 8) for _ in range(3)], torch.tensor([1, 2, 0])
    o, ys = sgd(model), [y, y, torch.full((3,), -100)]
    xs[0][1] = NAN

    def step():
        for x, y in zip(xs, ys, strict=True):
            out = model(x)  # first of two faults
            F.cross_entropy(out, y).div(3).backward()  # second of two faults
        o.step()

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("first of two faults")), str(report)
    assert report.rows == [1]
    assert others(report) == [("empty_mean", line("second of two faults"))]


def test_the_losses_of_an_evaluation_with_two_faults():
    model, x, y = net().eval(), torch.randn(3, 8), torch.tensor([1, 2, 3])
    batches = [(x, y), (x, torch.full((3,), -100)), (torch.full((3, 8), NAN), y)]

    @torch.no_grad()
    def step():
        return [F.cross_entropy(model(x), y) for x, y in batches]  # losses of an evaluation

    report = locate(step)
    assert verdict(report) == ("empty_mean", "forward", line("losses of an evaluation")), str(report)
    assert [other.cause for other in report.others] == ["bad_input"]


# -- inf in the settings of an optimizer ------------------------------------------------------------------------------
class Unlimited(torch.optim.Optimizer):
    """As Prodigy and D-Adaptation: a growth rate of inf is no limit."""

    def __init__(self, parameters):
        super().__init__(parameters, {"d": 1e-6, "growth_rate": INF})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["d"])
            group["d"] = min(group["d"] * 1.5, group["d"] * group["growth_rate"])


def clipped(parameters):
    o = torch.optim.SGD(parameters, lr=0.1)
    o.param_groups[0]["max_norm"] = INF
    return o


def weighted(parameters):
    o = torch.optim.SGD(parameters, lr=1e-3)
    o.param_groups[0] |= {"weights": torch.ones(3), "bounds": torch.tensor([-INF, INF]), "none": torch.ones(0)}
    return o


@pytest.mark.parametrize("kind", [Unlimited, clipped, weighted])
@pytest.mark.parametrize("bad", [False, True], ids=["healthy", "bad row"])
def test_a_setting_of_inf_is_no_fault_and_hides_none(kind, bad):
    model, x = net(), torch.randn(4, 8)
    o = kind(model.parameters())
    x[1] = NAN if bad else 0.0

    def step():
        loss = model(x).pow(2).mean()  # setting of inf
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), o.param_groups[0].get("max_norm", 1.0))
        o.step()
        return loss

    report = locate(step)
    if not bad:
        assert healthy(report), str(report)
        return
    assert verdict(report) == ("bad_input", "data", line("setting of inf")), str(report)
    assert (report.rows, report.others) == ([1], [])


# -- inf that reaches the loss is never meant -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"rewards": torch.tensor([0.0, -INF, 0, 0])}, "rewards"),
        ({"weight": torch.tensor(INF)}, "weight"),
        ({"beta": INF}, ""),
    ],
    ids=["log of a reward", "weight", "setting"],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_inf_of_the_batch_that_reaches_the_loss_is_bad_input(batch, name, kind):
    model, x = net(), torch.randn(4, 8)
    o, (w,) = kind(model.parameters()), batch.values()

    def step():
        loss = -(model(x).mean(1).exp() * w).mean()  # inf in the loss
        loss.backward()
        o.step()
        return loss

    report = locate(step, batch=batch) if name else locate(step)
    assert verdict(report) == ("bad_input", "data", line("inf in the loss")), str(report)
    assert name in report.op


def test_inf_of_a_batch_that_is_not_named_and_a_loss_that_is_not_returned():
    model, batch = net(), {"w": torch.tensor(INF)}
    report = locate(lambda: (model(torch.randn(2, 8)).pow(2).mean() * batch["w"]).backward())  # not returned
    assert verdict(report) == ("bad_input", "data", line("not returned")), str(report)


# -- eps: of the group that broke, and of a state in half precision ---------------------------------------------------
@pytest.mark.parametrize("foreach", [True, False])
def test_eps_is_the_one_of_the_group_that_broke(foreach):
    head, body, x = nn.Linear(8, 8), nn.Linear(8, 8).half(), torch.randn(4, 8)
    groups = [{"params": head.parameters(), "eps": 1e-3}, {"params": body.parameters(), "eps": 1e-8}]
    o = torch.optim.AdamW(groups, foreach=foreach)

    def step():
        (head(body(x.half()).float()) * 1e-5).pow(2).mean().backward()
        o.step()  # eps of the second group

    report = locate(step)
    assert verdict(report) == ("optimizer_underflow", "optimizer", line("eps of the second group")), str(report)
    assert "eps is 1e-08" in str(report)
    assert "float16" in str(report)


class HalfState(torch.optim.Optimizer):
    """Adam with weights in float32 and a state in float16."""

    def __init__(self, parameters, update):
        super().__init__(parameters, {"eps": 1e-8})
        self.update = update

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            s, g = self.state[p], p.grad.half()
            if not s:
                s["m"], s["v"] = torch.zeros_like(g), torch.zeros_like(g)
            s["m"].mul_(0.9).add_(g, alpha=0.1)
            s["v"].mul_(0.99).addcmul_(g, g, value=0.01)
            self.update(p, s["m"], s["v"].sqrt().add_(self.param_groups[0]["eps"]))


UPDATES = {
    "div": lambda p, m, d: p.add_((m / d).float(), alpha=-1e-3),  # update div
    "float": lambda p, m, d: p.sub_(1e-3 * m.float() / d.float()),  # update float
    "addcdiv": lambda p, m, d: p.addcdiv_(m.float(), d.float(), value=-1e-3),  # update addcdiv
}


@pytest.mark.parametrize("name", list(UPDATES))
def test_eps_is_lost_in_a_state_of_half_precision(name):
    model, x = net(), torch.randn(4, 8)
    o = HalfState(model.parameters(), UPDATES[name])

    def step():
        (model(x) * 1e-3).pow(2).mean().backward()
        o.step()

    report = locate(step)
    assert verdict(report) == ("optimizer_underflow", "optimizer", line(f"update {name}")), str(report)
    assert "eps is 1e-08" in str(report)
    assert "float16" in str(report)


# -- overflows that an optimizer makes itself -------------------------------------------------------------------------
class Own(torch.optim.Optimizer):
    def __init__(self, p, update):
        super().__init__([p], {})
        self.update = update

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.update(p, self.state[p])


def divided(p, state):
    p.sub_(p.grad / 0.001)  # own divided


def corrected(p, state):
    v = torch.zeros_like(p).addcmul_(p.grad, p.grad, value=0.001)
    state["v"] = v / (1 - 0.999)  # own corrected
    p.sub_(1e-3 * p.grad / (state["v"].sqrt() + 1e-3))


def unscaled(p, state):
    p.grad.div_(0.01)  # own unscaled
    p.add_(p.grad, alpha=-0.1)


def rescaled(p, state):
    p.mul_(900)
    p.div_(0.01)  # own rescaled


def extrapolated(p, state):
    p.lerp_(p.grad.float() * 1e10, 1e30)  # own extrapolated


@pytest.mark.parametrize("update", [divided, corrected, unscaled, rescaled])
def test_a_division_of_half_numbers_in_an_optimizer_overflows(update):
    p = leaf(1.0, 1.0, 1.0, dtype=torch.float16)
    o = Own(p, update)

    def step():
        (p.float() * 900).sum().backward()
        o.step()

    report = locate(step)
    assert verdict(report) == ("overflow", "optimizer", line(f"own {update.__name__}")), str(report)
    assert "65504" in str(report)


def test_a_lerp_beyond_its_end_overflows():
    p = leaf(1e10, 1e10)
    o = Own(p, extrapolated)

    def step():
        (p * 3).sum().backward()
        o.step()

    report = locate(step)
    assert verdict(report) == ("overflow", "optimizer", line("own extrapolated")), str(report)


# -- a sentinel that was only read is not what the result was made of -------------------------------------------------
def test_a_metric_of_nan_read_before_the_loss():
    p, best = leaf(0.5, 1.0), torch.tensor(NAN)

    def step():
        previous = best.item()
        previous = 0.0 if math.isnan(previous) else previous
        loss = p[p > 100].mean()  # loss after a metric of nan
        return {"loss": loss.item(), "previous": previous}

    assert verdict(locate(step)) == ("empty_mean", "forward", line("loss after a metric of nan"))


def test_a_best_so_far_of_inf_read_before_a_loss_of_inf():
    p, best = leaf(100.0, 1.0), torch.tensor(INF)

    def step():
        lowest = best.item()
        loss = p.exp().sum()  # loss after a best so far
        return min(loss.item(), lowest)

    assert verdict(locate(step)) == ("overflow", "forward", line("loss after a best so far"))


def test_a_history_of_nan_read_before_a_coefficient_of_nan():
    model, history = net(), torch.full((3,), NAN)

    def step():
        last = history[-1].item()
        target = 0.1 if math.isnan(last) else last
        kl = torch.zeros(0).mean()  # kl after a history
        loss = model(torch.randn(2, 8)).mean() * torch.tensor(kl.item() / target)
        loss.backward()
        return loss

    assert verdict(locate(step)) == ("empty_mean", "forward", line("kl after a history"))


# -- the numbers of a report are those of the tensors -----------------------------------------------------------------
@pytest.mark.parametrize(("first", "amount"), [([0.0, 0.0], "2 of 6"), ([0.0, 2.0], "1 of 6")])
def test_rows_and_amount_of_nan_leave_inf_out(first, amount):
    a, b = nn.Parameter(torch.tensor([first, [3.0, 4.0], [1.0, 1.0]])), torch.tensor([[0.0], [0.0], [1.0]])

    def step():
        z = a / b  # rows of nan
        z.sum().backward()

    report = locate(step)
    assert report.source == line("rows of nan"), str(report)
    assert (report.kind, report.rows) == ("nan", [0])
    assert re.findall(r"made nan \((\d+ of \d+) ", str(report)) == [amount]


@pytest.mark.parametrize("place", [4999, 0], ids=["last", "first"])
def test_the_growth_is_of_the_largest_number_of_all_tensors(place):
    a, b = nn.Parameter(torch.full((5000,), 0.1)), leaf(1.0, 1.0, 1.0)
    a.data[place] = 50.0
    o = torch.optim.SGD([a, b], lr=1e15)

    def step():
        for _ in range(4):
            o.zero_grad()
            (b.pow(4).sum() + a.mean()).backward()
            o.step()

    report = locate(step)
    assert report.found
    assert report.growth[0] == 50.0


def test_the_growth_of_rows_at_the_end_of_a_table():
    table, ids = nn.Embedding(200, 64), torch.tensor([150, 170, 199])
    o = sgd(table, lr=1e4)

    def step():
        for _ in range(60):
            o.zero_grad()
            loss = (table(ids).pow(2).sum(1) - 1).pow(2).mean()
            loss.backward()
            o.step()
        return loss

    report = locate(step, model=table)
    assert report.cause == "overflow", str(report)
    assert report.growth[-1] > 1e3 * report.growth[0]


# -- a finite value with a slope that is not, in formulas that torch has in one piece ---------------------------------
EDGES = {
    "entropy": lambda z: torch.special.entr(z),  # edge entropy
    "target": lambda z: F.binary_cross_entropy(z.detach(), z, reduction="none"),  # edge target
}


@pytest.mark.parametrize("at", [0.0, 0.1], ids=["at the edge", "beside it"])
@pytest.mark.parametrize("name", list(EDGES))
def test_a_slope_at_an_edge_of_a_finite_value(name, at):
    z, results = leaf(at, 0.4, 0.6), []

    def step():
        results.append(EDGES[name](z).sum())
        results[0].backward()

    report = locate(step)
    assert results[0].isfinite()
    if at:
        assert healthy(report), str(report)
    else:
        assert verdict(report) == ("gradient_at_edge", "backward", line(f"edge {name}")), str(report)


# -- memory of numpy has the name of its array ------------------------------------------------------------------------
class Buffer:
    def __init__(self):
        self.rewards = np.array([1.0, np.nan, 0.0], dtype=np.float32)


def test_an_array_of_a_closure_has_its_name():
    model, x, sample_weights = net(), torch.randn(4, 8), np.array([1.0, 2.0, np.nan, 1.0])

    def step():
        loss = (model(x).pow(2).mean(1) * torch.from_numpy(sample_weights)).mean()  # array of a closure
        loss.backward()

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("array of a closure")), str(report)
    assert "sample_weights" in report.op
    assert report.rows == [2]


def test_an_array_of_an_object_has_its_name():
    p, buffer = leaf(1.0, 1.0, 1.0), Buffer()

    def step():
        (torch.from_numpy(buffer.rewards) * p).mean().backward()  # array of an object

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("array of an object")), str(report)
    assert "rewards" in report.op
    assert report.rows == [1]


# -- wrong arguments are refused in one line --------------------------------------------------------------------------
def trainer(folder) -> Trainer:
    arguments = TrainingArguments(str(folder), report_to=[], use_cpu=True, max_steps=1)
    return Trainer(nn.Linear(2, 2), arguments, train_dataset=[{"x": 1.0}], eval_dataset=[{"x": 1.0}])


def generator():
    yield torch.ones(())


LAYER, GOOD = nn.Linear(2, 2), lambda: torch.ones(())
WRONG = {
    "an unknown mode": ("mode", lambda: locate(GOOD, mode="trian")),
    "a model by name": ("model", lambda: locate(GOOD, model="llama")),
    "a list of models": ("model", lambda: locate(GOOD, model=[LAYER])),
    "an optimizer by name": ("optimizer", lambda: locate(GOOD, optimizer="adam")),
    "a model as optimizer": ("optimizer", lambda: locate(GOOD, optimizer=LAYER)),
    "model and optimizer exchanged": ("model", lambda: locate(GOOD, model=sgd(LAYER), optimizer=LAYER)),
    "a negative number of batches": ("max_batches", lambda: locate(GOOD, max_batches=-1)),
    "a step with arguments": ("arguments", lambda: locate(lambda batch: LAYER(batch).sum())),
    "a model as step": ("arguments", lambda: locate(LAYER)),
    "a generator as step": ("generator", lambda: locate(generator)),
    "the class of a trainer": ("class", lambda: locate(Trainer)),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_argument_is_refused_in_one_line(name):
    word, call = WRONG[name]
    with pytest.raises(InputError, match=word) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [{"mode": None}, {"max_batches": 0}, {"max_batches": -2}, {"max_batches": "3"}, {"model": 5}],
    ids=str,
)
def test_a_wrong_argument_beside_a_trainer_is_refused_in_one_line(tmp_path, wrong):
    with pytest.raises(InputError, match=next(iter(wrong))) as error:
        locate(trainer(tmp_path), **wrong)
    assert "\n" not in str(error.value)


def test_an_operation_that_draws_is_not_done_again():
    large = torch.full((8,), 60000.0, dtype=torch.float16)

    def step():
        return torch.native_dropout(large, 0.5, True)[0].sum()  # times two

    torch.manual_seed(1)
    step()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert verdict(locate(step)) == ("overflow", "forward", line("times two"))
    assert torch.rand(1) == after


@pytest.mark.parametrize("largest", [1 << 22, 0])
def test_squares_that_overflow_are_told_also_of_tensors_too_large_for_a_second_look(monkeypatch, largest):
    monkeypatch.setattr("nanlab.tracing.causes.LARGEST", largest)
    hidden = torch.tensor([[1e30, -1e30, 2e30, 0.0]])

    def step():
        return F.layer_norm(hidden, (4,)).sum()  # squares of 1e30

    assert verdict(locate(step)) == ("overflow", "forward", line("squares of 1e30"))
