"""Deliberate inf and NaN are no finding and change nothing; a fault beside them is found.

A function ``name(fault)`` makes a step and what it changes: healthy, or with a fault in the line marked ``# name``.
"""

import functools
import io
import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marks import lines_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from nanlab import locate

line = lines_of(__file__)
INF, NAN = math.inf, math.nan
LATER, LAST, BANNED = torch.ones(5, 5).triu(1).bool(), torch.tensor([0, 0, 1]).bool(), torch.tensor([0, 1, 0]).bool()
HEALTHY, PLANTED = [], []


def planted(cause: str, phase: str):
    def add(make):
        HEALTHY.append(pytest.param(functools.partial(make, False), id=make.__name__))
        PLANTED.append(pytest.param(make, cause, phase, id=make.__name__))
        return make

    return add


def healthy(make):
    HEALTHY.append(pytest.param(make, id=make.__name__))
    return make


def text(thing) -> str:
    """Every number of it, to the last bit."""
    if isinstance(thing, nn.Module):
        return text([thing.state_dict(), [p.grad for p in thing.parameters()]])
    if isinstance(thing, (torch.optim.Optimizer, torch.amp.GradScaler)):
        return text(thing.state_dict())
    if isinstance(thing, nn.Parameter):
        return text([thing.detach(), thing.grad])
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        return f"{thing.dtype} {thing.tolist()}"
    if isinstance(thing, dict):
        return str({k: text(v) for k, v in thing.items()})
    if isinstance(thing, (list, tuple)):
        return str([text(v) for v in thing])
    return text(vars(thing)) if hasattr(thing, "__dict__") else repr(thing)


def outcome(make, how):
    """What the step returned, changed and drew; and what ``how`` said."""
    torch.manual_seed(0)
    step, *changed = make()
    results = []

    @functools.wraps(step)
    def kept():
        results.append(step())
        return results[-1]

    said = how(kept)
    return text([results, changed, torch.rand(2)]), said


def training(net, loss, optimizer=torch.optim.SGD):
    """A step of ``net`` with the loss of a function."""
    o = optimizer(net.parameters(), 0.1)

    def step():
        value = loss()
        o.zero_grad()
        value.backward()
        o.step()
        return value.detach()

    return step, net, o


def attention(net, x, bias=None):
    q, k, v = net(x).chunk(3, -1)
    scores = q @ k.mT
    scores = scores.masked_fill(LATER, -INF) if bias is None else scores + bias
    return scores.softmax(-1) @ v


def alibi() -> torch.Tensor:
    i = torch.arange(5)
    return torch.where(i <= i[:, None], -0.5 * (i[:, None] - i), -INF)


def unfilled(*shape: int) -> torch.Tensor:
    """Memory that was never written to."""
    memory = torch.empty(shape)
    memory.view(torch.int32).fill_(0x7FC00000)
    return memory


def leaf(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


# -- placeholders and best-so-far values that are handed back ---------------------------------------------------------
@planted("bad_input", "data")
def a_tuple_with_a_best_so_far(fault):
    net, x, best = nn.Linear(3, 1), torch.randn(4, 3), {"v": INF}
    x[0, 0] = NAN if fault else 0.0

    def step():
        loss = net(x).pow(2).mean()  # a_tuple_with_a_best_so_far
        loss.backward()
        return loss.item(), best["v"]

    return step, net


@healthy
def losses_of_an_epoch_with_nan_for_not_measured():
    net, x = nn.Linear(3, 1), torch.randn(4, 3)

    def step():
        history = []
        for i in range(4):
            loss = net(x).pow(2).mean()
            loss.backward()
            history.append((loss.item(), loss.item() if i % 2 else NAN))
        return history

    return step, net


@planted("bad_input", "data")
def a_best_score_beside_a_causal_mask(fault):
    net, x, state = nn.Linear(4, 12), torch.randn(1, 5, 4), {"best": -INF}
    x[0, 2, 2] = NAN if fault else 0.0

    def step():
        h = net(x)  # a_best_score_beside_a_causal_mask
        loss = attention(nn.Identity(), h).pow(2).mean()
        loss.backward()
        return {"loss": loss.item(), "best": state["best"]}

    return step, net


@healthy
def a_tensor_as_best_so_far():
    net, x = nn.Linear(3, 1), torch.randn(4, 3)

    def step():
        best = torch.tensor(INF)
        loss = net(x).pow(2).mean()
        loss.backward()
        return {"loss": loss.detach(), "best": best}

    return step, net


class Lowest(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("value", torch.tensor(INF))

    def forward(self, v):
        self.value = torch.minimum(self.value, v)


@healthy
def a_metric_that_was_not_updated():
    net, x, used, unused = nn.Linear(3, 1), torch.randn(4, 3), Lowest(), Lowest()

    @torch.no_grad()
    def step():
        used(net(x).pow(2).mean())
        return {"used": used.value, "unused": unused.value}

    return step, net, used, unused


@healthy
def targets_with_missing_labels_are_returned():
    net, x, y = nn.Linear(3, 1), torch.randn(4, 3), torch.tensor([1.0, NAN, 0.5, 0.1])

    @torch.no_grad()
    def step():
        p, known = net(x).squeeze(1), y.isfinite()
        return {"loss": F.mse_loss(p[known], y[known]), "predictions": p, "targets": y}

    return step, net


@healthy
def predictions_padded_with_nan():
    net, xs = nn.Linear(3, 1), [torch.randn(n, 3) for n in (2, 4, 3)]

    @torch.no_grad()
    def step():
        out = torch.full((3, 4), NAN)
        for i, x in enumerate(xs):
            out[i, : len(x)] = net(x).squeeze(1)
        return {"mean": out.nanmean(), "predictions": out}

    return step, net


@healthy
def an_array_padded_with_nan():
    net, xs = nn.Linear(3, 1), [torch.randn(n, 3) for n in (2, 4, 3)]

    @torch.no_grad()
    def step():
        out = np.full((3, 4), np.nan)
        for i, x in enumerate(xs):
            out[i, : len(x)] = net(x).squeeze(1).numpy()
        return np.nanmean(out), out

    return step, net


@planted("bad_state", "state")
def a_cache_of_unfilled_memory_is_returned(fault):
    net, x = nn.Linear(4, 12), torch.randn(1, 3, 4)
    net.bias.data[0] = NAN if fault else 0.0

    @torch.no_grad()
    def step():
        cache = unfilled(2, 1, 8, 4)
        for t in range(3):
            q, k, v = net(x[:, t : t + 1]).chunk(3, -1)  # a_cache_of_unfilled_memory_is_returned
            cache[0, :, t : t + 1], cache[1, :, t : t + 1] = k, v
            y = (q @ cache[0, :, : t + 1].mT).softmax(-1) @ cache[1, :, : t + 1]
        return y, cache

    return step, net


@dataclass
class Output:
    loss: torch.Tensor
    best: float = INF
    history: tuple = (NAN, NAN)


@planted("bad_input", "data")
def a_dataclass_with_sentinels(fault):
    net, x = nn.Linear(3, 1), torch.randn(2, 3)
    x[0, 2] = INF if fault else 0.0

    def step():
        loss = net(x).pow(2).mean()  # a_dataclass_with_sentinels
        loss.backward()
        return Output(loss.detach())

    return step, net


Named = namedtuple("Named", "loss best patience")


@planted("division_by_zero", "forward")
def a_named_tuple_with_sentinels(fault):
    net, x, d = nn.Linear(3, 1), torch.randn(4, 3), torch.tensor(0.0 if fault else 2.0)

    def step():
        loss = net(x).pow(2).mean() / d  # a_named_tuple_with_sentinels
        loss.backward()
        return Named(loss.detach(), INF, 3)

    return step, net


@planted("bad_input", "data")
def a_log_with_entries_of_before(fault):
    net, x, log = nn.Linear(3, 1), torch.randn(4, 3), [{"step": 0, "eval_loss": NAN, "grad_norm": INF}]
    x[1, 2] = NAN if fault else 0.0

    def step():
        loss = net(x).pow(2).mean()  # a_log_with_entries_of_before
        loss.backward()
        log.append({"step": 1, "loss": loss.item()})
        return log

    return step, net


@planted("bad_state", "state")
def a_checkpoint_with_a_best_loss_of_inf(fault):
    net, other, x = nn.Linear(3, 1), nn.Linear(3, 1), torch.randn(6, 3)
    o = torch.optim.AdamW(net.parameters())
    other.weight.data[0, 1] = NAN if fault else 0.0

    def step():
        net(x).sum().backward()
        o.step()
        file = io.BytesIO()
        torch.save({"net": net.state_dict(), "optimizer": o.state_dict(), "best": INF}, file)
        file.seek(0)
        state = torch.load(file)
        net.load_state_dict(state["net"])
        o.load_state_dict(state["optimizer"])
        loss = other(x).mean() + net(x).mean()  # a_checkpoint_with_a_best_loss_of_inf
        return loss.item(), state["best"]

    return step, net, o


@healthy
def the_first_threshold_of_a_roc_curve_is_inf():
    net, x, y = nn.Linear(3, 1), torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])

    @torch.no_grad()
    def step():
        p = net(x).squeeze(1).sigmoid()
        thresholds = torch.cat([torch.tensor([INF]), p.sort(descending=True).values])
        tpr, fpr = (torch.stack([(p[y == k] >= t).float().mean() for t in thresholds]) for k in (1, 0))
        return {"auc": torch.trapezoid(tpr, fpr), "thresholds": thresholds}

    return step, net


@healthy
def the_bounds_of_a_box_are_returned():
    net = nn.Linear(3, 3)
    net.register_buffer("high", torch.tensor([1.0, INF, 2.0]))

    @torch.no_grad()
    def step():
        return net(torch.ones(1, 3)).clamp(max=net.high), net.state_dict()

    return step, net


# -- masks that are handed back ---------------------------------------------------------------------------------------
@healthy
def a_single_masked_logit_is_returned():
    net, x = nn.Linear(3, 1), torch.randn(1, 3)

    @torch.no_grad()
    def step():
        mask = torch.zeros(1, 1).masked_fill(torch.tensor([[True]]), -INF)
        return {"scores": net(x).masked_fill(torch.tensor([[True]]), -INF), "mask": mask}

    return step, net


@healthy
def scores_with_alibi_are_returned():
    bias, net, x = alibi(), nn.Linear(4, 12), torch.randn(2, 5, 4)

    @torch.no_grad()
    def step():
        q, k, v = net(x).chunk(3, -1)
        scores = q @ k.mT + bias
        return {"out": scores.softmax(-1) @ v, "scores": scores}

    return step, net


@healthy
def a_posterior_with_an_impossible_class_is_returned():
    prior, net, x = torch.tensor([0.5, 0.5, 0.0]).log(), nn.Linear(4, 3), torch.randn(5, 4)

    @torch.no_grad()
    def step():
        posterior = (net(x).log_softmax(-1) + prior).log_softmax(-1)
        return {"log_posterior": posterior, "predictions": posterior.argmax(-1)}

    return step, net


@healthy
def log_probabilities_of_illegal_actions_in_training():
    net, x = nn.Linear(4, 3), torch.randn(1, 4)

    def step():
        logp = net(x).masked_fill(LAST, -INF).log_softmax(-1)
        loss = -logp[0, 0]
        loss.backward()
        return {"loss": loss.detach(), "illegal": logp[0, 2].detach(), "all": logp.detach()}

    return step, net


@healthy
def banned_tokens_one_by_one():
    net, x = nn.Linear(4, 3), torch.randn(4)

    @torch.no_grad()
    def step():
        logp = net(x).masked_fill(BANNED, -INF).log_softmax(-1)
        return {f"token {i}": v for i, v in enumerate(logp)}

    return step, net


@healthy
def banned_tokens_as_sorted_python_numbers():
    net, x = nn.Linear(4, 3), torch.randn(4)

    @torch.no_grad()
    def step():
        return sorted(net(x).masked_fill(BANNED, -INF).log_softmax(-1).tolist(), reverse=True)

    return step, net


@healthy
def unused_beams_as_a_list():
    net, h = nn.Linear(4, 6), torch.randn(4)

    @torch.no_grad()
    def step():
        scores = torch.full((4,), -INF)
        scores[:2] = net(h).log_softmax(-1).topk(2).values
        return list(enumerate(scores.tolist()))

    return step, net


@healthy
def the_best_log_probabilities_with_their_tokens():
    net, h = nn.Linear(4, 6), torch.randn(2, 4)

    @torch.no_grad()
    def step():
        z = net(h)
        best = torch.where(z < z.topk(2).values[:, -1:], -INF, z).log_softmax(-1).topk(3)
        rows = zip(best.indices, best.values, strict=True)
        return [{int(i): float(v) for i, v in zip(ids, values, strict=True)} for ids, values in rows]

    return step, net


@planted("bad_state", "state")
def a_generation_with_a_bias_of_minus_inf(fault):
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    net, ids = LlamaForCausalLM(LlamaConfig(**sizes)).eval(), torch.tensor([[0, 0, 5, 6], [1, 7, 8, 9]])
    net.model.norm.weight.data[0] = INF if fault else 1.0
    how = {"sequence_bias": [[[9], -INF]], "output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 4}

    def step():
        return net.generate(ids, attention_mask=(ids != 0).long(), **how)  # a_generation_with_a_bias_of_minus_inf

    return step, net


# -- no label beside -inf in the logits -------------------------------------------------------------------------------
@planted("empty_mean", "forward")
def no_label_beside_a_buffer_of_banned_tokens(fault):
    net, ids = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)), torch.randint(0, 7, (2, 6))
    net.register_buffer("ban", torch.zeros(10).index_fill(0, torch.tensor([7, 8, 9]), -INF))
    labels = torch.full_like(ids, -100) if fault else ids

    def loss():
        z = net(ids) + net.ban
        return F.cross_entropy(z.view(-1, 10), labels.view(-1))  # no_label_beside_a_buffer_of_banned_tokens

    return training(net, loss, optimizer=torch.optim.AdamW)


@planted("empty_mean", "forward")
def no_label_beside_a_prior_of_zero(fault):
    prior, net, x = torch.tensor([0.5, 0.5, 0.0]).log(), nn.Linear(4, 3), torch.randn(5, 4)
    y = torch.full((5,), -100) if fault else torch.tensor([0, 1, 0, 1, 1])
    return training(net, lambda: F.cross_entropy(net(x) + prior, y))  # no_label_beside_a_prior_of_zero


@planted("empty_mean", "forward")
def no_label_beside_a_padded_vocabulary(fault):
    net, ids = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)), torch.randint(0, 12, (2, 6))
    labels = torch.full_like(ids, -100) if fault else ids

    def loss():
        z = net(ids)
        z[..., 12:] = -INF
        return F.cross_entropy(z.flatten(0, 1), labels.flatten())  # no_label_beside_a_padded_vocabulary

    return training(net, loss)


# -- missing values that are dropped, and a fault in another row ------------------------------------------------------
MISSING = torch.tensor([1.0, NAN, 0.5, 0.1])


@planted("division_by_zero", "forward")
def missing_labels_left_out_and_a_zero_weight(fault):
    net, x, sigma = nn.Linear(3, 1), torch.randn(4, 3), torch.tensor([1.0, 1.0, 0.0 if fault else 1.0, 1.0])

    def loss():
        each = (net(x).squeeze(1) - MISSING).detach().pow(2) / sigma  # missing_labels_left_out_and_a_zero_weight
        return net(x).mean() * 0.1 + each[~MISSING.isnan()].mean()

    return training(net, loss)


@planted("division_by_zero", "forward")
def missing_labels_dropped_by_where_and_a_zero_weight(fault):
    net, x, sigma = nn.Linear(3, 1), torch.randn(4, 3), torch.tensor([1.0, 1.0, 0.0 if fault else 1.0, 1.0])

    @torch.no_grad()
    def step():
        each = (net(x).squeeze(1) - MISSING).pow(2) / sigma  # missing_labels_dropped_by_where_and_a_zero_weight
        return torch.where(MISSING.isnan(), 0.0, each).sum() / 3

    return step, net


@planted("log_of_zero", "forward")
def a_nanmean_over_missing_labels(fault):
    net, x, y = nn.Linear(3, 1), torch.randn(4, 3), torch.tensor([1.0, NAN, 0.0 if fault else 0.5, 0.1])

    def loss():
        return (net(x).squeeze(1) - y.log()).abs().nanmean()  # a_nanmean_over_missing_labels

    return training(net, loss)


@planted("log_of_zero", "forward")
def missing_inputs_set_to_zero_after_a_logarithm(fault):
    net, x = nn.Linear(3, 1), torch.rand(4, 3) + 0.1
    x[1, 1] = NAN
    x[2, 0] = 0.0 if fault else 1.0

    def loss():
        h = x.log()  # missing_inputs_set_to_zero_after_a_logarithm
        return net(torch.where(h.isnan(), 0.0, h)).pow(2).mean()

    return training(net, loss)


@planted("log_of_zero", "forward")
def gaps_of_prices_in_an_evaluation(fault):
    price = torch.rand(6, 3) + 1
    price[2, 1] = NAN
    price[4, 0] = 0.0 if fault else 1.0

    @torch.no_grad()
    def step():
        logs, gap = price.log(), price.isnan()  # gaps_of_prices_in_an_evaluation
        return torch.where(gap, 0.0, logs).sum() / (~gap).sum()

    return (step,)


@planted("overflow", "forward")
def padding_of_nan_in_half_precision(fault):
    x, valid = torch.randn(4, 3).half(), torch.tensor([1, 0, 1, 1]).bool()
    x[1] = NAN
    x[2, 0] = 6e4 if fault else 1.0

    @torch.no_grad()
    def step():
        doubled = x * 2  # padding_of_nan_in_half_precision
        return doubled[valid].float().mean()

    return (step,)


@planted("division_by_zero", "forward")
def missing_features_filled_after_a_scale(fault):
    net, x, scale = nn.Linear(3, 1), torch.randn(5, 3), torch.tensor([1.0, 0.0 if fault else 0.5, 2.0])
    x[1, 2] = NAN

    def loss():
        z = x / scale  # missing_features_filled_after_a_scale
        return net(z.masked_fill(x.isnan(), 0.0)).pow(2).mean()

    return training(net, loss)


@planted("zero_over_zero", "forward")
def a_spread_of_zero_from_outside(fault):
    net, x, r = nn.Linear(3, 1), torch.randn(4, 3), torch.ones(4)
    mean, std = torch.tensor(1.0), torch.tensor(0.0 if fault else 0.5)

    def loss():
        advantage = (r - mean) / std  # a_spread_of_zero_from_outside
        return (net(x).squeeze(1) * advantage).mean()

    return training(net, loss)


@planted("zero_over_zero", "forward")
def the_statistics_of_a_black_channel(fault):
    net, image = nn.Conv2d(3, 2, 1), torch.rand(2, 3, 4, 4)
    image[:, 1] *= 0.0 if fault else 1.0
    mean, std = image.mean((0, 2, 3), keepdim=True), image.std((0, 2, 3), keepdim=True)
    std = torch.tensor([1.0, 0.0, 1.0])[:, None, None] if fault else std
    return training(net, lambda: net((image - mean) / std).pow(2).mean())  # the_statistics_of_a_black_channel


# -- a choice among NaN is a fault although only the choice is returned -----------------------------------------------
@planted("bad_input", "data")
def a_ranking_with_nan_last(fault):
    net, x, ok = nn.Linear(3, 1), torch.randn(5, 3), torch.tensor([1, 1, 0, 1, 0]).bool()
    x[3] = NAN if fault else 1.0

    @torch.no_grad()
    def step():
        scores = net(x).squeeze(1)  # a_ranking_with_nan_last
        return torch.where(ok, scores, NAN).argsort()[:3]

    return step, net


@planted("bad_input", "data")
def the_classes_by_max(fault):
    net, x = nn.Linear(3, 4), torch.randn(5, 3)
    x[2, 0] = NAN if fault else 0.0

    @torch.no_grad()
    def step():
        return torch.max(net(x), 1)[1]  # the_classes_by_max

    return step, net


@planted("bad_input", "data")
def the_nearest_by_topk(fault):
    queries, documents = torch.randn(2, 4), torch.randn(9, 4)
    queries[1, 1] = NAN if fault else 0.0

    @torch.no_grad()
    def step():
        return (queries @ documents.T).topk(3, dim=1).indices  # the_nearest_by_topk

    return (step,)


# -- tensors that have no round() or no ==, and operations without arguments ------------------------------------------
@planted("bad_input", "data")
def sparse_values_with_a_gradient(fault):
    w, values = nn.Parameter(torch.randn(4, 2)), torch.tensor([1.0, 2.0, NAN if fault else 3.0])
    a = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [1, 2, 3]]), values, (4, 4)).coalesce()

    def step():
        h = torch.sparse.mm(a, w)  # sparse_values_with_a_gradient
        loss = h.pow(2).mean() + torch.sparse.softmax(a.detach() * 1.0, 1).to_dense().mean() * 0
        loss.backward()
        return loss.detach()

    return step, w


@planted("bad_input", "data")
def a_graph_with_a_sparse_adjacency(fault):
    a, net, x = torch.eye(5).roll(1, 0).to_sparse(), nn.Linear(3, 2), torch.randn(5, 3)
    x[4, 1] = NAN if fault else 0.0
    return training(net, lambda: torch.sparse.mm(a * 0.5, net(x)).pow(2).mean())  # a_graph_with_a_sparse_adjacency


@planted("bad_input", "data")
def a_graph_with_a_csr_adjacency(fault):
    a, x, w = torch.eye(5).roll(1, 0).to_sparse_csr(), torch.randn(5, 3), torch.randn(3, 2)
    x[4, 1] = NAN if fault else 0.0

    @torch.no_grad()
    def step():
        return ((a @ x) @ w).relu().sum()  # a_graph_with_a_csr_adjacency

    return (step,)


@planted("bad_input", "data")
def sparse_features_stacked(fault):
    s, net, w = torch.randn(4, 3).relu().to_sparse(), nn.Linear(3, 2), torch.tensor([1.0, NAN if fault else 1.0])

    def loss():
        x = torch.cat([s, s * 2.0]).to_dense()
        return (net(x) * w).mean()  # sparse_features_stacked

    return training(net, loss)


@planted("bad_input", "data")
def rotary_positions_of_complex_numbers(fault):
    net, x, positions = nn.Linear(8, 8), torch.randn(3, 8), torch.tensor([0, 3, 4])
    turns = torch.polar(torch.ones(16, 4), torch.randn(16, 4))
    x[2, 2] = NAN if fault else 0.0

    def loss():
        h = net(x)  # rotary_positions_of_complex_numbers
        return torch.view_as_real(torch.view_as_complex(h.view(3, 4, 2)) * turns[positions]).pow(2).mean()

    return training(net, loss)


@planted("bad_input", "data")
def complex_targets_by_index(fault):
    net, x, y, some = nn.Linear(3, 2), torch.randn(5, 3), torch.randn(5, dtype=torch.complex64), torch.tensor([0, 2, 4])
    x[2, 2] = NAN if fault else 0.0

    def loss():
        p = torch.view_as_complex(net(x))  # complex_targets_by_index
        error = p[some] - y[some]
        return (error.real**2 + error.imag**2).mean()

    return training(net, loss)


@planted("bad_input", "data")
def weights_of_eight_bits(fault):
    w, x = torch.randn(4, 4), torch.randn(3, 4)
    scale = w.abs().amax(1, keepdim=True) / 448
    small = (w / scale).to(torch.float8_e4m3fn)
    x[1, 1] = NAN if fault else 0.0

    @torch.no_grad()
    def step():
        return (x @ (small.to(x.dtype) * scale).T).softmax(-1)  # weights_of_eight_bits

    return (step,)


@planted("bad_input", "data")
def features_of_mkldnn(fault):
    s, net, w = torch.randn(4, 3).to_mkldnn(), nn.Linear(3, 2), torch.tensor([1.0, NAN if fault else 1.0])

    @torch.no_grad()
    def step():
        return (net((s + s).to_dense()) * w).sum()  # features_of_mkldnn

    return step, net


@healthy
def fake_tensors_inside_the_step():
    net, x = nn.Linear(3, 1), torch.randn(4, 3)

    def step():
        with FakeTensorMode():
            shape = tuple(nn.Linear(100, 50)(torch.ones(2, 100)).shape)
        loss = net(x).pow(2).mean()
        loss.backward()
        return loss.detach(), shape

    return step, net


@healthy
def a_model_exported_inside_the_step():
    net, x = nn.Linear(3, 1), torch.randn(4, 3)

    @torch.no_grad()
    def step():
        return torch.export.export(net, (x,)).module()(x)

    return step, net


LIBRARY = torch.library.Library("nanlab_tests", "DEF")
LIBRARY.define("world_size() -> Tensor")
LIBRARY.impl("world_size", lambda: torch.tensor(2), "CompositeExplicitAutograd")


@healthy
def an_operation_without_arguments():
    net, x = nn.Linear(3, 1), torch.randn(4, 3)
    return training(net, lambda: net(x).pow(2).mean() / torch.ops.nanlab_tests.world_size())


# -- what is read, skipped, caught, unused or left over ---------------------------------------------------------------
@planted("bad_input", "data")
def a_metric_of_nan_read_before_a_bad_input(fault):
    net, x, later, y = nn.Linear(3, 3), torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    later[1, 1] = NAN if fault else 0.0
    log = []

    def loss():
        hit = (net(x).argmax(1) == y).float()
        accuracy = [hit[y == c].mean().item() for c in range(3)]
        log.append([None if math.isnan(a) else a for a in accuracy])
        return F.cross_entropy(net(later), y)  # a_metric_of_nan_read_before_a_bad_input

    return *training(net, loss), log


@planted("bad_input", "data")
def a_view_that_falls_back_to_reshape(fault):
    s, w = torch.randn(3, 4), torch.ones(12)
    w[3] = NAN if fault else 0.0

    def step():
        z = s.masked_fill(s < 0, -INF).t()
        try:
            z = z.view(-1)
        except RuntimeError:
            z = z.reshape(-1)
        return (z.exp() * w).sum()  # a_view_that_falls_back_to_reshape

    return (step,)


@planted("zero_over_zero", "forward")
def a_batch_that_does_not_fit_is_halved(fault):
    net, x = nn.Linear(4, 12), torch.randn(4, 5, 4)
    x[3, 1] *= 0.0 if fault else 1.0

    def attempt(part):
        unit = part / part.norm(dim=-1, keepdim=True)  # a_batch_that_does_not_fit_is_halved
        out = attention(net, unit)
        if len(part) > 2:
            unit.masked_fill(unit > 0, -INF).view(-1, 7)
        return out.pow(2).mean()

    def step():
        size, i, total = 4, 0, 0.0
        while i < 4:
            try:
                loss = attempt(x[i : i + size])
            except RuntimeError:
                size //= 2
                continue
            loss.backward()
            total, i = total + loss.item(), i + size
        return total

    return step, net


@healthy
def a_distribution_that_refuses_a_placeholder():
    net, x, scale = nn.Linear(3, 1), torch.randn(4, 3), torch.full((4,), NAN)

    def loss():
        try:
            d = torch.distributions.Normal(net(x).squeeze(1), scale, validate_args=True)
        except ValueError:
            d = torch.distributions.Normal(net(x).squeeze(1), torch.ones(4))
        return -d.log_prob(torch.zeros(4)).mean()

    return training(net, loss)


@healthy
def gradients_left_over_in_the_other_half_of_a_gan():
    generator, critic = nn.Linear(3, 4), nn.Linear(4, 12)
    for p in generator.parameters():
        p.grad = torch.full_like(p, INF)
    return training(critic, lambda: attention(critic, generator(torch.randn(1, 5, 3)).detach()).pow(2).mean())


@planted("bad_input", "data")
def rows_of_a_frozen_table_that_are_never_looked_up(fault):
    net, table, ids = nn.Linear(3, 1), nn.Embedding(10, 3).requires_grad_(False), torch.tensor([1, 2, 6])
    table.weight.data[7:] = NAN
    w, mask = torch.tensor([1.0, NAN if fault else 1.0, 1.0]), torch.tensor([0.0, -INF, 0.0])

    def loss():
        h = net(table(ids)).squeeze(1)
        return ((h + mask).softmax(0) * h * w).sum()  # rows_of_a_frozen_table_that_are_never_looked_up

    return training(net, loss)


# -- the other side: what was a finding before, and must stay one -----------------------------------------------------
@planted("overflow", "forward")
def scores_with_a_sink_and_a_window(fault):
    net, x, scale = nn.Linear(8, 24), torch.randn(1, 8, 8), 1e39 if fault else 1.0
    i = torch.arange(8)
    seen = (i <= i[:, None]) & (i[:, None] - i < 3)

    def loss():
        q, k, v = net(x).chunk(3, -1)
        s = q @ k.mT * scale  # scores_with_a_sink_and_a_window
        s = torch.cat([s.masked_fill(~seen, -INF), torch.zeros(1, 8, 1)], -1)
        return (s.softmax(-1)[..., :-1] @ v).pow(2).mean()

    return training(net, loss)


@planted("log_of_zero", "forward")
def a_cache_of_which_only_the_filled_part_is_used(fault):
    net, x = nn.Linear(8, 24), torch.randn(1, 4, 8)

    @torch.no_grad()
    def step():
        keys, values, out = unfilled(1, 10, 8), unfilled(1, 10, 8), []
        for t in range(4):
            q, keys[:, t : t + 1], values[:, t : t + 1] = net(x[:, t : t + 1]).chunk(3, -1)
            out.append((q @ keys[:, : t + 1].mT).softmax(-1) @ values[:, : t + 1])
        p = torch.cat(out, 1).softmax(-1) * (0.0 if fault else 1.0)
        return -p.log().mean()  # a_cache_of_which_only_the_filled_part_is_used

    return step, net


@planted("bad_state", "state")
def a_beam_search_with_finished_beams(fault):
    net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    net[1].weight.data[5, 2] = NAN if fault else 0.0

    @torch.no_grad()
    def step():
        scores, beams, done = torch.tensor([0.0, -INF, -INF]), torch.zeros(3, 1).long(), torch.zeros(3).bool()
        only_end = torch.full((12,), -INF).index_fill(0, torch.tensor([0]), 0.0)
        for _ in range(4):
            logp = net(beams[:, -1]).log_softmax(-1)  # a_beam_search_with_finished_beams
            scores, i = (scores[:, None] + torch.where(done[:, None], only_end, logp)).view(-1).topk(3)
            beams, done = torch.cat([beams[i // 12], (i % 12)[:, None]], 1), done[i // 12] | (i % 12 == 2)
        return beams, scores

    return step, net


@planted("bad_input", "data")
def a_replay_buffer_that_is_partly_filled(fault):
    net, buffer = nn.Linear(4, 1), unfilled(100, 4)

    def loss():
        buffer[:14] = torch.randn(14, 4)
        rows = torch.randint(0, 14, (8,))
        rows[3] = 20 if fault else 2
        return net(buffer[rows]).pow(2).mean()  # a_replay_buffer_that_is_partly_filled

    return *training(net, loss), buffer


class Range(nn.Module):
    def __init__(self, divide):
        super().__init__()
        self.divide = divide
        self.register_buffer("low", torch.full((3,), INF))
        self.register_buffer("high", torch.full((3,), -INF))

    def forward(self, x):
        self.low.copy_(torch.minimum(self.low, x.amin(0)))
        self.high.copy_(torch.maximum(self.high, x.amax(0)))
        return self.divide(x - self.low, self.high - self.low)


@planted("division_by_zero", "forward")
def a_range_that_starts_at_inf(fault):
    def divide(x, width):
        return 1 / (width - width) if fault else x / width.clamp_min(1e-6)  # a_range_that_starts_at_inf

    net, x = nn.Sequential(Range(divide), nn.Linear(3, 1)), torch.randn(5, 3)
    return training(net, lambda: net(x).pow(2).mean())


@planted("bad_input", "data")
def a_guard_before_the_backward_that_misses_inf(fault):
    net, xs = nn.Linear(4, 1), torch.randn(4, 3, 4)
    xs[1, 0, 0] = NAN
    xs[3, 1, 1] = INF if fault else 0.0

    def step():
        skipped = 0
        for x in xs:
            loss = net(x).pow(2).mean()  # a_guard_before_the_backward_that_misses_inf
            if torch.isnan(loss):
                skipped += 1
                continue
            loss.backward()
        return skipped

    return step, net


@planted("gradient_at_edge", "backward")
def a_hook_in_the_middle_that_drops_nan(fault):
    net, x = nn.Linear(3, 3), torch.zeros(2, 3)
    nn.init.zeros_(net.bias)

    def loss():
        h = net(x)
        if not fault:
            h.register_hook(lambda g: torch.where(g.isfinite(), g, 0.0))
        return (h.pow(2).sum(1).sqrt() - 1).pow(2).mean()  # a_hook_in_the_middle_that_drops_nan

    return training(net, loss)


@planted("overflow", "forward")
def a_logit_that_overflows_beside_banned_ones(fault):
    net, x = nn.Linear(3, 6), torch.randn(4, 3)
    if fault:
        x[2] = torch.tensor([3e38, 3e38, -3e38])
        net.weight.data.copy_(torch.tensor([1.0, 1.0, -1.0]).expand(6, 3))

    def loss():
        z = net(x)  # a_logit_that_overflows_beside_banned_ones
        return F.cross_entropy(torch.where(torch.arange(6) == 2, -INF, z), torch.tensor([0, 1, 3, 4]))

    return training(net, loss)


@planted("overflow", "forward")
def a_distance_that_overflows_beside_a_diagonal_of_inf(fault):
    x, far = nn.Parameter(torch.randn(4, 3)), torch.tensor([1.0, 1.0, 1e25 if fault else 1.0, 1.0])[:, None]

    def step():
        squares = (x * far)[:, None].sub(x * far).pow(2)  # a_distance_that_overflows_beside_a_diagonal_of_inf
        loss = torch.where(torch.eye(4).bool(), INF, squares.sum(-1)).min(1).values.mean()
        loss.backward()
        return loss.detach()

    return step, x


@planted("zero_over_zero", "forward")
def segments_without_members_beside_a_zero_vector(fault):
    net, x, segment = nn.Linear(3, 1), torch.rand(5, 3), torch.tensor([0, 0, 2, 2, 3])
    x[4] *= 0.0 if fault else 1.0

    def loss():
        n = torch.zeros(5).index_add(0, segment, torch.ones(5))
        mean = (torch.zeros(5, 3).index_add(0, segment, x) / n[:, None])[n > 0]
        unit = mean / mean.norm(dim=1, keepdim=True)  # segments_without_members_beside_a_zero_vector
        return net(unit).pow(2).mean()

    return training(net, loss)


@planted("bad_input", "data")
def a_bad_row_in_a_buffer_with_unfilled_rows(fault):
    net, buffer, rows = nn.Linear(3, 1), unfilled(6, 3), torch.randn(4, 3)
    rows[2, 1] = INF if fault else 0.0

    @torch.no_grad()
    def step():
        buffer[:4] = rows  # a_bad_row_in_a_buffer_with_unfilled_rows
        return net(buffer)[:4].pow(2).mean()

    return step, net


@planted("gradient_at_edge", "backward")
def an_edge_beside_a_branch_that_where_guards(fault):
    w, v = leaf(0.0, 1.0, 4.0), leaf(0.0 if fault else 1.0, 2.0)

    def step():
        guarded = torch.where(w > 0, torch.where(w > 0, w, 1.0).log(), 0.0).sum()
        loss = guarded + v.sqrt().sum()  # an_edge_beside_a_branch_that_where_guards
        loss.backward()
        return loss.detach()

    return step, w, v


@planted("zero_over_zero", "forward")
def the_loss_fails_beside_a_metric_of_nan(fault):
    net, x, y, w = nn.Linear(3, 3), torch.randn(4, 3), torch.tensor([0, 1, 0, 1]), torch.ones(4) * (not fault)

    def step():
        z = net(x)
        hit = (z.argmax(1) == y).float()
        accuracy = torch.stack([hit[y == c].mean() for c in range(3)])
        each = F.cross_entropy(z, y, reduction="none")
        loss = (each * (w / w.norm())).sum()  # the_loss_fails_beside_a_metric_of_nan
        loss.backward()
        return {"loss": loss.detach(), "accuracy": accuracy.nanmean()}

    return step, net


@planted("bad_input", "data")
def a_reward_of_inf_after_a_best_so_far_of_inf_was_read(fault):
    net, x, best, rewards = nn.Linear(3, 1), torch.randn(4, 3), torch.tensor(INF), [1.0, INF if fault else 0.5, 0, 2]

    def loss():
        assert best.item() > 1e9
        r = torch.tensor(rewards)
        return (net(x).squeeze(1) * r).mean()  # a_reward_of_inf_after_a_best_so_far_of_inf_was_read

    return training(net, loss)


@planted("zero_over_zero", "forward")
def bad_gradients_of_before_are_zeroed(fault):
    net, x = nn.Linear(3, 1), torch.randn(4, 3)
    x[0] *= 0.0 if fault else 1.0
    for p in net.parameters():
        p.grad = torch.full_like(p, NAN)
    return training(net, lambda: net(x / x.norm(dim=1, keepdim=True)).mean())  # bad_gradients_of_before_are_zeroed


@planted("bad_state", "state")
def bad_memory_is_initialised_inside_the_step(fault):
    net, x = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)), torch.randn(4, 3)
    for p in net.parameters():
        p.data.fill_(NAN)

    def loss():
        for layer in net:
            if not (fault and isinstance(layer, nn.LayerNorm)):
                layer.reset_parameters()
        return net(x).pow(2).mean()  # bad_memory_is_initialised_inside_the_step

    return training(net, loss)


@planted("overflow", "forward")
def logits_that_overflow_beside_an_absent_class(fault):
    net, x, t = nn.Linear(3, 4), torch.randn(5, 3), torch.tensor(3e38 if fault else 1.0)
    frequency, y = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0, 1, 0, 2, 2])

    def loss():
        z = net(x) * 50 * t  # logits_that_overflow_beside_an_absent_class
        return F.cross_entropy(z + frequency.log(), y)

    return training(net, loss)


@planted("zero_over_zero", "forward")
def a_row_of_zeros_beside_alibi(fault):
    bias, net, x = alibi(), nn.Linear(4, 12), torch.randn(2, 5, 4)
    x[1, 2] *= 0.0 if fault else 1.0

    def loss():
        unit = x / x.norm(dim=-1, keepdim=True)  # a_row_of_zeros_beside_alibi
        return attention(net, unit, bias).pow(2).mean()

    return training(net, loss)


@planted("bad_input", "data")
def a_scaler_that_finds_its_scale(fault):
    net, x = nn.Linear(4, 1), torch.randn(6, 4)
    o, s = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    x[2, 2] = NAN if fault else 0.0

    def step():
        losses = []
        for _ in range(8):
            o.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)  # a_scaler_that_finds_its_scale
            loss = out.float().pow(2).mean()
            s.scale(loss).backward()
            s.step(o)
            s.update()
            losses.append(loss.item())
        return losses

    return step, net, o, s


@pytest.mark.parametrize("make", HEALTHY)
def test_what_is_meant_is_no_finding_and_nothing_changes(make):
    wanted, _ = outcome(make, lambda step: step())
    got, report = outcome(make, locate)
    assert not report.found, str(report)
    assert report.exception is None, repr(report.exception)
    assert got == wanted


@pytest.mark.parametrize(("make", "cause", "phase"), PLANTED)
def test_a_fault_beside_it_is_found_and_nothing_changes(make, cause, phase):
    wanted, _ = outcome(functools.partial(make, True), lambda step: step())
    got, report = outcome(functools.partial(make, True), locate)
    assert (report.cause, report.phase, report.source) == (cause, phase, line(make.__name__)), str(report)
    assert report.exception is None, repr(report.exception)
    assert got == wanted


# -- an exception with a reason of its own ----------------------------------------------------------------------------
X, MASKED = torch.linspace(-1, 1, 40).view(2, 5, 4), torch.zeros(3, 5).masked_fill(torch.arange(5) == 4, -INF)


def a_key_error():
    targets = MISSING.clone()
    return {"loss": targets[targets.isfinite()].mean()}["los"]


def early_stopping():
    best, curve = torch.tensor(INF), torch.full((10,), NAN)
    raise RuntimeError(f"patience is over: {best.dim()}, {len(curve)}")


RAISES = {
    "a causal mask of another size": lambda: (X @ X.mT + torch.full((4, 4), -INF).triu(1)).softmax(-1),
    "masked scores and too few values": lambda: (X @ X.mT).masked_fill(LATER, -INF) @ torch.ones(2, 4, 3),
    "missing labels of another shape": lambda: F.mse_loss(X[0][MISSING.isfinite()], MISSING[MISSING.isfinite()]),
    "a label out of range": lambda: F.cross_entropy(MASKED, torch.tensor([0, 1, 9])),
    "alibi of another length": lambda: X[:, :4] @ X[:, :4].mT + alibi(),
    "a view of masked scores": lambda: MASKED.t().view(-1).exp().sum(),
    "a key": a_key_error,
    "early stopping": early_stopping,
}


@pytest.mark.parametrize("step", RAISES.values(), ids=RAISES)
def test_an_exception_blames_no_mask_and_no_missing_label(step):
    report = locate(step)
    assert not report.found, str(report)
    assert report.exception is not None


# -- trainers ---------------------------------------------------------------------------------------------------------
class Rotary(nn.Module):
    """Complex positions as a buffer, and the last tokens of the vocabulary are banned."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.register_buffer("turns", torch.polar(torch.ones(6, 4), torch.randn(6, 4)), persistent=False)

    def forward(self, input_ids, w, labels):
        turned = torch.view_as_complex(self.emb(input_ids).unflatten(-1, (4, 2))) * self.turns[torch.arange(6)]
        h = torch.view_as_real(turned).flatten(-2) * w[:, None, None]  # trainer: bad_input
        z = self.head(h).masked_fill(torch.arange(16) >= 12, -INF)
        return {"loss": F.cross_entropy(z.flatten(0, 1), labels.flatten()), "logits": z}  # trainer: empty_mean


class Unlimited(torch.optim.AdamW):
    """A growth rate of inf among the settings: no limit."""

    def __init__(self, parameters):
        super().__init__(parameters, 1e-3)
        self.param_groups[0]["growth_rate"] = INF


def trainer(folder, fault):
    w, label = NAN if fault == "bad_input" else 1.0, -100 if fault == "empty_mean" else 2
    rows = [{"input_ids": torch.full((6,), i), "w": w, "labels": torch.full((6,), label)} for i in range(8)]
    settings = {"max_steps": 4, "report_to": [], "use_cpu": True, "remove_unused_columns": False}
    net, arguments = Rotary(), TrainingArguments(str(folder), disable_tqdm=True, **settings)
    return Trainer(
        net, arguments, train_dataset=rows, eval_dataset=rows, optimizers=(Unlimited(net.parameters()), None)
    )


modes = pytest.mark.parametrize("mode", ["train", "eval"])


@modes
def test_a_trainer_with_banned_tokens_complex_buffers_and_no_limit_is_healthy(tmp_path, mode):
    torch.manual_seed(0)
    made = trainer(tmp_path, "")
    before = text([made.model, made.optimizer])
    report = locate(made, mode=mode)
    assert not report.found, str(report)
    assert report.exception is None, repr(report.exception)
    assert text([made.model, made.optimizer]) == before


@modes
@pytest.mark.parametrize(("cause", "phase"), [("bad_input", "data"), ("empty_mean", "forward")])
def test_a_fault_in_a_trainer_beside_them_is_found(tmp_path, mode, cause, phase):
    torch.manual_seed(0)
    report = locate(trainer(tmp_path, cause), mode=mode)
    assert (report.cause, report.phase, report.source) == (cause, phase, line(f"trainer: {cause}")), str(report)
    assert report.exception is None, repr(report.exception)
