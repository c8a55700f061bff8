"""Cases: adapters and their merges."""

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
