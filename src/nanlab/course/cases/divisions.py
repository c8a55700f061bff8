"""Cases: a mean of nothing, a spread of zero, a division that should not happen."""

from __future__ import annotations

import torch

from nanlab.course.cases.frame import Case

CASES: list[Case] = []


# -- verl-785 --------------------------------------------------------------------------------------------------------
def sft_step():
    hidden, targets = torch.randn(2, 6, 8), torch.randint(0, 10, (2, 6))
    prompt_lengths, max_length = torch.tensor([6, 9]), 6
    head = torch.nn.Linear(8, 10)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    def step():
        mask = (torch.arange(max_length) >= prompt_lengths[:, None]).float()
        log_probs = head(hidden).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
        loss = -(log_probs * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "weight norm": head.weight.norm()}

    return step


def sft_step_fixed():
    hidden, targets = torch.randn(2, 6, 8), torch.randint(0, 10, (2, 6))
    prompt_lengths, max_length = torch.tensor([6, 9]), 6
    head = torch.nn.Linear(8, 10)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    def step():
        mask = (torch.arange(max_length) >= prompt_lengths[:, None]).float()
        log_probs = head(hidden).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
        count = mask.sum()
        if count > 0:  # a batch without a target teaches nothing: no step
            loss = -(log_probs * mask).sum() / count
            loss.backward()
            optimizer.step()
        return {"weight norm": head.weight.norm()}

    return step


def sft_reference():
    """The weights as they were: there is nothing to learn from this batch."""
    torch.manual_seed(0)
    torch.randn(2, 6, 8), torch.randint(0, 10, (2, 6))
    return {"weight norm": torch.nn.Linear(8, 10).weight.double().square().sum().sqrt()}


CASES.append(
    Case(
        id="verl-785",
        title="One iteration, and the model only says !!!",
        symptom="SFT runs fine for hours. At one step, always the same, the loss is nan; from then on the model writes "
        "nothing but exclamation marks, whatever the prompt.",
        broken=sft_step,
        fixed=sft_step_fixed,
        reference=sft_reference,
        cause="empty_mean",
        phase="forward",
        line="loss = -(log_probs * mask).sum() / mask.sum()",
        link="https://github.com/verl-project/verl/issues/785",
        family="empty_selection",
        story="Truncation left a batch in which no token counts: 0/0 in the loss and, unlike the built-in cross-entropy, "
        "in every gradient too. One batch destroyed all weights. Skip what has nothing to teach, before the division.",
        difficulty=1,
    )
)
