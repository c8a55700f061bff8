"""Steps as people write them: transforms, inference, numbers that leave through Python, closures, counts, names."""

import functools
import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marks import healthy, leaf, lines_of, verdict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from nanlab import locate
from nanlab.errors import InputError

line = lines_of(__file__)
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# -- function transforms, nested and lazy tensors ---------------------------------------------------------------------
def test_a_bad_row_under_vmap_is_a_row_of_the_data():
    data = torch.randn(4, 3)
    data[2, 1] = NAN

    def f(row):
        return (row * 2).sum()  # row under vmap

    report = locate(lambda: torch.vmap(f)(data).sum())
    assert verdict(report) == ("bad_input", "data", line("row under vmap")), str(report)
    assert (report.op, report.rows) == ("data", [2])


def test_a_bad_row_under_func_grad_is_a_row_of_the_data():
    data, w = torch.randn(4, 3), torch.randn(3)
    data[2, 1] = NAN

    def f(w):
        return (data @ w).pow(2).mean()  # row under grad

    report = locate(lambda: torch.func.grad(f)(w))
    assert verdict(report) == ("bad_input", "data", line("row under grad")), str(report)
    assert (report.op, report.rows) == ("data", [2])


def test_the_edge_of_a_gradient_per_sample_is_in_the_backward():
    net, x = nn.Linear(3, 1), torch.randn(4, 3)
    params = {name: p.detach() for name, p in net.named_parameters()}
    x[2] = 0

    def loss(p, row):
        out = torch.func.functional_call(net, p, (row[None],))
        return out.sum() * torch.sqrt((row**2).sum() * p["weight"].pow(2).sum())  # edge per sample

    report = locate(lambda: torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x))
    assert verdict(report) == ("gradient_at_edge", "backward", line("edge per sample")), str(report)


def test_gradients_per_sample_of_a_model_reached_only_through_its_parameters_run():
    net, x = nn.Linear(3, 1), torch.randn(4, 3)
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(p, row):
        return torch.func.functional_call(net, p, (row[None],)).pow(2).sum()

    assert healthy(locate(lambda: torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)))


def test_an_ensemble_under_vmap_runs():
    params, buffers = torch.func.stack_module_state([nn.Linear(3, 1) for _ in range(2)])
    base, x = nn.Linear(3, 1), torch.randn(4, 3)
    call = lambda p, b: torch.func.functional_call(base, (p, b), (x,))
    assert healthy(locate(lambda: torch.vmap(call)(params, buffers).pow(2).mean()))


def test_a_model_under_vmap_gives_what_it_gives_without_locate():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)
    wanted, got = torch.vmap(net)(x), []
    assert healthy(locate(lambda: got.append(torch.vmap(net)(x))))
    assert torch.equal(got[0], wanted)


def test_an_error_inside_vmap_comes_back_in_the_report():
    data = torch.randn(4, 3)
    report = locate(lambda: torch.vmap(lambda row: (row * 2) @ torch.ones(7))(data))
    assert not report.found
    assert "size mismatch" in str(report.exception), repr(report.exception)


def test_derivatives_in_forward_mode_do_not_end_the_interpreter():
    code = """
import torch
from nanlab import locate

w, f = torch.tensor([0.5, 1.0]), lambda w: (w**3).sum()
net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
steps = [
    lambda: torch.func.hessian(f)(w),
    lambda: torch.func.jvp(torch.func.grad(f), (w,), (torch.ones(2),))[1],
    lambda: torch.func.jacfwd(net)(w).sum(),
    lambda: torch.log(w - w).sum(),
]
print([locate(step).cause for step in steps])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.strip() == "['', '', '', 'log_of_zero']"


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_tensors_are_healthy(layout):
    a, b, layer = torch.randn(2, 4), torch.randn(3, 4), nn.Linear(4, 4)

    @torch.no_grad()
    def step():
        nested = torch.nested.nested_tensor([a, b], layout=layout)
        return torch.nested.to_padded_tensor(layer(nested), 0.0).sum()

    assert healthy(locate(step))


def test_an_error_beside_a_nested_tensor_comes_back_in_the_report():
    def step():
        nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
        raise ValueError(f"mine, of {nested.dim()} dimensions")

    report = locate(step)
    assert not report.found
    assert isinstance(report.exception, ValueError), repr(report.exception)


def test_lazy_layers_are_healthy():
    net, x = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1)), torch.randn(3, 5)
    assert healthy(locate(lambda: net(x).sum().backward()))


def test_a_fault_that_enters_a_lazy_layer_is_found():
    def step():
        nn.LazyLinear(3)(torch.log(torch.zeros(2, 3))).sum().backward()  # before a lazy layer

    report = locate(step)
    assert verdict(report) == ("log_of_zero", "forward", line("before a lazy layer")), str(report)


@pytest.mark.parametrize("start", [0, 1], ids=["all padding", "some padding"])
def test_a_transformer_encoder_in_evaluation_gives_what_it_gives_without_locate(start):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, padding = torch.randn(3, 4, 8), torch.zeros(3, 4, dtype=torch.bool)
    padding[1, start:] = True
    padding[2, 2:] = True
    with torch.no_grad():
        wanted = encoder(x, src_key_padding_mask=padding)
    got = []

    @torch.no_grad()
    def step():
        got.append(encoder(x, src_key_padding_mask=padding))
        return got[0]

    report = locate(step)
    assert report.exception is None, repr(report.exception)
    assert torch.equal(torch.nan_to_num(got[0], 7.0), torch.nan_to_num(wanted, 7.0))
    assert report.found == (not wanted.isfinite().all()), str(report)


# -- inference mode ---------------------------------------------------------------------------------------------------
modes = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
Z = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
NONE, FIRST = torch.zeros(2, 4), torch.tensor([True, False, False, False])
ROW = torch.zeros(2, 4).index_fill(0, torch.tensor([1]), -INF)
EVALUATION = {
    "ignored": ("empty_mean", lambda: F.cross_entropy(Z, torch.tensor([-100, -100]))),  # evaluated ignored
    "masked mean": ("empty_mean", lambda: (Z * NONE).sum() / NONE.sum()),  # evaluated masked mean
    "selection": ("empty_mean", lambda: Z[NONE.bool()].mean()),  # evaluated selection
    "nanmean": ("empty_mean", lambda: torch.nanmean(torch.full((2, 2), NAN), 1)),  # evaluated nanmean
    "kl": ("empty_mean", lambda: F.kl_div(Z[:0].log_softmax(-1), Z[:0].softmax(-1))),  # evaluated kl
    "std": ("zero_over_zero", lambda: (Z[:1] - Z[:1]) / (Z[0] - Z[0]).std()),  # evaluated std
    "std of one": ("zero_over_zero", lambda: torch.ones(1).std()),  # evaluated std of one
    "group norm": ("zero_over_zero", lambda: F.group_norm(torch.zeros(2, 4, 2), 2, eps=0.0)),  # evaluated group norm
    "softmax": ("masked_row", lambda: torch.softmax(Z + ROW, -1)),  # evaluated softmax
    "label": ("log_of_zero", lambda: -Z.masked_fill(FIRST, -INF).log_softmax(-1)[:, 0].mean()),  # evaluated label
    "sigmoid": ("log_of_zero", lambda: torch.log(torch.sigmoid(Z * 0 - 1e4)).mean()),  # evaluated sigmoid
    "temperature": ("division_by_zero", lambda: torch.softmax(Z / 0.0, -1)),  # evaluated temperature
    "true_divide": ("division_by_zero", lambda: torch.true_divide(Z, torch.zeros(4))),  # evaluated true_divide
    "exp": ("overflow", lambda: torch.exp(Z.abs() * 1e4).mean()),  # evaluated exp
    "matmul": ("overflow", lambda: (Z * 1e30) @ (Z * 1e30).mT),  # evaluated matmul
}


@modes
@pytest.mark.parametrize("name", list(EVALUATION))
def test_inference_mode_gets_the_verdict_of_no_grad(name, mode):
    cause, make = EVALUATION[name]

    def step():
        with mode():
            return make()

    report = locate(step)
    assert verdict(report) == (cause, "forward", line(f"evaluated {name}")), str(report)


@modes
@pytest.mark.parametrize("read", [float, torch.Tensor.item, torch.Tensor.tolist])
def test_a_number_read_in_an_evaluation_has_its_line(mode, read):
    x, keep = torch.randn(4), torch.zeros(4, dtype=torch.bool)

    def step():
        with mode():
            return {"loss": read(x[keep].mean())}  # read in an evaluation

    assert verdict(locate(step)) == ("empty_mean", "forward", line("read in an evaluation"))


@modes
def test_a_bad_weight_in_an_evaluation_is_bad_state(mode):
    table = nn.Embedding(4, 4)
    table.weight.data[1] = NAN

    def step():
        with mode():
            return table(torch.tensor([0, 1]))  # bad weight in an evaluation

    report = locate(step)
    assert verdict(report) == ("bad_state", "state", line("bad weight in an evaluation")), str(report)
    assert report.rows == [1]


@modes
def test_a_model_without_labels_in_an_evaluation(mode):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, pad_token_id=0, attn_implementation="eager")).eval()
    ids, labels = torch.randint(3, 32, (2, 5)), torch.full((2, 5), -100)

    def step():
        with mode():
            return model(input_ids=ids, labels=labels).loss  # evaluated without labels

    assert verdict(locate(step)) == ("empty_mean", "forward", line("evaluated without labels"))


# -- numbers that leave through Python --------------------------------------------------------------------------------
def test_a_spread_read_by_item_and_divided_by():
    w, rewards = leaf(shape=(1,)), torch.tensor([0.7])

    def step():
        mean, std = rewards.mean().item(), rewards.std().item()  # spread read by item
        (w * ((rewards - mean) / std)).sum().backward()

    assert verdict(locate(step)) == ("zero_over_zero", "forward", line("spread read by item"))


def test_an_adaptive_coefficient_read_by_item():
    new, old = leaf(0.0, 0.0), torch.tensor([-800.0, 0.0])

    def step():
        ratio = torch.exp(new - old)  # ratio of the coefficient
        kl = (ratio - 1 - (new - old)).mean().item()
        (new.sum() + 0.1 * (1 + kl) * new.pow(2).sum()).backward()

    assert verdict(locate(step)) == ("overflow", "forward", line("ratio of the coefficient"))


def test_a_number_read_by_float_and_put_into_a_tensor():
    w, errors, keep = leaf(shape=(3,)), torch.rand(3), torch.zeros(3, dtype=torch.bool)

    def step():
        scale = float(errors[keep].mean())  # read and put into a tensor
        (w * torch.tensor([scale, 1.0, 1.0])).sum().backward()

    assert verdict(locate(step)) == ("empty_mean", "forward", line("read and put into a tensor"))


READ = {"item": torch.Tensor.item, "tolist": torch.Tensor.tolist, "numpy": torch.Tensor.numpy}


@pytest.mark.parametrize("how", list(READ))
def test_a_loop_that_collects_losses_names_the_first_bad_batch(how):
    net, x, none = nn.Linear(3, 2), torch.ones(4, 3), torch.zeros(4, dtype=torch.bool)

    @torch.no_grad()
    def step():
        losses = []
        for keep, scale in ((~none, 1.0), (none, 1.0), (~none, 1e38)):
            out = net(x) * scale * 100
            losses.append(READ[how](out[keep].mean()))  # collected
        return {"loss": np.mean(losses)}

    assert verdict(locate(step)) == ("empty_mean", "forward", line("collected"))


@dataclass
class Output:
    loss: object
    count: int = 2


class Metrics:
    def __init__(self, loss):
        self.loss = loss


HOLDERS = {
    "a dataclass": Output,
    "an object": lambda loss: Metrics(loss.item()),
    "an array": lambda loss: {"scores": loss.numpy()},
    "a number of numpy": lambda loss: {"score": loss.numpy().item(), "count": np.float32(3)},
    "a list": lambda loss: [loss[None].tolist()],
}


@pytest.mark.parametrize("holder", list(HOLDERS))
def test_whatever_carries_the_result_is_looked_into(holder):
    p = torch.zeros(2)

    @torch.no_grad()
    def step():
        loss = torch.log(p).mean()  # carried
        return HOLDERS[holder](loss)

    assert verdict(locate(step)) == ("log_of_zero", "forward", line("carried"))


def test_two_bad_metrics_have_two_lines():
    x, p, none = torch.randn(4), torch.zeros(2), torch.zeros(4, dtype=torch.bool)

    @torch.no_grad()
    def step():
        a = x[none].mean().item()  # first metric
        b = torch.log(p).mean().item()  # second metric
        return {"a": a, "b": b}

    report = locate(step)
    assert verdict(report) == ("empty_mean", "forward", line("first metric")), str(report)
    assert [other.source for other in report.others] == [line("second metric")]


def test_a_bad_number_that_went_nowhere_is_not_blamed_for_another():
    x, p, none = torch.randn(4), torch.zeros(2), torch.zeros(4, dtype=torch.bool)

    @torch.no_grad()
    def step():
        skipped = x[none].mean()
        best = torch.log(p).mean().item()  # the number returned
        return {"score": best, "skipped": math.isnan(skipped.item())}

    assert verdict(locate(step)) == ("log_of_zero", "forward", line("the number returned"))


def test_a_good_number_read_last_does_not_hide_the_bad_one():
    x, none = torch.randn(4), torch.zeros(4, dtype=torch.bool)

    @torch.no_grad()
    def step():
        bad = x[none].mean().item()  # read before a good one
        return {"bad": bad, "good": x.mean().item()}

    assert verdict(locate(step)) == ("empty_mean", "forward", line("read before a good one"))


@pytest.mark.parametrize("sentinel", [INF, -INF, NAN])
def test_a_sentinel_in_the_result_is_healthy(sentinel):
    w = leaf(1.0)

    def step():
        best = sentinel
        loss = (w * w).sum()
        loss.backward()
        return {"loss": loss.item(), "best_so_far": best}

    assert healthy(locate(step))


# -- steps that raise -------------------------------------------------------------------------------------------------
def test_multinomial_raises_at_a_temperature_of_zero():
    logits = torch.randn(2, 5)
    report = locate(lambda: torch.multinomial(torch.softmax(logits / 0.0, -1), 1))  # temperature of zero
    assert isinstance(report.exception, RuntimeError)
    assert verdict(report) == ("division_by_zero", "forward", line("temperature of zero")), str(report)


def test_multinomial_raises_when_every_token_was_filtered():
    logits = torch.randn(2, 5)

    def sample():
        kept = logits.masked_fill(logits < logits.max() + 1, -INF)
        return torch.multinomial(kept.softmax(-1), 1)  # every token filtered

    report = locate(sample)
    assert isinstance(report.exception, RuntimeError)
    assert verdict(report) == ("masked_row", "forward", line("every token filtered")), str(report)


def test_a_loss_that_checks_its_input_raises():
    w, x, y = leaf(shape=(3,)), torch.ones(2, 3), torch.ones(2)

    def step():
        F.binary_cross_entropy(torch.sigmoid((x * w).sum(1) * 0 / x.std(1)), y).backward()  # refused by the loss

    report = locate(step)
    assert isinstance(report.exception, RuntimeError)
    assert verdict(report) == ("zero_over_zero", "forward", line("refused by the loss")), str(report)


def test_a_distribution_that_checks_its_parameters_raises():
    w, x = leaf(shape=(3,)), torch.zeros(2, 3)

    def step():
        return torch.distributions.Normal((x / x.std(0)) @ w, 1.0, validate_args=True).sample()  # refused by Normal

    report = locate(step)
    assert isinstance(report.exception, ValueError)
    assert verdict(report) == ("zero_over_zero", "forward", line("refused by Normal")), str(report)


def test_a_bucket_of_a_constant_feature_is_no_index():
    table, x = nn.Embedding(10, 2), torch.full((4,), 3.0)

    def step():
        bucket = ((x - x.min()) / (x.max() - x.min()) * 9).long()  # bucket
        return table(bucket).sum()

    report = locate(step)
    assert isinstance(report.exception, IndexError)
    assert verdict(report) == ("zero_over_zero", "forward", line("bucket")), str(report)


@pytest.mark.parametrize("bystander", [lambda: torch.full((4, 4), -INF).triu(1), lambda: INF], ids=["mask", "best"])
def test_an_exception_with_a_reason_of_its_own_blames_no_bystander(bystander):
    x, w = torch.randn(2, 4, 8), leaf(shape=(6, 6))

    def step():
        beside = bystander()
        weights = torch.softmax(x @ x.mT + (beside if isinstance(beside, torch.Tensor) else 0), -1)
        return (weights @ x @ w).sum()  # the shapes do not fit

    report = locate(step)
    assert not report.found, str(report)
    assert isinstance(report.exception, RuntimeError)


def test_a_step_that_ends_the_program_still_gives_its_report():
    logits, before = leaf(shape=(3, 5)), torch.autograd.backward

    def step():
        loss = F.cross_entropy(logits, torch.full((3,), -100))  # before the program ends
        if not math.isfinite(loss.item()):
            sys.exit(1)

    report = locate(step)
    assert isinstance(report.exception, SystemExit)
    assert verdict(report) == ("empty_mean", "forward", line("before the program ends")), str(report)
    assert torch.autograd.backward is before


# -- closures, nested steps, settings ---------------------------------------------------------------------------------
@pytest.mark.parametrize("foreach", [False, True])
def test_rmsprop_takes_the_root_of_a_negative_variance(foreach):
    w = leaf(0.5, -0.5)
    optimizer = torch.optim.RMSprop([w], lr=1e-3, centered=True, foreach=foreach)
    w.grad = torch.ones(2)
    optimizer.step()
    optimizer.state[w]["square_avg"].fill_(0.5)
    optimizer.state[w]["grad_avg"].fill_(0.9)
    report = locate(lambda: optimizer.step())  # negative variance
    assert verdict(report) == ("unknown", "optimizer", line("negative variance")), str(report)


@pytest.mark.parametrize("foreach", [False, True])
def test_adam_takes_the_root_of_a_negative_moment(foreach):
    w = leaf(0.5, -0.5)
    optimizer = torch.optim.Adam([w], lr=1e-3, foreach=foreach)
    w.grad = torch.ones(2)
    optimizer.step()
    optimizer.state[w]["exp_avg_sq"].fill_(-1e-2)
    report = locate(lambda: optimizer.step())  # negative moment
    assert verdict(report) == ("unknown", "optimizer", line("negative moment")), str(report)


def test_a_logarithm_of_zero_in_a_closure_is_forward():
    w = leaf(0.5, 0.0)
    optimizer = torch.optim.LBFGS([w])

    def closure():
        optimizer.zero_grad()
        loss = torch.log(w).sum()  # logarithm in a closure
        loss.backward()
        return loss

    assert verdict(locate(lambda: optimizer.step(closure))) == (
        "log_of_zero",
        "forward",
        line("logarithm in a closure"),
    )


def test_kernels_that_no_mode_sees_are_switched_off_meanwhile(monkeypatch):
    from trl.trainer import utils

    try:  # pytest.importorskip() takes an exc_type only from 8.2 on
        from trl.kernels import chunked_logprob as switches
    except ImportError:
        pytest.skip("this trl has no kernels of its own")
    available = lambda: True
    monkeypatch.setattr(switches, "_TRITON_AVAILABLE", True)
    monkeypatch.setattr(utils, "is_triton_available", available)
    seen = []
    locate(lambda: seen.extend([switches._TRITON_AVAILABLE, utils.is_triton_available()]))
    assert seen == [False, False]
    assert switches._TRITON_AVAILABLE
    assert utils.is_triton_available is available


def test_after_a_step_with_a_closure_the_optimizer_is_at_work_no_more():
    w = leaf(1.0, 2.0)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def closure():
        loss = (w * w).sum()
        loss.backward()
        return loss

    def step():
        optimizer.step(closure)
        return torch.log(w * 0).sum()  # after the closure

    assert verdict(locate(step)) == ("log_of_zero", "forward", line("after the closure"))


def test_a_leaf_that_is_made_in_the_step_is_called_by_its_variable():
    def step():
        weight = leaf(0.0, 1.0)
        weight.sqrt().sum().backward()  # a leaf of the step
        return None

    report = locate(step)
    assert verdict(report) == ("gradient_at_edge", "backward", line("a leaf of the step")), str(report)
    assert report.story[-1] == "It surfaced in gradient of weight."


def test_a_root_of_a_negative_number_in_a_closure_is_forward():
    w = leaf(-0.5, 1.0)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = torch.sqrt(w).sum()  # root in a closure
        loss.backward()
        return loss

    report = locate(lambda: optimizer.step(closure))
    assert verdict(report) == ("unknown", "forward", line("root in a closure")), str(report)
    assert report.op == "sqrt"


def test_an_edge_in_a_closure_is_backward():
    w = leaf(0.0, 1.0)
    optimizer = torch.optim.LBFGS([w])

    def closure():
        optimizer.zero_grad()
        loss = torch.sqrt(w * w).sum()  # edge in a closure
        loss.backward()
        return loss

    report = locate(lambda: optimizer.step(closure))
    assert verdict(report) == ("gradient_at_edge", "backward", line("edge in a closure")), str(report)


class Sam(torch.optim.Optimizer):
    """Moves to a worse place, takes the gradient there, then steps."""

    def __init__(self, parameters, base):
        super().__init__(parameters, {})
        self.base = base

    @torch.no_grad()
    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            p.sub_(p * torch.tensor([1.0, 0.0]))
        self.zero_grad()
        torch.enable_grad()(closure)()
        self.base.step()


def test_the_second_forward_of_sam_is_forward():
    w, x = leaf(1e-3, 1.0), torch.ones(2)
    optimizer = Sam([w], torch.optim.SGD([w], lr=0.1))

    def closure():
        loss = -torch.log(w * x).sum()  # second forward
        loss.backward()
        return loss

    def step():
        closure()
        optimizer.step(closure)

    assert verdict(locate(step)) == ("log_of_zero", "forward", line("second forward"))


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base, alpha):
        super().__init__(base.param_groups, {})
        self.base, self.alpha = base, alpha
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        fast = [p for group in self.base.param_groups for p in group["params"]]
        for slow, p in zip(self.slow, fast, strict=True):
            slow.add_((p - slow) * self.alpha)  # after the inner step
            p.copy_(slow)


def test_what_follows_the_inner_step_of_an_optimizer_is_the_optimizer():
    w = leaf(1.0, 1.0)
    optimizer = Lookahead(torch.optim.SGD([w], lr=1.0), 3e38)

    def step():
        (w * 1e3).sum().backward()
        optimizer.step()

    assert verdict(locate(step)) == ("overflow", "optimizer", line("after the inner step"))


class Belief(torch.optim.Optimizer):
    """The variance as a difference of moments, which may be negative."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            moment, square = 0.1 * p.grad, 0.001 * p.grad**2
            p.sub_(1e-3 * moment / ((square - moment**2).sqrt() + 1e-8))  # root in an own optimizer


def test_a_root_of_a_negative_number_in_an_own_optimizer_is_the_optimizer():
    w = leaf(0.5, -0.5)
    optimizer = Belief([w], {})

    def step():
        w.grad = torch.tensor([1.0, -1.0])
        optimizer.step()

    report = locate(step)
    assert verdict(report) == ("unknown", "optimizer", line("root in an own optimizer")), str(report)
    assert report.op == "sqrt"


def test_an_optimizer_that_steps_in_a_hook_of_the_backward_is_the_optimizer():
    w, c = leaf(0.5, -0.5, dtype=torch.float16), torch.tensor([0.0, 1e-5]).half()
    optimizer = torch.optim.Adam([w], lr=1e-3, foreach=False)

    def hook(p):
        optimizer.step()  # step in a hook
        optimizer.zero_grad()

    w.register_post_accumulate_grad_hook(hook)
    report = locate(lambda: (w * c).float().sum().backward())
    assert verdict(report) == ("optimizer_underflow", "optimizer", line("step in a hook")), str(report)


@pytest.mark.parametrize("number", [np.float32, torch.tensor])
def test_a_learning_rate_of_nan_is_bad_state_whatever_holds_it(number):
    w = leaf(0.5, -0.5)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step():
        for lr in (0.1, NAN):
            optimizer.param_groups[0]["lr"] = number(lr)
            optimizer.zero_grad()
            (w * w).sum().backward()
            optimizer.step()  # rate of nan

    report = locate(step)
    assert verdict(report) == ("bad_state", "state", line("rate of nan")), str(report)
    assert report.op == "lr of the optimizer"


def test_a_beta_of_nan_is_bad_state():
    w = leaf(0.5, -0.5)
    optimizer = torch.optim.AdamW([w], lr=0.1)
    optimizer.param_groups[0]["betas"] = (0.9, NAN)

    def step():
        (w * w).sum().backward()
        optimizer.step()  # beta of nan

    report = locate(step)
    assert verdict(report) == ("bad_state", "state", line("beta of nan")), str(report)
    assert report.op == "betas of the optimizer"


def by_data(w):
    w.data.add_(w.grad, alpha=-1e30)  # by_data


@torch.no_grad()
def by_sub(w):
    w.sub_(w.grad, alpha=1e30)  # by_sub


@torch.no_grad()
def by_foreach(w):
    torch._foreach_add_([w], [w.grad], alpha=-1e30)  # by_foreach


@pytest.mark.parametrize("update", [by_data, by_sub, by_foreach])
def test_an_update_by_hand_is_the_optimizer(update):
    w = leaf(1.0, 1.0)

    def step():
        (w * torch.tensor([1e20, 1.0])).sum().backward()
        update(w)

    assert verdict(locate(step)) == ("overflow", "optimizer", line(update.__name__))


@torch.no_grad()
def normalised(w):
    w -= 0.1 * w.grad / w.grad.norm()  # normalised


def normalised_data(w):
    w.data -= 0.1 * w.grad / w.grad.norm()  # normalised_data


def clipped(w):
    w.grad.mul_(w.grad.norm() / w.grad.abs().max())  # clipped
    torch.optim.SGD([w], lr=0.1).step()


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("update", [normalised, normalised_data, clipped])
def test_what_an_update_by_hand_makes_of_healthy_gradients_is_the_optimizer(update, rounds):
    w = leaf(shape=(3, 4))

    def step():
        for _ in range(rounds):
            w.grad = None
            (w * 0).sum().backward()
            update(w)

    report = locate(step)
    assert verdict(report) == ("zero_over_zero", "optimizer", line(update.__name__)), str(report)
    assert report.rows == []  # a weight has no rows of the batch


def test_a_loss_of_the_second_round_is_forward_though_an_update_by_hand_follows():
    w = leaf(shape=(3, 4))

    def step():
        for i in range(2):
            w.grad = None
            (w * torch.log(torch.full((4,), 2.0 - 2 * i))).sum().backward()  # second round
            torch.nn.utils.clip_grad_norm_([w], 1.0)
            normalised(w)

    assert verdict(locate(step)) == ("log_of_zero", "forward", line("second round"))


@pytest.mark.parametrize("read", [lambda norm: norm, torch.Tensor.item], ids=["tensor", "number"])
def test_the_logged_norm_of_a_step_that_the_scaler_skips_is_healthy(read):
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)

    def step():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return {"loss": loss.item(), "grad_norm": read(norm)}

    assert healthy(locate(step))


# -- counts and measured zeros ----------------------------------------------------------------------------------------
EMPTY_LOSSES = {
    "mse": lambda p, t: F.mse_loss(p, t),  # empty mse
    "l1": lambda p, t: F.l1_loss(p, t),  # empty l1
    "smooth l1": lambda p, t: F.smooth_l1_loss(p, t),  # empty smooth l1
    "huber": lambda p, t: F.huber_loss(p, t),  # empty huber
    "soft margin": lambda p, t: F.soft_margin_loss(p, t),  # empty soft margin
    "bce": lambda p, t: F.binary_cross_entropy(p.sigmoid(), t),  # empty bce
    "bce of logits": lambda p, t: F.binary_cross_entropy_with_logits(p, t),  # empty bce of logits
    "kl": lambda p, t: F.kl_div(p.log_softmax(-1), t),  # empty kl
    "gaussian": lambda p, t: F.gaussian_nll_loss(p, t, torch.ones_like(t)),  # empty gaussian
    "cosine": lambda p, t: F.cosine_embedding_loss(p, t, torch.ones(len(p))),  # empty cosine
    "triplet": lambda p, t: F.triplet_margin_loss(p, t, t),  # empty triplet
}


@pytest.mark.parametrize("name", list(EMPTY_LOSSES))
def test_a_loss_of_an_empty_selection_is_a_mean_over_nothing(name):
    predicted, target, none = leaf(shape=(4, 3)), torch.rand(4, 3), torch.zeros(4, dtype=torch.bool)
    report = locate(lambda: EMPTY_LOSSES[name](predicted[none], target[none]).backward())
    assert verdict(report) == ("empty_mean", "forward", line(f"empty {name}")), str(report)


def mean_over_a_mean():
    x, mask = leaf(shape=(2, 4)), torch.zeros(2, 4)
    return lambda: ((x * mask).mean() / mask.mean()).backward()  # mean_over_a_mean


def index_add():
    h, segment = leaf(shape=(4, 3)), torch.tensor([0, 0, 2, 2])

    def step():
        total = torch.zeros(3, 3).index_add(0, segment, h)
        count = torch.zeros(3).index_add(0, segment, torch.ones(4))
        (total / count[:, None]).sum().backward()  # index_add

    return step


def scatter_add():
    h, segment = leaf(shape=(4,)), torch.tensor([0, 0, 2, 2])

    def step():
        total = torch.zeros(3).scatter_add(0, segment, h)
        count = torch.zeros(3).scatter_add(0, segment, torch.ones(4))
        (total / count).sum().backward()  # scatter_add

    return step


def pooling():
    h, mask = leaf(shape=(3, 5, 4)), torch.ones(3, 5)
    mask[1] = 0

    def step():
        pooled = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)  # pooling
        pooled.pow(2).sum().backward()

    return step


def one_hot():
    h, classes = leaf(shape=(4, 3)), torch.tensor([0, 0, 2, 2])

    def step():
        chosen = F.one_hot(classes, 3).float()
        ((chosen.T @ h) / chosen.sum(0)[:, None]).pow(2).sum().backward()  # one_hot

    return step


def pairs():
    z, y = leaf(shape=(4, 8)), torch.tensor([0, 1, 0, 0])

    def step():
        itself = torch.eye(4, dtype=torch.bool)
        positive = (y[:, None] == y) & ~itself
        logp = (z @ z.T).masked_fill(itself, -1e9).log_softmax(-1)
        (-(positive * logp).sum(1) / positive.sum(1)).mean().backward()  # pairs

    return step


def bincount():
    h, classes = leaf(shape=(4, 3)), torch.tensor([0, 0, 2, 2])

    def step():
        counts = torch.bincount(classes, minlength=3)
        (torch.zeros(3, 3).index_add(0, classes, h) / counts.unsqueeze(1)).pow(2).sum().backward()  # bincount

    return step


def lengths():
    h, count = leaf(shape=(3, 4, 5)), torch.tensor([4, 0, 2])

    def step():
        kept = torch.arange(4)[None, :, None] < count[:, None, None]
        ((h * kept).sum(1) / count[:, None]).pow(2).mean().backward()  # lengths

    return step


COUNTS = [mean_over_a_mean, index_add, scatter_add, pooling, one_hot, pairs, bincount, lengths]


@pytest.mark.parametrize("make", COUNTS)
def test_a_sum_over_a_count_of_zero_is_a_mean_over_nothing(make):
    report = locate(make())
    assert verdict(report) == ("empty_mean", "forward", line(make.__name__)), str(report)
    assert make is mean_over_a_mean or report.rows == [1]


def cosine_in_evaluation():
    a, b = torch.zeros(1, 4), torch.randn(1, 4)
    return lambda: ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).mean()  # cosine_in_evaluation


def cosine_of_frozen_features():
    w, x = leaf(shape=(4,)), torch.randn(3, 4)
    x[1] = 0
    return lambda: ((x * w).sum(-1) / (x.norm(dim=-1) * w.norm())).mean().backward()  # cosine_of_frozen_features


def pearson():
    p, y = torch.ones(5), torch.randn(5)

    def step():
        a, b = p - p.mean(), y - y.mean()
        r = (a * b).sum() / (a.pow(2).sum().sqrt() * b.pow(2).sum().sqrt())  # pearson
        return {"pearson": r.item()}

    return step


def signal_to_distortion():
    estimate, reference = leaf(shape=(3, 16)), torch.randn(3, 16)
    reference[2] = 0

    def step():
        scale = (estimate * reference).sum(-1, keepdim=True) / reference.square().sum(-1, True)  # signal_to_distortion
        (estimate - scale * reference).pow(2).mean().backward()

    return step


def determination():
    y = torch.full((5,), 2.0)
    p = y.clone()
    return lambda: 1 - ((y - p) ** 2).sum() / ((y - y.mean()) ** 2).sum()  # determination


def relative_error():
    a = torch.zeros(4)
    return lambda: (a - a).norm() / a.norm()  # relative_error


def weights_that_underflow():
    score, value = leaf(-200.0, -210.0), torch.tensor([1.0, 2.0])

    @torch.no_grad()
    def step():
        w = score.exp()
        return (w * value).sum() / w.sum()  # weights_that_underflow

    return step


def gates_that_underflow():
    logits = torch.tensor([[-200.0] * 4, [0.0] * 4])

    def step():
        gates = torch.sigmoid(logits)
        return gates / gates.sum(-1, keepdim=True)  # gates_that_underflow

    return step


def l1_of_a_row():
    logp, rewards = leaf(shape=(2, 3)), torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 3.0]])

    def step():
        advantages = rewards - rewards.mean(1, keepdim=True)
        (logp * (advantages / advantages.abs().sum(1, keepdim=True))).mean().backward()  # l1_of_a_row

    return step


def l1_of_all():
    logp, rewards = leaf(shape=(4,)), torch.full((4,), 0.5)

    def step():
        advantages = rewards - rewards.mean()
        (logp * (advantages / advantages.abs().sum())).mean().backward()  # l1_of_all

    return step


def ratio_to_a_mean():
    logp, rewards = leaf(shape=(4,)), torch.zeros(4)
    return lambda: (logp * (rewards / rewards.mean())).mean().backward()  # ratio_to_a_mean


MEASURED = [cosine_in_evaluation, cosine_of_frozen_features, pearson, signal_to_distortion, determination]
MEASURED += [relative_error, weights_that_underflow, gates_that_underflow, l1_of_a_row, l1_of_all, ratio_to_a_mean]


@pytest.mark.parametrize("make", MEASURED)
def test_a_measured_zero_is_no_count(make):
    report = locate(make())
    assert verdict(report) == ("zero_over_zero", "forward", line(make.__name__)), str(report)


# -- out=, conjugates, sparse tensors, poles --------------------------------------------------------------------------
def test_what_out_is_read_from_is_not_new():
    x = torch.tensor([NAN, 1.0])

    @torch.no_grad()
    def step():
        total = x.clone()  # read into out
        torch.add(total, torch.ones(2), out=total)
        return total.sum()

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("read into out")), str(report)
    assert (report.op, report.rows) == ("x", [0])


def test_a_division_into_out_is_found():
    a, buffer = torch.zeros(3), torch.ones(3)

    @torch.no_grad()
    def step():
        torch.div(a, a, out=buffer)  # into out
        return buffer.sum()

    assert verdict(locate(step)) == ("zero_over_zero", "forward", line("into out"))


CONJUGATES = {
    "mul": lambda y, z: y * z.conj(),
    "matmul": lambda y, z: y @ z.conj(),
    "mH": lambda y, z: y @ z.mH,
    "vdot": lambda y, z: torch.vdot(z.flatten(), y.flatten()),
}


@pytest.mark.parametrize("how", list(CONJUGATES))
def test_a_conjugate_keeps_its_history(how):
    x, y = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.complex64)

    @torch.no_grad()
    def step():
        z = torch.complex(x / x.norm(), x)  # before the conjugate
        return CONJUGATES[how](y, z).abs().sum()

    assert verdict(locate(step)) == ("zero_over_zero", "forward", line("before the conjugate"))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_a_sparse_matrix_of_an_isolated_node_keeps_its_history(layout):
    edges, x, w = torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 0]]), torch.randn(3, 4), leaf(shape=(4, 2))

    def step():
        scale = torch.diag(edges.sum(1).pow(-0.5))  # degree of the sparse matrix
        adjacency = (scale @ edges @ scale).to_sparse(layout=layout)
        torch.sparse.mm(adjacency, x @ w).sum().backward()

    assert verdict(locate(step)) == ("division_by_zero", "forward", line("degree of the sparse matrix"))


def test_a_csr_matrix_made_of_a_bad_division_keeps_its_history():
    w, degree = leaf(shape=(3, 2)), torch.tensor([1.0, 0.0, 1.0])

    def step():
        values = 1 / degree  # values of the matrix
        matrix = torch.sparse_csr_tensor(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2]), values, (3, 3))
        (matrix @ w).sum().backward()

    assert verdict(locate(step)) == ("division_by_zero", "forward", line("values of the matrix"))


X = torch.tensor([1.0, 0.5])
POLES = {
    "logit": ("log_of_zero", lambda: torch.logit(X)),  # pole logit
    "log1p": ("log_of_zero", lambda: torch.log1p(-X)),  # pole log1p
    "log2": ("log_of_zero", lambda: torch.log2(1 - X)),  # pole log2
    "log10": ("log_of_zero", lambda: torch.log10(1 - X)),  # pole log10
    "log_": ("log_of_zero", lambda: (1 - X).log_()),  # pole log_
    "xlogy": ("log_of_zero", lambda: torch.xlogy(X, 1 - X)),  # pole xlogy
    "xlog1py": ("log_of_zero", lambda: torch.special.xlog1py(X, -X)),  # pole xlog1py
    "complex": ("log_of_zero", lambda: torch.log((1 - X).to(torch.complex64)).real),  # pole complex
    "slogdet": ("log_of_zero", lambda: torch.linalg.slogdet(torch.ones(3, 3)).logabsdet),  # pole slogdet
    "logdet": ("log_of_zero", lambda: torch.logdet(torch.ones(3, 3))),  # pole logdet
    "lgamma": ("unknown", lambda: torch.lgamma(1 - X)),  # pole lgamma
    "ndtri": ("unknown", lambda: torch.special.ndtri(1 - X)),  # pole ndtri
    "floor": ("division_by_zero", lambda: X // torch.zeros(2)),  # pole floor
    "remainder": ("division_by_zero", lambda: X % torch.tensor([0.0, 2.0])),  # pole remainder
}


@pytest.mark.parametrize("name", list(POLES))
def test_a_pole_is_no_overflow(name):
    cause, make = POLES[name]
    report = locate(lambda: make().sum())
    assert verdict(report) == (cause, "forward", line(f"pole {name}")), str(report)


def test_a_target_without_an_alignment_is_no_overflow():
    logits, target = leaf(shape=(3, 1, 5)), torch.tensor([[1, 1, 2, 2]])

    def step():
        loss = F.ctc_loss(logits.log_softmax(-1), target, torch.tensor([3]), torch.tensor([4]))  # no alignment
        loss.backward()

    assert verdict(locate(step)) == ("log_of_zero", "forward", line("no alignment"))


def test_a_norm_with_a_negative_running_variance_is_explained():
    norm, x = nn.BatchNorm1d(2).eval(), torch.randn(3, 2)
    norm.running_var[1] = -0.5
    report = locate(lambda: norm(x).sum().backward())  # negative running variance
    assert verdict(report) == ("unknown", "forward", line("negative running variance")), str(report)
    assert "Error" not in report.explanation


# -- names ------------------------------------------------------------------------------------------------------------
class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
        self.x[7, 1] = np.nan

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": torch.from_numpy(self.x[i]), "y": torch.ones(1)}


def test_a_batch_of_a_numpy_data_set_has_its_name_and_its_row():
    loader, net = DataLoader(Rows(), batch_size=4), nn.Linear(3, 1)

    def step():
        for batch in loader:  # batch of numpy
            F.mse_loss(net(batch["x"]), batch["y"]).backward()

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("batch of numpy")), str(report)
    assert report.rows == [3]
    assert "batch['x']" in report.op


def test_a_batch_of_a_worker_has_its_name_and_its_row():
    data, net = torch.randn(8, 3), nn.Linear(3, 1)
    data[5, 0] = NAN
    loader = DataLoader(TensorDataset(data), batch_size=4, num_workers=1)

    def step():
        for (xb,) in loader:
            net(xb).sum().backward()  # batch of a worker

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("batch of a worker")), str(report)
    assert (report.op, report.rows) == ("xb", [1])


class Loop:
    def __init__(self):
        self.nets, self.x = {"actor": nn.Linear(3, 2), "critic": nn.Linear(3, 1)}, torch.randn(4, 3)
        self.nets["critic"].bias.data[0] = NAN

    def __call__(self):
        self.nets["actor"](self.x).sum().backward()
        self.nets["critic"](self.x).sum().backward()  # critic

    def run(self):
        self()


@pytest.mark.parametrize("step", [lambda loop: loop, lambda loop: loop.run], ids=["call", "method"])
def test_nets_in_a_dict_of_an_object_have_their_key(step):
    report = locate(step(Loop()))
    assert verdict(report) == ("bad_state", "state", line("critic")), str(report)
    assert "critic" in report.op
    assert "bias" in report.op


def test_a_layer_of_a_list_has_its_number():
    layers, x = [nn.Linear(3, 3), nn.Linear(3, 3)], torch.randn(2, 3)
    layers[1].bias.data[2] = NAN

    def step():
        h = x
        for layer in layers:
            h = layer(h)  # layer of a list
        h.sum().backward()

    report = locate(step)
    assert verdict(report) == ("bad_state", "state", line("layer of a list")), str(report)
    assert "layers[1]" in report.op
    assert report.rows == [2]


def test_of_two_models_alike_the_bad_one_is_named():
    policy, reference, x = nn.Linear(3, 2), nn.Linear(3, 2), torch.randn(4, 3)
    reference.weight.data[0, 0] = NAN
    report = locate(lambda: (policy(x) - reference(x)).pow(2).mean().backward())  # two models
    assert verdict(report) == ("bad_state", "state", line("two models")), str(report)
    assert (report.op, report.rows) == ("parameter reference.weight", [0])


def test_an_input_that_wants_a_gradient_is_an_input():
    net, batch = nn.Linear(3, 1), {"x": torch.randn(4, 3)}
    batch["x"][2, 0] = NAN

    def step():
        x = batch["x"].requires_grad_()
        net(x).sum().backward()  # wants a gradient
        return x.grad.sign()

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("wants a gradient")), str(report)
    assert report.rows == [2]


def test_a_checkpoint_loaded_inside_the_step_is_bad_state(tmp_path):
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    state["weight"][1, 0] = NAN
    torch.save(state, tmp_path / "state.pt")

    def step():
        net.load_state_dict(torch.load(tmp_path / "state.pt"))  # loaded weights
        net(x).sum().backward()

    report = locate(step)
    assert verdict(report) == ("bad_state", "state", line("loaded weights")), str(report)
    assert (report.op, report.rows) == ("parameter weight", [1])


def test_features_loaded_inside_the_step_are_bad_input(tmp_path):
    data, net = torch.randn(4, 3), nn.Linear(3, 1)
    data[2, 1] = NAN
    torch.save({"x": data}, tmp_path / "features.pt")

    def step():
        batch = torch.load(tmp_path / "features.pt")
        net(batch["x"]).sum().backward()  # loaded features

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("loaded features")), str(report)
    assert report.rows == [2]


def test_cached_log_probabilities_of_minus_inf_are_bad_input_and_no_mask():
    policy = leaf(-1.0, -2.0)
    batch = {"chosen": torch.tensor([-1.5, -INF]), "rejected": torch.tensor([-2.5, -INF])}

    def step():
        margin = batch["chosen"] - batch["rejected"]  # cached
        (-F.logsigmoid(policy - margin).mean()).backward()

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("cached")), str(report)
    assert report.rows == [1]


# -- masks ------------------------------------------------------------------------------------------------------------
def test_a_masked_row_of_log_softmax_that_is_returned():
    z, keep = torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool)
    keep[1] = False

    @torch.no_grad()
    def step():
        return F.log_softmax(z.masked_fill(~keep, -INF), -1)  # returned

    report = locate(step)
    assert verdict(report) == ("masked_row", "forward", line("returned")), str(report)
    assert (report.kind, report.rows) == ("nan", [1])


def test_a_masked_row_comes_before_a_later_fault():
    z, w, keep = leaf(shape=(2, 4)), leaf(0.0, 1.0), torch.ones(2, 4, dtype=torch.bool)
    keep[1] = False

    def step():
        logp = F.log_softmax(z.masked_fill(~keep, -INF), -1)  # before a later fault
        (-logp[:, 0].mean() + torch.log(w).sum()).backward()

    assert verdict(locate(step)) == ("masked_row", "forward", line("before a later fault"))


def test_an_overflow_beside_a_mask_made_by_a_logarithm_is_an_overflow():
    scores, keep = leaf(shape=(4, 4)), torch.ones(4, 4).tril()

    def step():
        bias = keep.log()
        grown = scores * 1e38 * 1e3  # beside a logarithm
        torch.softmax(grown + bias, -1).pow(2).sum().backward()

    assert verdict(locate(step)) == ("overflow", "forward", line("beside a logarithm"))


def test_the_maximum_of_a_row_without_anything_meets_weights_of_both_signs():
    h, layer, keep = leaf(shape=(3, 5, 4)), nn.Linear(4, 4), torch.ones(3, 5, dtype=torch.bool)
    keep[1] = False

    def step():
        pooled = h.masked_fill(~keep[..., None], -INF).amax(1)
        layer(pooled).pow(2).mean().backward()  # both signs

    report = locate(step)
    assert verdict(report) == ("inf_minus_inf", "forward", line("both signs")), str(report)
    assert report.rows == [1]


# -- a count after one more operation --------------------------------------------------------------------------------
THROUGH = {
    "pad": lambda m: F.pad(m, (0, 1)),
    "clamp": lambda m: m.clamp(0, 1),
    "where": lambda m: torch.where(m > 0, 1.0, 0.0),
    "minimum": lambda m: torch.minimum(m, torch.ones_like(m)),
    "cumprod": lambda m: m.cumprod(1),
    "index_select": lambda m: m.index_select(1, torch.arange(4)),
    "max_pool": lambda m: F.max_pool1d(m, 1),
    "nan_to_num": torch.nan_to_num,
}


@pytest.mark.parametrize("name", THROUGH)
def test_a_mask_of_zeros_stays_a_mask_through_one_more_operation(name):
    per_token, labels = leaf(shape=(2, 4)), torch.full((2, 4), -100)

    def step():
        mask = THROUGH[name]((labels != -100).float())[:, :4]
        loss = (per_token * mask).sum() / mask.sum()  # nothing passed
        loss.backward()
        return loss

    assert verdict(locate(step)) == ("empty_mean", "forward", line("nothing passed"))


def test_a_count_that_was_read_as_a_float_is_a_count():
    hidden, mask = leaf(shape=(2, 4, 3)), torch.zeros(2, 4)

    def step():
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum().item()  # read as a float
        pooled.sum().backward()

    assert verdict(locate(step)) == ("empty_mean", "forward", line("read as a float"))


def test_a_logarithm_of_a_count_that_becomes_nan_at_once_is_no_mask():
    experts = torch.tensor([0, 0, 0])

    def step():
        load = F.one_hot(experts, 2).float().mean(0)
        return -(load * load.log()).sum()  # log of a load

    assert verdict(locate(step)) == ("log_of_zero", "forward", line("log of a load"))


def test_scores_by_their_range_and_weights_by_their_sum_are_no_means():
    scores, weights = torch.ones(4), torch.tensor([-1.0, -2.0])

    def spread():
        return ((scores - scores.mean()) / (scores.max() - scores.min())).sum()  # by their range

    def normalise():
        kept = weights.clamp(min=0)
        return (kept / kept.sum()).sum()  # by their sum

    assert verdict(locate(spread)) == ("zero_over_zero", "forward", line("by their range"))
    assert verdict(locate(normalise)) == ("zero_over_zero", "forward", line("by their sum"))


def test_a_row_masked_by_a_logarithm_in_which_all_is_masked_is_a_masked_row():
    scores, allowed = leaf(shape=(1, 4)), torch.zeros(1, 4)

    def step():
        weights = torch.softmax(scores + allowed.log(), -1)  # all of it masked
        weights.square().sum().backward()

    assert verdict(locate(step)) == ("masked_row", "forward", line("all of it masked"))


def test_a_number_that_python_alone_has_made_is_found_though_nobody_knows_where():
    def step():
        values = [1.0, 2.0]
        return sum(values) * float("inf") - sum(values) * float("inf")

    report = locate(step)
    assert (report.found, report.cause, report.kind) == (True, "unknown", "nan"), str(report)


def test_losses_in_a_dict_that_the_step_raised_over_are_found():
    w = leaf(1.0, 0.0)

    def step():
        losses = {"policy": torch.log(w * w).sum()}  # in a dict
        if losses["policy"] < -1e30:
            raise ValueError("the run has diverged")

    report = locate(step)
    assert verdict(report) == ("log_of_zero", "forward", line("in a dict")), str(report)
    assert isinstance(report.exception, ValueError)
    assert "variable losses['policy'] when the step raised" in str(report)


def test_the_spread_of_a_group_of_one_by_n_minus_one_is_no_empty_mean():
    rewards, n = torch.tensor([0.5]), torch.ones(1)

    def step():
        deviation = rewards - rewards.mean()
        return ((deviation * deviation).sum() / (n - 1)).sum()  # n minus one

    assert verdict(locate(step)) == ("zero_over_zero", "forward", line("n minus one"))


def test_bad_data_says_if_there_is_inf_among_its_nan():
    x, w = torch.tensor([[math.nan, 1.0], [math.inf, 2.0]]), leaf(shape=(2, 1))
    report = locate(lambda: (x @ w).sum().backward())
    assert report.cause == "bad_input"
    assert "(2 of 4 in (2, 2) float32, inf among them)" in report.story[0]


def test_a_gradient_left_over_in_a_plain_tensor_is_state_and_has_its_name():
    prompt = torch.tensor([1.0, 2.0], requires_grad=True)
    prompt.grad = torch.tensor([math.nan, 1.0])
    kept = [prompt]

    def step():
        return kept[0].grad.norm()  # clipped by hand

    report = locate(step)
    assert verdict(report) == ("bad_state", "state", line("clipped by hand")), str(report)
    assert report.op == "gradient of kept[0], left over from before"


# -- an inf, and finite numbers that are as bad ------------------------------------------------------------------------
def overflowing(dtype, weight, scales):
    torch.manual_seed(0)
    linear = nn.Linear(8, 32).to(dtype)
    with torch.no_grad():
        linear.weight.copy_(linear.weight.sign() * weight)
        linear.bias.zero_()
    return linear, (torch.randn(4, 8) * torch.tensor(scales)[:, None]).to(dtype)


def test_an_inf_is_the_birth_though_the_finite_numbers_beside_it_overflow_too():
    linear, x = overflowing(torch.bfloat16, 2e38, [1.0, 0.1, 0.01, 0.01])
    norm = nn.LayerNorm(32).bfloat16()

    def step():
        hidden = linear(x)  # inf in the first row
        return norm(hidden)  # the squares of all rows

    report = locate(step)
    assert verdict(report) == ("overflow", "forward", line("inf in the first row"))
    assert report.rows == [0]
    (other,) = report.others
    assert verdict(other) == ("overflow", "forward", line("the squares of all rows"))
    assert other.rows == [1, 2, 3]


def test_the_same_in_a_product_of_matrices():
    linear, x = overflowing(torch.float16, 3e2, [100.0, 10.0, 1.0, 1.0])

    def step():
        hidden = linear(x).view(4, 4, 8)  # six inf
        return torch.bmm(hidden, hidden.transpose(1, 2))

    assert verdict(locate(step)) == ("overflow", "forward", line("six inf"))


def test_a_zero_beside_a_nan_is_a_fault_of_its_own():
    x = torch.tensor([0.0, NAN, 1e30])
    report = locate(lambda: torch.log(x)[::2].sum(), x=x)
    assert verdict(report)[:2] == ("log_of_zero", "forward")


def test_what_a_ctc_loss_keeps_at_minus_infinity_is_no_further_birth():
    w = leaf(shape=(4, 5))
    w.data[0, 0] = NAN
    targets, lengths = torch.tensor([[1, 2]]), (torch.tensor([6]), torch.tensor([2]))

    def step():
        log_probs = (torch.ones(6, 1, 4) @ w).log_softmax(-1)
        F.ctc_loss(log_probs, targets, *lengths).backward()

    report = locate(step)
    assert report.cause == "bad_state"
    assert report.others == []


# -- what hides a history ----------------------------------------------------------------------------------------------
def test_a_nanmean_of_nothing_but_nan_tells_who_made_them():
    x = leaf(0.0, 0.0)

    def step():
        y = x / (x.detach() * 0)  # the quotient
        return y.nanmean()

    assert verdict(locate(step)) == ("zero_over_zero", "forward", line("the quotient"))


def test_a_nanmean_of_data_without_a_number_is_a_mean_over_nothing():
    scores = torch.full((3,), NAN)
    assert locate(lambda: scores.nanmean(), scores=scores).cause == "empty_mean"


def test_a_result_with_slots_is_looked_into():
    @dataclass(slots=True)
    class Output:
        loss: torch.Tensor

    assert locate(lambda: Output(torch.log(torch.zeros(3)).mean())).cause == "log_of_zero"


# -- settings ----------------------------------------------------------------------------------------------------------
def test_a_gradient_divided_by_a_counter_of_0_is_no_mean_over_nothing():
    w = leaf(shape=(3, 4))

    def step():
        (w * 0).sum().backward()
        torch.nn.utils.clip_grad_norm_([w], 1.0)
        w.grad /= 0  # a counter of 0
        torch.optim.AdamW([w]).step()

    report = locate(step)
    assert verdict(report) == ("zero_over_zero", "optimizer", line("a counter of 0"))
    assert report.rows == []


@pytest.mark.parametrize("fused", [True, False])
def test_an_eps_of_0_is_the_optimizer_s_underflow_however_it_is_implemented(fused):
    w = leaf(0.5, -0.5)
    optimizer = torch.optim.AdamW([w], lr=0.1, eps=0.0, fused=fused)

    def step():
        (w * torch.tensor([1.0, 0.0])).sum().backward()
        optimizer.step()  # eps of 0

    report = locate(step)
    assert verdict(report) == ("optimizer_underflow", "optimizer", line("eps of 0"))
    assert "eps is 0" in report.explanation
    assert "eps above 0" in report.advice


def test_a_factor_of_nan_that_only_backward_uses_is_a_bad_input():
    w = leaf(1.0, 2.0)

    def step():
        losses = torch.cat([w[:1] * NAN, w[1:]])  # the factor
        losses.nanmean().backward()

    assert verdict(locate(step)) == ("bad_input", "data", line("the factor"))


def test_rows_of_a_weight_are_not_those_of_the_batch():
    w = leaf(shape=(4, 2))
    w.data[1] = NAN
    report = locate(lambda: (torch.ones(3, 4) @ w).sum().backward())
    assert report.cause == "bad_state"
    assert "row 1 of the tensor (from 0, of 4)" in str(report)


# -- steps that stop, skip or look at a number ------------------------------------------------------------------------
def says_finite(loss):
    assert torch.isfinite(loss)


def compares(loss):
    assert loss.item() == loss.item()


def leaves(loss):
    if not math.isfinite(loss.item()):
        sys.exit(1)


def diverges(loss):
    if torch.isnan(loss).any() or loss > 1e4:
        raise RuntimeError("diverged")


def differs(loss):
    if loss != loss:
        raise StopIteration


@pytest.mark.parametrize("guard", [says_finite, compares, leaves, diverges, differs])
def test_a_loop_that_stops_at_a_nan_need_not_say_so(guard):
    """facebookresearch/detr's engine.py and everything forked from it leave with sys.exit(1)."""
    net, x = nn.Linear(3, 1), torch.randn(4, 3)
    x[2, 1] = NAN

    def step():
        loss = net(x).pow(2).mean()
        guard(loss)
        loss.backward()

    report = locate(step)
    assert (report.cause, report.op, report.rows) == ("bad_input", "x", [2]), str(report)
    assert report.exception is not None
    x[2, 1] = 0.0
    assert healthy(locate(step))


@pytest.mark.parametrize("look", [lambda loss: bool(torch.isnan(loss)), lambda loss: loss.item() != loss.item()])
def test_a_loss_that_is_skipped_is_told_of_where_nothing_is_found(look):
    net, rewards = nn.Linear(3, 1), torch.ones(4)

    def step():
        loss = (net(torch.ones(4, 3)).squeeze(1) * (rewards - rewards.mean()) / rewards.std()).mean()  # skipped
        if look(loss):
            return
        loss.backward()

    report = locate(step)
    assert not report.found
    assert "No non-finite number reached" in report.explanation
    assert f"zero_over_zero: nan in forward, div, at {line('skipped')}" in report.explanation
    rewards[0] = 2.0
    assert locate(step).explanation == ""


def test_a_mask_that_is_looked_at_is_not_told_of():
    scores = torch.randn(2, 3).masked_fill(torch.eye(2, 3) > 0, -INF)

    def step():
        if (scores == -INF).any() and torch.isinf(scores).sum().item() > 0:
            return scores.softmax(-1).sum()

    report = locate(step)
    assert not report.found
    assert report.explanation == ""


def test_an_operation_that_refuses_nan_says_whose_it_is_and_no_bystander():
    given = torch.tensor([[0.5, 0.2, -INF, -INF]])

    def step():
        rest = torch.clamp(given.softmax(-1) - given.softmax(-1), min=0)
        return torch.multinomial(rest / rest.sum(), 1)  # refused

    report = locate(step)
    assert verdict(report) == ("zero_over_zero", "forward", line("refused")), str(report)
    assert report.others == []


# -- derivatives of derivatives, and updates by hand ------------------------------------------------------------------
class Root(nn.Module):
    def forward(self, x):
        return x.abs() ** 1.5  # twice derived


def test_a_fault_in_the_second_derivative_has_the_line_of_the_function():
    """pytorch/pytorch#2534; a penalty on the gradient, as in WGAN-GP, R1 and MAML."""
    net = nn.Sequential(nn.Linear(3, 4), Root(), nn.Linear(4, 1))
    net[0].weight.data[1], net[0].bias.data[1] = 0, 0

    def step():
        x = torch.randn(2, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()

    report = locate(step)
    assert verdict(report) == ("gradient_at_edge", "backward", line("twice derived")), str(report)
    assert report.module == "1"


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_an_update_by_hand_is_one_however_the_gradient_was_had(how):
    w = nn.Parameter(torch.ones(2))

    def step():
        loss = (w * 0).sum()
        g = torch.autograd.grad(loss, w)[0] if how == "grad" else (loss.backward(), w.grad)[1]
        with torch.no_grad():
            w.sub_(0.1 * g / g.norm())  # by hand

    assert verdict(locate(step)) == ("zero_over_zero", "optimizer", line("by hand"))


# -- causes and names -------------------------------------------------------------------------------------------------
def test_a_power_in_place_that_overflows_divides_nothing():
    x = torch.tensor([300.0, 1.0], dtype=torch.float16)

    def step():
        error = x - 1
        error **= 2  # square
        return error.float().mean()

    assert verdict(locate(step)) == ("overflow", "forward", line("square"))
    w = nn.Parameter(torch.randn(4, 4, dtype=torch.float16))
    adafactor = torch.optim.Adafactor([w], lr=1e-3)

    def update():
        (w * 1e4).float().sum().backward()
        adafactor.step()

    assert verdict(locate(update))[:2] == ("overflow", "optimizer")

    def divides():
        return torch.zeros(2).pow_(-2.0).mean()  # one over

    assert verdict(locate(divides)) == ("division_by_zero", "forward", line("one over"))


def test_soft_labels_of_nothing_are_an_empty_mean():
    """OpenRLHF/OpenRLHF#509: torch itself writes the NaN."""
    logits, soft = nn.Parameter(torch.randn(6, 3)), torch.rand(6, 3).softmax(-1)
    chosen = torch.zeros(6, dtype=torch.bool)

    def step():
        F.cross_entropy(logits[chosen], soft[chosen]).backward()  # soft labels

    report = locate(step)
    assert verdict(report) == ("empty_mean", "forward", line("soft labels")), str(report)
    chosen[0] = True
    assert healthy(locate(step))


class Momentum(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"eps": 1e-8})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p -= 0.1 * m / (1 - 0.9 ** self.state[p].get("step", 0))  # bias correction


def test_a_divisor_that_is_a_python_number_has_not_underflowed():
    w = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = Momentum([w])

    def step():
        (w * 3).float().sum().backward()
        optimizer.step()

    assert verdict(locate(step)) == ("division_by_zero", "optimizer", line("bias correction"))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x):
        return self.block(x).log()


def test_a_model_that_only_an_inner_function_knows_is_not_called_self():
    policy, batch = Policy(), torch.randn(2, 3)

    def inner():
        loss = policy(batch).sum()
        loss.backward()
        return loss

    report = locate(lambda: inner())
    assert (report.module, report.cause) == ("policy", "log_of_zero"), str(report)


def test_a_constant_in_the_code_is_told_as_one():
    def step():
        return torch.randn(3).masked_fill(torch.tensor([True, False, False]), NAN).sum()

    report = locate(step)
    assert report.cause == "bad_input"
    assert "That line writes it" in report.explanation


def test_a_step_may_be_a_function_with_its_arguments():
    policy = nn.Linear(3, 3)

    def train(model, x, scale=1.0):
        (model(x) * scale).log().sum().backward()  # arguments

    report = locate(functools.partial(train, policy, torch.ones(2, 3), scale=-1e9))
    assert verdict(report) == ("log_of_zero", "forward", line("arguments"))
    bad = torch.full((2, 3), NAN)
    assert locate(functools.partial(train, policy, x=bad)).op == "x"


def test_a_sum_that_backward_or_python_divides_by_a_counter_of_0_is_an_empty_mean():
    w = leaf(1.0, 2.0)

    def step():
        return (w[:0] * 2).sum() / 0.0  # counter

    assert verdict(locate(step)) == ("empty_mean", "forward", line("counter"))


def test_a_nan_in_float8_is_seen():
    x = torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn)

    def step():
        return x.float().sum()

    assert locate(step).cause == "bad_input"


def test_a_complex_number_beyond_float32_is_finite():
    assert healthy(locate(lambda: (torch.full((2,), 1e200, dtype=torch.complex128) * 2).abs().max()))


# -- whole loops: what they ask, refuse, leave out and go on after ----------------------------------------------------
ASKS = {
    "sum": lambda x: torch.isnan(x).sum() > 0,
    "sum as a number": lambda x: torch.isnan(x).sum().item() > 0,
    "share": lambda x: (~torch.isfinite(x)).float().mean().item() > 0,
    "count_nonzero": lambda x: int(torch.count_nonzero(torch.isnan(x))) > 0,
    "places": lambda x: len(torch.isnan(x).nonzero()) > 0,
    "not itself": lambda x: bool((x != x).any()),
    "or": lambda x: bool((torch.isinf(x) | torch.isnan(x)).any()),
}


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("head", [True, False])
def test_a_step_may_ask_in_many_ways_and_before_anything_else(name, head):
    net, x = nn.Linear(3, 1), torch.randn(4, 3)
    x[2, 1] = NAN

    def step(stop):
        if (head and ASKS[name](x)) or ASKS[name](loss := net(x).pow(2).mean()):
            if stop:
                raise RuntimeError("bad batch")
            return
        loss.backward()

    report = locate(lambda: step(True))
    assert (report.cause, report.op, report.rows) == ("bad_input", "x", [2]), str(report)
    left_out = locate(lambda: step(False))
    assert not left_out.found
    assert "bad_input: nan in data, x" in left_out.explanation
    x[2, 1] = 0.0
    assert healthy(locate(lambda: step(True)))
    assert locate(lambda: step(True)).explanation == ""


def test_to_ask_of_a_tensor_is_not_to_use_it():
    net, x = nn.Linear(3, 1), torch.randn(4, 3)
    x[1] = INF

    def step():
        torch.isnan(x).any()
        net(x).mean().backward()  # used here

    assert verdict(locate(step)) == ("bad_input", "data", line("used here"))


def test_an_operation_may_refuse_nan_with_words_of_its_own():
    net, x, y = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), torch.randn(8, 4), torch.rand(8)
    x[3, 0] = NAN
    report = locate(lambda: F.binary_cross_entropy(net(x)[:, 0], y).backward())
    assert (report.cause, report.op, report.rows) == ("bad_input", "x", [3]), str(report)
    assert "between 0 and 1" in str(report.exception)
    # The labels are bad and stay out of it; another shape would have been refused with finite numbers too.
    labels = torch.full((8,), NAN)
    report = locate(lambda: (labels.nan_to_num(0.5), torch.zeros(2, 5) @ net[0].weight))
    assert not report.found
    assert report.exception is not None


def test_a_step_that_went_on_after_it_had_left_a_batch_out_raised_for_its_own_reason():
    net, batches = nn.Linear(4, 1), [torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 5)]
    batches[0][2, 1] = NAN

    def step():
        for x in batches:
            loss = net(x).pow(2).mean()
            if torch.isnan(loss):
                continue
            loss.backward()

    report = locate(step)
    assert not report.found
    assert "bad_input: nan in data" in report.explanation
    assert "shapes" in str(report.exception)


@pytest.mark.parametrize("guard", [leaves, says_finite])
def test_a_loop_that_has_learned_from_other_batches_stops_at_a_bad_one(guard):
    net, batches = nn.Linear(4, 1), [torch.randn(6, 4), torch.randn(6, 4)]
    batches[1][2, 1] = NAN

    def step():
        for x in batches:
            loss = net(x).pow(2).mean()
            guard(loss)
            loss.backward()

    report = locate(step)
    assert (report.cause, report.rows) == ("bad_input", [2]), str(report)


def test_a_mask_may_be_read_before_another_is_made():
    mask = torch.tensor([0.0, -INF])

    def step():
        if mask.min().item() < -1e9:
            return torch.randn(2, 2).masked_fill(mask < 0, -INF)

    assert healthy(locate(step))


LETTERS = ["not positive-definite", "finance/loss is missing", "no /mnt/nano", "maintenance"]


@pytest.mark.parametrize("message", [*LETTERS, "hasNaN", "NaNs", "loss_nan", "isnan", "Infinity", "non-finite"])
def test_a_message_may_hold_the_letters_of_nan(message):
    labels = torch.tensor([1.0, NAN])

    def step():
        kept = labels[~labels.isnan()].mean()
        raise KeyError(f"{message} {kept > 0}")

    assert locate(step).found is (message not in LETTERS)


def test_the_logarithm_of_a_row_of_zeros_is_no_mask():
    scores = leaf(shape=(3, 4))

    def step():
        open_rows = torch.tensor([[1.0], [0.0], [1.0]])
        log_probs = (scores.square() * open_rows).log()  # a row of zeros
        F.cross_entropy(log_probs, torch.tensor([0, 1, 2])).backward()

    report = locate(step)
    assert verdict(report) == ("log_of_zero", "forward", line("a row of zeros")), str(report)
    assert report.rows == [1]


def test_what_only_the_optimizer_shows_is_called_as_the_code_calls_it():
    hidden = nn.Sequential(nn.Linear(2, 1, bias=False))
    for last in hidden.parameters():
        nn.init.ones_(last)
    optimizer, call = torch.optim.SGD(hidden.parameters(), lr=0.1), {"model": hidden.forward}

    def step():
        (call["model"](torch.ones(3, 2)).square().neg().sqrt()).sum().backward()
        optimizer.step()

    report = locate(step)
    assert "gradient of hidden.0.weight" in report.story[-1], str(report)


def test_the_story_ends_with_the_first_nan_of_the_phase():
    w, x = leaf(0.5, 1.0), torch.tensor([200.0, 1.0])
    optimizer = torch.optim.Adam([w], lr=0.1)

    def step():
        for _ in range(2):
            optimizer.zero_grad()
            loss = (w * x).exp().mean()  # first of the loop
            loss.backward()
            optimizer.step()
        return loss

    report = locate(step)
    assert verdict(report) == ("overflow", "forward", line("first of the loop")), str(report)
    assert not any(told.startswith("optimizer") for told in report.story), str(report)


def test_the_story_begins_where_the_inf_was_written():
    scores = leaf(shape=(2, 4))

    def step():
        closed = scores.masked_fill(torch.tensor([False, False, False, True]), -INF)  # closed for both
        student, teacher = closed.log_softmax(-1), closed.detach().log_softmax(-1)
        return (student - teacher).exp().sum()  # the two cancel

    report = locate(step)
    assert verdict(report) == ("inf_minus_inf", "forward", line("the two cancel")), str(report)
    assert line("closed for both") in report.story[0], str(report)


@pytest.mark.parametrize(
    ("divisor", "shown"), [(0, "other: 0"), (torch.tensor(0), "other: () int64 in [0, 0], 1 zero")]
)
def test_a_divisor_that_is_no_tensor_of_floats_is_shown(divisor, shown):
    report = locate(lambda: (leaf(1.0, 2.0) / divisor).sum())
    assert (report.cause, report.inputs[-1]) == ("division_by_zero", shown), str(report)


def test_a_setting_of_zero_is_no_count():
    accumulate = 2 // 4
    adv = torch.zeros(3)
    report = locate(lambda: (leaf(1.0, 2.0, 3.0) * adv).sum() / len(adv) / accumulate)
    assert report.cause == "zero_over_zero", str(report)


def test_a_logarithm_of_less_than_zero_says_so():
    report = locate(lambda: leaf(-0.4, 1.0).log().sum())
    assert report.cause == "log_of_zero"
    assert "Here it is out of range:" in report.explanation, str(report)
    assert "out of range" not in locate(lambda: leaf(0.0, 1.0).log().sum()).explanation


def test_what_torch_computes_in_python_has_its_line():
    def step():
        return torch.distributions.Dirichlet(torch.tensor([0.5, 0.5])).log_prob(torch.tensor([1.0, 0.0]))  # at an edge

    report = locate(step)
    assert report.source == line("at an edge"), str(report)
    assert report.library.startswith("torch/distributions/dirichlet.py")


@pytest.mark.parametrize("value", [5, "a", nn.Linear(1, 1)])
def test_a_name_for_what_is_no_tensor_is_refused(value):
    with pytest.raises(InputError, match=r"^locate\(\): optimiser is a \w+; give a tensor or a dict of tensors"):
        locate(lambda: None, optimiser=value)


def test_a_batch_may_be_a_list():
    batch = [torch.ones(2), torch.tensor([1.0, NAN])]
    report = locate(lambda: (batch[0] * batch[1]).sum(), batch=batch)
    assert (report.cause, report.op) == ("bad_input", "batch 1"), str(report)


def test_a_batch_may_have_fields_that_are_no_tensors():
    batch = {"x": torch.tensor([1.0, NAN]), "weights": None, "text": ["a", "b"]}
    report = locate(lambda: batch["x"].sum(), **batch)
    assert (report.cause, report.op) == ("bad_input", "batch x"), str(report)


def test_arrays_that_torch_cannot_hold_are_passed_over():
    image, swapped = np.arange(4.0, dtype=np.float32)[::-1], np.arange(4.0).astype(">f4")

    def step():
        w = leaf(0.0, 1.0)
        return w.log().sum() + float(image.sum() + swapped.sum())  # beside odd arrays

    assert verdict(locate(step)) == ("log_of_zero", "forward", line("beside odd arrays"))


def test_a_forced_token_is_no_logarithm_of_less_than_zero():
    def step():
        return (leaf(0.0, 1.0, 2.0) + torch.tensor([0.0, INF, 0.0])).log_softmax(-1)[1]

    assert "out of range" not in locate(step).explanation


def test_the_story_of_a_bad_row_tells_where_its_inf_became_nan():
    data = torch.tensor([[1.0, INF], [1.0, 2.0]])

    def step():
        scaled = leaf(1.0, 1.0) * data
        return (scaled - scaled.mean(1, keepdim=True)).sum()  # here it became one

    report = locate(step)
    assert report.cause == "bad_input"
    assert any("made nan" in told and line("here it became one") in told for told in report.story), str(report)


def test_many_sentinels_that_are_read_one_by_one():
    values = torch.full((500,), NAN)

    def step():
        kept = [torch.tensor(v.item()) for v in values]
        kept = [torch.tensor(v.item()) for v in kept]
        return leaf(1.0).sum() * len(kept)

    assert healthy(locate(step))


def test_a_sum_that_is_averaged_twice_is_a_mean_of_nothing():
    losses = leaf(1.0, 2.0)

    def step():
        kept = (losses > 5).sum().item()
        return (losses * (losses > 5)).sum() / 2 / kept  # of none

    assert verdict(locate(step)) == ("empty_mean", "forward", line("of none"))


@pytest.mark.parametrize("number", [torch.Tensor.item, lambda count: count])
def test_a_difference_of_two_sums_over_their_count_is_a_mean_of_nothing(number):
    chosen, rejected = leaf(1.0, 2.0), leaf(3.0, 4.0)

    def step():
        mask = (chosen > 5).float()
        return ((chosen * mask).sum() - (rejected * mask).sum()) / number(mask.sum())

    assert locate(step).cause == "empty_mean"


def test_a_range_over_a_setting_of_zero_is_no_mean():
    assert locate(lambda: (lambda x: (x.max() - x.min()) / 0)(leaf(1.0, 1.0))).cause == "zero_over_zero"
