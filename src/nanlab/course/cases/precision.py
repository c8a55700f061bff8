"""Cases: half precision in the forward pass, and the loss scale."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from nanlab.course.cases.frame import Case

CASES: list[Case] = []


# -- trl-1371 --------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        update = self.down(F.relu(self.up(self.norm(x))))
        return x + update


def pretrained():
    model = nn.Sequential(nn.Embedding(16, 8), Block(8), Block(8), nn.LayerNorm(8), nn.Linear(8, 16))
    with torch.no_grad():
        model[0].weight[:, 3] += 40000.0  # as in the checkpoint: one channel of the stream is far from the others
        model[2].down.bias[3] += 30000.0
    return model


def score_answer():
    model = pretrained().half()
    answer = torch.tensor([3, 8, 1, 12, 5])

    @torch.no_grad()
    def step():
        log_probs = model(answer[:-1]).log_softmax(-1)
        return {"logps/chosen": log_probs.gather(-1, answer[1:, None]).sum()}

    return step


def score_answer_fixed():
    model = pretrained()  # float32; bfloat16 has the range too
    answer = torch.tensor([3, 8, 1, 12, 5])

    @torch.no_grad()
    def step():
        log_probs = model(answer[:-1]).log_softmax(-1)
        return {"logps/chosen": log_probs.gather(-1, answer[1:, None]).sum()}

    return step


def score_answer_reference():
    torch.manual_seed(0)
    model, answer = pretrained().double(), torch.tensor([3, 8, 1, 12, 5])
    probabilities = torch.softmax(model(answer[:-1]), -1)
    return {"logps/chosen": probabilities[range(4), answer[1:]].log().sum()}


CASES.append(
    Case(
        id="trl-1371",
        title="This model, but not that one",
        symptom="DPO on an old GPU: with one model all is well, with another all metrics are nan from the first line "
        "of the log. Same script, same data, same dtype.",
        broken=score_answer,
        fixed=score_answer_fixed,
        reference=score_answer_reference,
        parts=(Block, pretrained),
        cause="overflow",
        phase="forward",
        line="return x + update",
        link="https://github.com/huggingface/trl/issues/1371",
        family="fp16_forward_overflow",
        story="The reporter loads the model in float16; the maintainers suspect the precision. Some families carry "
        "numbers of tens of thousands in a few channels: 40000 + 30000 is past 65504. Use the dtype a model was made "
        "in, or float32.",
        difficulty=1,
        tolerance=1e-4,
    )
)


# -- trl-878 ---------------------------------------------------------------------------------------------------------
def sequence_log_prob(model, ids):
    logits = model(ids[:, :-1])
    chosen = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (chosen - logits.exp().sum(-1).log()).sum(-1)


def confident_model():
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    with torch.no_grad():
        model[1].weight *= 12  # a well-trained model is sure of itself
    return model


def dpo_margin():
    policy = confident_model()
    reference = copy.deepcopy(policy).half().requires_grad_(False)
    chosen, rejected = torch.randint(0, 20, (3, 6)), torch.randint(0, 20, (3, 6))

    def step():
        ratio_chosen = sequence_log_prob(policy, chosen) - sequence_log_prob(reference, chosen)
        ratio_rejected = sequence_log_prob(policy, rejected) - sequence_log_prob(reference, rejected)
        loss = -F.logsigmoid(0.1 * (ratio_chosen - ratio_rejected)).mean()
        return {"loss": loss, "rewards/chosen": 0.1 * ratio_chosen.mean()}

    return step


def dpo_margin_fixed():
    policy = confident_model()
    reference = copy.deepcopy(policy).requires_grad_(False)  # or, in half: logits.float().log_softmax(-1)
    chosen, rejected = torch.randint(0, 20, (3, 6)), torch.randint(0, 20, (3, 6))

    def step():
        ratio_chosen = sequence_log_prob(policy, chosen) - sequence_log_prob(reference, chosen)
        ratio_rejected = sequence_log_prob(policy, rejected) - sequence_log_prob(reference, rejected)
        loss = -F.logsigmoid(0.1 * (ratio_chosen - ratio_rejected)).mean()
        return {"loss": loss, "rewards/chosen": 0.1 * ratio_chosen.mean()}

    return step


CASES.append(
    Case(
        id="trl-878",
        title="The frozen copy",
        symptom="DPO. The policy is in float32; to save memory I keep the reference, which is not trained, in float16. "
        "The loss is nan at once, and a reward is inf. The policy alone is fine.",
        broken=dpo_margin,
        fixed=dpo_margin_fixed,
        # Both models are the same: each ratio is 0 and the loss log 2.
        reference=lambda: {"loss": 2 * torch.tensor(2.0).double().sqrt().log(), "rewards/chosen": 0.0},
        parts=(sequence_log_prob, confident_model),
        cause="overflow",
        phase="forward",
        line="return (chosen - logits.exp().sum(-1).log()).sum(-1)",
        link="https://github.com/huggingface/trl/issues/878",
        family="half_precision_unspecified",
        story="Users cured it with bf16, with fp32, or with the reference alone in fp32; which operation it was, "
        "nobody said. Here: e to the power of a logit above 11.09 is no float16 number. log_softmax subtracts the "
        "largest logit first, and belongs in float32.",
        difficulty=2,
    )
)


# -- ultralytics-24990 -----------------------------------------------------------------------------------------------
def image_attention():
    q, k, v = torch.randn(3, 2, 4, 6, 64).half()
    q, k = q * 60, k * 40
    scale = q.shape[-1] ** -0.5

    def step():
        scores = (q @ k.transpose(-1, -2)) * scale
        return {"mean |output|": (torch.softmax(scores, dim=-1) @ v).abs().mean()}

    return step


def image_attention_fixed():
    q, k, v = torch.randn(3, 2, 4, 6, 64).half()
    q, k = q * 60, k * 40
    scale = q.shape[-1] ** -0.5

    def step():
        scores = (q * scale) @ k.transpose(-1, -2)  # the same product, 8 times smaller on the way
        return {"mean |output|": (torch.softmax(scores, dim=-1) @ v).abs().mean()}

    return step


def image_attention_reference():
    """Query by query in float64."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 64).half()
    q, k, v, total = (q * 60).double(), (k * 40).double(), v.double(), 0.0
    for b in range(2):
        for h in range(4):
            for query in q[b, h]:
                total += (torch.softmax(k[b, h] @ query / 8, 0) @ v[b, h]).abs().mean()
    return {"mean |output|": total / 48}


CASES.append(
    Case(
        id="ultralytics-24990",
        title="Some images, in half precision",
        symptom="A detector with an attention block, mixed precision: some batches have nan outputs. In float32 the "
        "same batches are fine, and the attention scores there are nowhere above 10000.",
        broken=image_attention,
        fixed=image_attention_fixed,
        reference=image_attention_reference,
        cause="overflow",
        phase="forward",
        line="scores = (q @ k.transpose(-1, -2)) * scale",
        link="https://github.com/ultralytics/ultralytics/pull/24990",
        family="fp16_forward_overflow",
        story="The scores fit into float16, but they are made by way of a product √64 = 8 times larger, which does "
        "not. Scale the query first: the same number, without the detour. A result in range says nothing of the steps "
        "to it.",
        difficulty=2,
        tolerance=2e-3,
    )
)


# -- vllm-1623 -------------------------------------------------------------------------------------------------------
def nearly_greedy():
    logits = (torch.randn(2, 12) * 4).half()
    temperature = 1e-4

    def step():
        probabilities = torch.softmax(logits / temperature, dim=-1)
        return {"next": torch.multinomial(probabilities, 1)[:, 0]}

    return step


def nearly_greedy_fixed():
    logits = (torch.randn(2, 12) * 4).half()
    temperature = 1e-4

    def step():
        probabilities = torch.softmax(logits.float() / temperature, dim=-1)
        return {"next": torch.multinomial(probabilities, 1)[:, 0]}

    return step


def nearly_greedy_reference():
    """At such a temperature the largest logit wins."""
    torch.manual_seed(0)
    return {"next": (torch.randn(2, 12).double() * 4).max(-1).indices}


CASES.append(
    Case(
        id="vllm-1623",
        title="Temperature 0.0001",
        symptom="Temperature 0 is not allowed, so I ask for 0.0001 to be as good as greedy. Sampling dies with an "
        "error about the probability tensor. At 0.1 it works.",
        broken=nearly_greedy,
        fixed=nearly_greedy_fixed,
        reference=nearly_greedy_reference,
        cause="overflow",
        phase="forward",
        line="probabilities = torch.softmax(logits / temperature, dim=-1)",
        link="https://github.com/vllm-project/vllm/issues/1623",
        family="fp16_forward_overflow",
        story="The report gives the setting and the error. In float16, a logit of 7 over 0.0001 is 70000, which is "
        "inf, and a softmax with an inf in it is nan. Greedy is an argmax: ask for that, and do the division in "
        "float32.",
        difficulty=1,
    )
)


# -- transformers-25681 ----------------------------------------------------------------------------------------------
class Rotary(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        frequency = 10000.0 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("frequency", frequency, persistent=False)
        self.register_buffer("position", torch.arange(length).float(), persistent=False)

    def forward(self, x):
        angle = self.position[:, None] * self.frequency
        cos, sin, (even, odd) = angle.cos(), angle.sin(), (x[..., ::2], x[..., 1::2])
        return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)


def neighbours():
    rotary = Rotary(width=8, length=1024).to(torch.bfloat16)
    x = torch.randn(8).to(torch.bfloat16).expand(1024, 8)

    def step():
        turned = rotary(x).float()
        shift = (turned[1:] - turned[:-1]).norm(dim=-1)
        print(f"mean step from one position to the next {shift.mean():.3f}")
        return {"positions that equal their neighbour": (shift == 0).sum()}

    return step


def neighbours_fixed():
    rotary = Rotary(width=8, length=1024)  # positions and angles stay in float32; round the result, if at all
    x = torch.randn(8).to(torch.bfloat16).expand(1024, 8)

    def step():
        turned = rotary(x.float())
        shift = (turned[1:] - turned[:-1]).norm(dim=-1)
        return {"positions that equal their neighbour": (shift == 0).sum()}

    return step


CASES.append(
    Case(
        id="transformers-25681",
        title="Worse than the same model in float32",
        symptom="I load my model in bfloat16. No nan anywhere, loss a little higher than in float32. On texts of more "
        "than some hundred tokens it mixes up word order. A check of the positions prints this.",
        broken=neighbours,
        fixed=neighbours_fixed,
        reference=lambda: {"positions that equal their neighbour": 0},  # an injective map: no two angles are the same
        parts=(Rotary,),
        lesson="06_fp16_overflow",
        phase="forward",
        line="rotary = Rotary(width=8, length=1024).to(torch.bfloat16)",
        link="https://github.com/huggingface/transformers/issues/25681",
        family="half_precision_unspecified",
        trap="finite and wrong",
        tool="none: compare with a reference",
        story="bfloat16 has 8 bits of precision: above 256 it does not know the odd numbers. .to(dtype) casts buffers "
        "too, so positions 256 and 257 became the same. bfloat16 heals overflow, and is too coarse to count.",
        difficulty=3,
    )
)


# -- factseg-6 -------------------------------------------------------------------------------------------------------
def scaled_training():
    model, x = nn.Linear(4, 1), torch.randn(6, 4)
    valid = torch.tensor([1, 1, 1, 0, 1, 1])[:, None]  # the fourth is padding
    area = torch.rand(6, 1) * valid
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def step():
        for _ in range(6):
            optimizer.zero_grad()
            predicted = F.softplus(model(x)) * valid
            loss = (predicted.sqrt() - area.sqrt()).square().sum() / valid.sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            print(f"loss {loss:.4f}, loss scale {scaler.get_scale():g}")
            scaler.update()
        return {"loss": loss, "loss scale": scaler.get_scale()}

    return step


def scaled_training_fixed():
    model, x = nn.Linear(4, 1), torch.randn(6, 4)
    valid = torch.tensor([1, 1, 1, 0, 1, 1]).bool()
    area = torch.rand(6, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def step():
        for _ in range(6):
            optimizer.zero_grad()
            predicted = F.softplus(model(x[valid]))  # padding goes before the root sees it
            loss = (predicted.sqrt() - area[valid].sqrt()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return {"loss": loss, "loss scale": scaler.get_scale()}

    return step


def scaled_training_reference():
    """Six steps by hand in float64, without a scale: the slope of (√p − √a)² is (1 − √(a/p)) σ(x·w), p = softplus."""
    torch.manual_seed(0)
    model, keep = nn.Linear(4, 1), [0, 1, 2, 4, 5]
    x, area = torch.randn(6, 4).double()[keep], torch.rand(6, 1).double()[keep]
    w, b = model.weight.detach().double(), model.bias.detach().double()
    for _ in range(6):
        z = x @ w.T + b
        p = (1 + z.exp()).log()
        loss = (p.sqrt() - area.sqrt()).square().mean()
        slope = (1 - (area / p).sqrt()) / (1 + (-z).exp()) / 5
        w, b = w - 0.1 * slope.T @ x, b - 0.1 * slope.sum()
    return {"loss": loss, "loss scale": 65536.0}


CASES.append(
    Case(
        id="factseg-6",
        title="The scale that only falls",
        symptom="Mixed precision: the loss is a number at every step, and always the same number. The loss scale "
        "halves and halves, and after less than two hundred steps it is 0.",
        broken=scaled_training,
        fixed=scaled_training_fixed,
        reference=scaled_training_reference,
        cause="gradient_at_edge",
        phase="backward",
        line="loss = (predicted.sqrt() - area.sqrt()).square().sum() / valid.sum()",
        link="https://github.com/Junjue-Wang/FactSeg/issues/6",
        family="loss_scale_floor",
        trap="finite and wrong",
        story="The mask puts a 0 under the root, and the slope of √ there is infinite: 0 · inf, every gradient is nan. "
        "The scaler takes it for a scale that is too high, skips the step, and halves, for ever. A guard that always "
        "acts hides a fault; a smaller scale cannot cure a nan.",
        difficulty=3,
    )
)
