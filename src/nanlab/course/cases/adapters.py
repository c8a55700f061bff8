"""Cases: adapters, merges, buffers: what a model is made of, before any training."""

from __future__ import annotations

import torch

from nanlab.course.cases.frame import Case

CASES: list[Case] = []


# -- peft-3530 -------------------------------------------------------------------------------------------------------
def merge_step():
    base, deltas = torch.randn(4, 4), torch.randn(2, 4, 4)
    weights, density = torch.tensor([0.6, 0.4]), 0.0

    def step():
        kept = torch.bernoulli(torch.full_like(deltas, density))
        rescaled = deltas * kept / density
        return base + (weights[:, None, None] * rescaled).sum(0)

    return step


def merge_step_fixed():
    base, deltas = torch.randn(4, 4), torch.randn(2, 4, 4)
    weights, density = torch.tensor([0.6, 0.4]), 0.0

    def step():
        kept = torch.bernoulli(torch.full_like(deltas, density))
        rescaled = deltas * kept / density if density > 0 else torch.zeros_like(deltas)
        return base + (weights[:, None, None] * rescaled).sum(0)

    return step


def merge_reference():
    """With nothing kept, the merge is the base."""
    torch.manual_seed(0)
    return torch.randn(4, 4)


CASES.append(
    Case(
        id="peft-3530",
        title="A merged adapter that is not a number",
        symptom="I sweep the density of a DARE merge from 0 to 1. At the first value every weight of the merged "
        "adapter is nan, without any error. The documentation says 0 is allowed.",
        broken=merge_step,
        fixed=merge_step_fixed,
        reference=merge_reference,
        cause="zero_over_zero",
        phase="forward",
        line="rescaled = deltas * kept / density",
        link="https://github.com/huggingface/peft/pull/3530",
        family="adapter_0_0",
        story="Survivors are scaled up by 1/density so that their sum stays the same; with no survivor this is 0/0. "
        "An end of an allowed range is an input like any other: test it.",
        difficulty=1,
    )
)


# -- gpt-neox-1003 ---------------------------------------------------------------------------------------------------
class Rotary(torch.nn.Module):
    def __init__(self, size=32, base=10000):
        super().__init__()
        frequencies = base ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions):
        angles = positions[:, None].to(self.frequencies) * self.frequencies
        return angles.cos()


def rotary_in_half():
    model, positions = Rotary().half(), torch.tensor([1, 100, 1857])

    def step():
        return {"cos": model(positions)[:, :3].float()}

    return step


def rotary_in_half_fixed():
    model, positions = Rotary(), torch.tensor([1, 100, 1857])

    def step():  # the angles in float32; only the cosines are rounded
        return {"cos": model(positions)[:, :3].half().float()}

    return step


def rotary_reference():
    frequencies = torch.tensor([10000 ** (-2 * i / 32) for i in range(3)], dtype=torch.float64)
    return {"cos": (torch.tensor([1.0, 100, 1857]).double()[:, None] * frequencies).cos()}


CASES.append(
    Case(
        id="gpt-neox-1003",
        title="Long prompts are worse in half precision",
        symptom="model.half() is fine on short prompts. On long ones the perplexity is far worse than in float32. "
        "There is no nan anywhere, I have checked every tensor.",
        broken=rotary_in_half,
        fixed=rotary_in_half_fixed,
        reference=rotary_reference,
        parts=(Rotary,),
        phase="forward",
        line="angles = positions[:, None].to(self.frequencies) * self.frequencies",
        link="https://github.com/EleutherAI/gpt-neox/issues/1003",
        family="bad_buffer",
        trap="finite and wrong",
        tool="none: compare with a reference",
        lesson="06_fp16_overflow",
        tolerance=1e-3,
        story="half() also converts the buffer, and angles of a thousand radians are then rounded to whole ones: the "
        "cosines of far positions are noise. Finite is not right. Keep angles in float32, round the result.",
        difficulty=3,
    )
)
