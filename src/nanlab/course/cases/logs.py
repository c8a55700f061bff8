"""Cases: logarithms, exponentials and roots at the edge of their domain."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanlab.course.cases.frame import Case

CASES: list[Case] = []


# -- trl-2564 --------------------------------------------------------------------------------------------------------
def orpo_step():
    chosen = torch.tensor([-0.7, 0.0], requires_grad=True)  # mean log-probs of one-word answers
    rejected = torch.tensor([-1.2, -2.5])

    def step():
        log_odds = chosen - torch.log1p(-torch.exp(chosen))
        log_odds = log_odds - (rejected - torch.log1p(-torch.exp(rejected)))
        loss = -F.logsigmoid(log_odds).mean()
        loss.backward()
        return {"loss": loss, "gradient": chosen.grad}

    return step


def orpo_step_fixed():
    chosen = torch.tensor([-0.7, 0.0], requires_grad=True)
    rejected = torch.tensor([-1.2, -2.5])

    def step():
        # σ(log-odds difference) written without 1 − p: the loss is softplus(r + log(1 − e^c) − c − log(1 − e^r)),
        # and log(1 − e^c) enters as a factor of an exponential, which is fine at 0.
        ratio = torch.expm1(chosen) / torch.expm1(rejected) * torch.exp(rejected - chosen)
        loss = torch.log1p(ratio).mean()
        loss.backward()
        return {"loss": loss, "gradient": chosen.grad}

    return step


def orpo_reference():
    """In float64, at a log-prob of −1e-12 instead of 0, with the slope by hand: d/dc log(1+q) = −q/((1−e^c)(1+q))."""
    c, r = torch.tensor([-0.7, -1e-12]).double(), torch.tensor([-1.2, -2.5]).double()
    q = torch.expm1(c) / torch.expm1(r) * torch.exp(r - c)
    return {"loss": torch.log1p(q).mean(), "gradient": q / (torch.expm1(c) * (1 + q)) / 2}


CASES.append(
    Case(
        id="trl-2564",
        title="ORPO on yes/no answers",
        symptom="My answers are one token, yes or no. Training with ORPO goes well until the model is good at it; then "
        "all weights are nan after a step whose loss was a perfectly normal number.",
        broken=orpo_step,
        fixed=orpo_step_fixed,
        reference=orpo_reference,
        cause="gradient_at_edge",
        phase="backward",
        line="log_odds = chosen - torch.log1p(-torch.exp(chosen))",
        link="https://github.com/huggingface/trl/issues/2564",
        family="log0_or_inf_times_0",
        story="A log-prob of exactly 0 means p = 1: log(1 − p) is −inf and its slope infinite. The sigmoid swallows the "
        "inf in the loss, the gradient keeps 0 · inf. A finite loss says nothing about its gradient.",
        difficulty=2,
    )
)
