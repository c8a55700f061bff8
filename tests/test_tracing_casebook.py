"""The public reports of the casebook as miniatures: locate names the cause and the line of each that it can see.

The ids are those of ``shared/casebook.jsonl``. Those that are not its business are listed with the reason.
"""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from marks import lines_of
from torch import nn

from nanlab import locate

line = lines_of(__file__)
CASEBOOK = Path(__file__).resolve().parents[1].parent / "shared" / "casebook.jsonl"
INF = math.inf
CASES: dict[str, tuple] = {}
NOT_FOR_LOCATE = {
    "hf-23530": "no number is non-finite: pad = eos removes labels (preflight)",
    "hf-13758": "arithmetic of a log entry, long after the step (autopsy)",
    "trl-6702": "the log replaces the step's NaN; locate on the step itself finds any cause (autopsy)",
    "trl-1386": "a metric averaged over ranks outside the step: metric only (autopsy)",
}


def case(name: str, cause: str, phase: str = "forward", **options):
    def register(make):
        CASES[name] = (make, cause, phase, options)
        return make

    return register


def leaf(*values: float, shape=(), dtype=torch.float32) -> nn.Parameter:
    return nn.Parameter((torch.randn(shape) if shape else torch.tensor(values)).to(dtype))


def nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # nll


def labelled(labels: torch.Tensor):
    logits = leaf(shape=(*labels.shape, 8))
    return lambda: nll(logits, labels).backward()


@case("trl-5662", "empty_mean", at="nll")
def prompt_fills_max_length():
    prompt, completion, max_length = 40, 4, 16
    keep = torch.arange(prompt + completion)[None, :max_length] >= prompt
    return labelled(torch.full((1, max_length), 3).masked_fill(~keep, -100))


@case("trl-6668", "empty_mean", at="nll")
def completion_cut_away():
    return labelled(torch.full((2, 6), -100))


@case("trl-1053", "empty_mean", at="nll")
def response_marker_cut_off():
    ids, marker = torch.arange(12).reshape(2, 6) % 8, 99
    return labelled(ids.masked_fill(~(ids == marker).any(1, keepdim=True), -100))


@case("hf-16711", "empty_mean", at="nll")
def random_masking_chose_nothing():
    return labelled(torch.full((1, 4), 5).masked_fill(torch.zeros(1, 4) == 0, -100))


@case("pt-70348", "empty_mean")
def every_target_ignored():
    logits = leaf(shape=(3, 4))
    return lambda: F.cross_entropy(logits, torch.full((3,), -100)).backward()  # pt-70348


@case("verl-785", "empty_mean")
def sum_over_a_count_of_zero():
    per_token, mask = leaf(shape=(2, 5)), torch.zeros(2, 5)
    return lambda: ((per_token * mask).sum() / mask.sum()).backward()  # verl-785


@case("instructlab-547", "empty_mean")
def no_token_counts():
    per_token, labels = leaf(shape=(2, 5)), torch.full((2, 5), -100)

    def step():
        count = int((labels != -100).sum())
        loss = (per_token * (labels != -100)).sum() / count  # instructlab-547
        loss.backward()
        return 1.0 / count  # the logger's own division raises

    return step


@case("axolotl-3026", "empty_mean", phase="forward")
def a_rank_with_only_padding():
    per_token, mask = leaf(shape=(1, 8)), torch.tensor([[1.0, 1, 1, 0, 0, 0, 0, 0]])
    local, local_mask = per_token.detach()[:, 4:], mask[:, 4:]
    return lambda: local[local_mask.bool()].mean()  # axolotl-3026


@case("trl-1380", "empty_mean")
def no_mismatched_example():
    log_ratio, is_kl = leaf(shape=(4,)), torch.zeros(4, dtype=torch.bool)

    def step():
        kl = log_ratio[is_kl].mean()  # trl-1380
        (1 - torch.sigmoid(log_ratio - kl)).mean().backward()

    return step


@case("trl-5775", "bad_input", phase="data", rows=[0])
def reward_missing():
    rewards = torch.full((1, 8), math.nan)
    rewards[0, 3] = 1.0
    log_probs = leaf(shape=(1, 8))

    def step():
        spread = rewards.std(1, keepdim=True)  # trl-5775
        (log_probs * (rewards - rewards.nanmean(1, keepdim=True)) / spread).sum().backward()

    return step


@case("peft-3530", "zero_over_zero")
def dare_with_density_zero():
    delta, density = leaf(shape=(4, 4)), 0.0

    def step():
        kept = delta * torch.bernoulli(torch.full((4, 4), density))
        (kept / density).sum().backward()  # peft-3530

    return step


@case("trl-2564", "gradient_at_edge", phase="backward")
def odds_ratio_of_a_sure_answer():
    log_prob = leaf(-0.7, 0.0)

    def step():
        log_odds = log_prob - torch.log1p(-torch.exp(log_prob))  # trl-2564
        loss = -F.logsigmoid(log_odds).mean()
        loss.backward()
        return loss

    return step


@case("trl-3015", "overflow")
def unbounded_kl_estimate():
    policy, reference = leaf(-100.0, -1.0), torch.tensor([0.0, -1.0])

    def step():
        d = reference - policy
        kl = torch.exp(d) - d - 1  # trl-3015
        kl.mean().backward()

    return step


@case("pt-2421", "gradient_at_edge", phase="backward")
def norm_of_a_zero_vector():
    x = leaf(0.0, 0.0, 0.0)

    def step():
        loss = torch.sqrt((x**2).sum())  # pt-2421
        loss.backward()
        return loss

    return step


def attention(mask: torch.Tensor, name: str):
    q, k = leaf(shape=(2, 4, 8)), leaf(shape=(2, 4, 8))

    def unsloth():
        scores = q @ k.mT + mask
        return (torch.softmax(scores, -1) @ k).sum()  # unsloth-9848

    def torch_20():
        scores = q @ k.mT + mask
        return (torch.softmax(scores, -1) @ k).sum()  # pt-103749

    def transformers():
        scores = q @ k.mT + mask
        return (torch.softmax(scores, -1) @ k).sum()  # hf-32390

    loss = {"unsloth": unsloth, "torch": torch_20, "transformers": transformers}[name]
    return lambda: loss().backward()


def left_padded() -> torch.Tensor:
    keep = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    keep[1, :, :2] = False
    return torch.zeros(2, 4, 4).masked_fill(~keep, -INF)


@case("unsloth-9848", "masked_row", rows=[1])
def left_padded_row():
    return attention(left_padded(), "unsloth")


@case("pt-103749", "masked_row", rows=[1])
def padding_mask():
    return attention(left_padded(), "torch")


@case("hf-32390", "masked_row", rows=[1])
def padded_rows_see_nothing():
    return attention(left_padded(), "transformers")


@case("trl-1371", "overflow")
def residual_beyond_half():
    x, w = torch.full((2, 4), 40000.0).half(), leaf(1.0, 1, 1, 1, dtype=torch.float16)

    def step():
        stream = x + x * w  # trl-1371
        return F.layer_norm(stream, (4,)).float().sum().backward()

    return step


@case("hf-39972", "overflow")
def activations_beyond_half():
    x, layer = torch.full((2, 4), 60000.0).half(), nn.Linear(4, 4).half()
    nn.init.ones_(layer.weight)
    return lambda: layer(x).float().mean().backward()  # hf-39972


def half_adam(values: tuple[float, ...], gradients: tuple[float, ...], take_step):
    w = leaf(*values, dtype=torch.float16)
    optimizer = torch.optim.AdamW([w], lr=1e-3, eps=1e-8, foreach=False)

    def step():
        w.grad = torch.tensor(gradients).half()
        take_step(optimizer)

    return step


@case("trl-1789", "optimizer_underflow", phase="optimizer")
def dpo_in_half():
    return half_adam((0.5, -0.5), (1e-4, 0.1), lambda optimizer: optimizer.step())  # trl-1789


@case("ptforum-1765", "optimizer_underflow", phase="optimizer")
def adam_in_half():
    return half_adam((0.1, 0.2, 0.3), (0.0, 1e-4, 0.1), lambda optimizer: optimizer.step())  # ptforum-1765


@case("tropt-8", "optimizer_underflow", phase="optimizer")
def soft_prompt_in_half():
    return half_adam((0.3, 0.3), (1e-4, 1e-4), lambda optimizer: optimizer.step())  # tropt-8


def second_dpo_step(name: str):
    policy, reference = nn.Linear(4, 2).half(), nn.Linear(4, 2).half()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, foreach=False)
    x = torch.randn(3, 4).half()
    marks = {
        "dojo": lambda: optimizer.step(),  # llm-dojo-23
        "trl": lambda: optimizer.step(),  # trl-878
    }

    def step():
        for _ in range(2):
            optimizer.zero_grad()
            log_probs, base = F.log_softmax(policy(x).float(), -1), F.log_softmax(reference(x).float(), -1)
            margin = (log_probs - base)[:, 0] - (log_probs - base)[:, 1]
            (-F.logsigmoid(1e-4 * margin).mean()).backward()
            marks[name]()

    return step


@case("llm-dojo-23", "optimizer_underflow", phase="optimizer")
def hand_written_dpo_in_half():
    return second_dpo_step("dojo")


@case("trl-878", "optimizer_underflow", phase="optimizer")
def rewards_nan_from_the_second_step():
    return second_dpo_step("trl")


class Kernel(torch.autograd.Function):
    """Exact forward; a backward that is broken on one backend."""

    backend = "cudnn"

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * (math.nan if Kernel.backend == "cudnn" else 2.0)  # nemo-3232


@case("nemo-3232", "unknown", phase="backward")
def broken_backend():
    x = leaf(1.0, 2.0)
    return lambda: Kernel.apply(x).sum().backward()


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)

    def forward(self, x):
        angle = torch.arange(4.0)[:, None] * self.inv_freq  # hf-48932
        return x * torch.cat([angle.cos(), angle.sin()], -1)


@case("hf-48932", "bad_state", phase="state", rows=[2])
def buffer_of_uninitialised_memory():
    rotary, x = Rotary(), leaf(shape=(4, 8))
    rotary.inv_freq[2] = INF  # what empty_like may leave there
    return lambda: rotary(x).sum().backward()


@case("llm-foundry-1745", "bad_state", phase="state")
def norm_left_uninitialised():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    model[1].weight.data.view(torch.int32).fill_(0x7FC00000)  # what to_empty may leave there
    nn.init.zeros_(model[1].bias)
    x = torch.randn(2, 4)
    return lambda: model(x).sum().backward()  # llm-foundry-1745


@case("chatglm2-519", "overflow")
def learning_rate_far_too_high():
    layer, x, y = nn.Linear(4, 1), torch.randn(8, 4), torch.randn(8, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e4)

    def step():
        for _ in range(20):
            optimizer.zero_grad()
            loss = ((layer(x) - y) ** 2).mean()  # chatglm2-519
            loss.backward()
            optimizer.step()

    return step


@pytest.mark.parametrize("name", list(CASES))
def test_a_public_report_in_miniature(name):
    make, cause, phase, options = CASES[name]
    torch.manual_seed(0)
    report = locate(make())
    assert (report.cause, report.phase) == (cause, phase), str(report)
    assert report.source == line(options.get("at", name)), str(report)
    if "rows" in options:
        assert report.rows == options["rows"]


def test_the_exploding_learning_rate_shows_its_growth():
    torch.manual_seed(0)
    report = locate(CASES["chatglm2-519"][0]())
    assert report.growth == sorted(report.growth)
    assert report.growth[-1] > 1e6 * report.growth[0]


def test_every_report_of_the_casebook_is_here_or_has_a_reason():
    if not CASEBOOK.exists():
        pytest.skip(f"{CASEBOOK.name} is not here")
    ids = [json.loads(text)["id"] for text in CASEBOOK.read_text(encoding="utf-8").splitlines()]
    assert set(ids) == set(ids) & (set(CASES) | set(NOT_FOR_LOCATE))
    assert not set(CASES) & set(NOT_FOR_LOCATE)
