"""Cases: attention and sampling in which everything is masked."""

from __future__ import annotations

import torch
from torch import nn

from nanlab.course.cases.frame import Case

CASES: list[Case] = []


# -- unsloth-9848 ----------------------------------------------------------------------------------------------------
class SelfAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, bias):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        weights = torch.softmax(scores + bias, dim=-1)
        return x + weights @ v


def padded_prompts():
    embed, layers = nn.Embedding(12, 8), nn.ModuleList([SelfAttention(8), SelfAttention(8)])
    ids = torch.tensor([[0, 0, 5, 7], [3, 9, 4, 8]])  # id 0 pads on the left

    @torch.no_grad()
    def step():
        x, length = embed(ids), ids.shape[1]
        visible = torch.ones(length, length).tril().bool() & (ids != 0)[:, None, :]
        bias = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        for layer in layers:
            x = layer(x, bias)
        return {"scores of the next token": x[:, -1] @ embed.weight.T}

    return step


def padded_prompts_fixed():
    embed, layers = nn.Embedding(12, 8), nn.ModuleList([SelfAttention(8), SelfAttention(8)])
    ids = torch.tensor([[0, 0, 5, 7], [3, 9, 4, 8]])

    @torch.no_grad()
    def step():
        x, length = embed(ids), ids.shape[1]
        visible = torch.ones(length, length).tril().bool() & (ids != 0)[:, None, :]
        visible = visible | torch.eye(length).bool()  # every position sees itself: no row without a key
        bias = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        for layer in layers:
            x = layer(x, bias)
        return {"scores of the next token": x[:, -1] @ embed.weight.T}

    return step


def padded_prompts_reference():
    """Each prompt alone, without padding, in float64."""
    torch.manual_seed(0)
    embed, layers = nn.Embedding(12, 8), nn.ModuleList([SelfAttention(8), SelfAttention(8)])
    embed, layers, rows = embed.double(), layers.double(), []
    for prompt in ([5, 7], [3, 9, 4, 8]):
        x, length = embed(torch.tensor(prompt)), len(prompt)
        for layer in layers:
            x = layer(x, torch.full((length, length), -torch.inf).triu(1).double())
        rows.append(x[-1] @ embed.weight.T)
    return {"scores of the next token": torch.stack(rows)}


CASES.append(
    Case(
        id="unsloth-9848",
        title="The short prompt of the batch",
        symptom="Two prompts in a batch, padded on the left. The long one gets an answer, the short one an empty "
        "string: all its scores are nan. Alone, the short prompt works.",
        broken=padded_prompts,
        fixed=padded_prompts_fixed,
        reference=padded_prompts_reference,
        parts=(SelfAttention,),
        cause="masked_row",
        phase="forward",
        line="weights = torch.softmax(scores + bias, dim=-1)",
        link="https://github.com/unslothai/unsloth/pull/9848",
        family="fully_masked_attention_row",
        story="A padding position at the left sees only padding: its softmax has nothing to choose from, and is nan. "
        "In the next layer its keys are nan, and the mask is added: nan − inf is nan, so the softmax of every other "
        "position of that prompt is lost too. Every row needs one visible key, even a row that nobody reads.",
        difficulty=2,
    )
)


# -- pt-103749 -------------------------------------------------------------------------------------------------------
def read_passages():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    questions, passages = torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    found = torch.tensor([5, 0, 2])  # how many passages the search gave for each question

    def step():
        padding = torch.arange(5) >= found[:, None]
        read, _ = attention(questions, passages, passages, key_padding_mask=padding)
        loss = (questions + read).square().mean(dim=(1, 2))
        loss.mean().backward()
        return {"loss of each question": loss, "grad_norm": attention.out_proj.weight.grad.norm()}

    return step


def read_passages_fixed():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    questions, passages = torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    found = torch.tensor([5, 0, 2])

    def step():
        some = found > 0
        padding = torch.arange(5) >= found[some, None]
        part, _ = attention(questions[some], passages[some], passages[some], key_padding_mask=padding)
        read = torch.zeros_like(questions).index_put((some,), part)  # who found nothing has read nothing
        loss = (questions + read).square().mean(dim=(1, 2))
        loss.mean().backward()
        return {"loss of each question": loss, "grad_norm": attention.out_proj.weight.grad.norm()}

    return step


def read_passages_reference():
    """One question at a time, without padding, in float64."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    questions, passages = torch.randn(3, 4, 8).double(), torch.randn(3, 5, 8).double()
    attention, losses = attention.double(), []
    for question, texts, count in zip(questions, passages, [5, 0, 2], strict=True):
        read = attention(question, texts[:count], texts[:count])[0] if count else 0
        losses.append((question + read).square().mean())
    loss = torch.stack(losses)
    loss.mean().backward()
    return {"loss of each question": loss, "grad_norm": attention.out_proj.weight.grad.norm()}


CASES.append(
    Case(
        id="pt-103749",
        title="A search without a hit",
        symptom="My model reads passages that a search has found. Attention with a padding mask is fine for days, then "
        "one question of a batch has a loss of nan, and after that step so has everything.",
        broken=read_passages,
        fixed=read_passages_fixed,
        reference=read_passages_reference,
        cause="masked_row",
        phase="forward",
        line="read, _ = attention(questions, passages, passages, key_padding_mask=padding)",
        link="https://github.com/pytorch/pytorch/issues/103749",
        family="fully_masked_attention_row",
        story="The search found nothing, so the mask hides every key of that row and its softmax is 0/0. Newer torch "
        "returns zeros in some attention kernels, not in all. Decide what reading nothing means before attention is "
        "called. (A score has six rows, two heads for each of three questions: rows 2 and 3 are question 1.)",
        difficulty=1,
    )
)


# -- transformers-47511 ----------------------------------------------------------------------------------------------
def sample_last_token():
    from transformers import ForcedEOSTokenLogitsProcessor, LogitsProcessorList, SuppressTokensLogitsProcessor

    ids, scores, eos = torch.tensor([[5, 8, 3, 6], [1, 4, 4, 7]]), torch.randn(2, 10), 2
    processors = LogitsProcessorList(
        [
            ForcedEOSTokenLogitsProcessor(max_length=5, eos_token_id=eos, device="cpu"),
            SuppressTokensLogitsProcessor([0, 1, eos], device="cpu"),  # no special tokens in the text
        ]
    )

    def step():
        allowed = processors(ids, scores)
        probabilities = torch.softmax(allowed, dim=-1)
        return {"next": torch.multinomial(probabilities, 1)[:, 0]}

    return step


def sample_last_token_fixed():
    from transformers import ForcedEOSTokenLogitsProcessor, LogitsProcessorList, SuppressTokensLogitsProcessor

    ids, scores, eos = torch.tensor([[5, 8, 3, 6], [1, 4, 4, 7]]), torch.randn(2, 10), 2
    processors = LogitsProcessorList(
        [
            SuppressTokensLogitsProcessor([0, 1], device="cpu"),  # what is forced must not be forbidden
            ForcedEOSTokenLogitsProcessor(max_length=5, eos_token_id=eos, device="cpu"),
        ]
    )

    def step():
        return {"next": torch.multinomial(torch.softmax(processors(ids, scores), dim=-1), 1)[:, 0]}

    return step


CASES.append(
    Case(
        id="transformers-47511",
        title="Generation dies at its last token",
        symptom="Sampling works, but a text that reaches max_length ends in a RuntimeError about the probability "
        "tensor. The scores of the model are fine, I printed them.",
        broken=sample_last_token,
        fixed=sample_last_token_fixed,
        reference=lambda: {"next": torch.tensor([2, 2])},
        cause="masked_row",
        phase="forward",
        line="probabilities = torch.softmax(allowed, dim=-1)",
        link="https://github.com/huggingface/transformers/pull/47511",
        family="fully_masked_attention_row",
        story="At the last position one rule forbids every token but the end, and the next rule forbids the end. "
        "Nothing is left: the softmax of a row of −inf is nan. Each rule is right alone; look at what they leave "
        "together.",
        difficulty=1,
    )
)
