"""Cases: what a trainer's log leaves out."""

from __future__ import annotations

import math

import torch
from torch import nn

from nanlab.course.cases.frame import Case
from nanlab.course.cases.helpers import InOrder, trainer

CASES: list[Case] = []


# -- trl-6702 --------------------------------------------------------------------------------------------------------
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, input_ids, completion_mask, reward):
        log_probs = self.head(self.embed(input_ids)).log_softmax(-1)
        chosen = log_probs[:, :-1].gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        mask = completion_mask[:, 1:]
        score = (chosen * mask).sum(-1) / mask.sum(-1)
        return {"loss": -(reward * score).mean()}


def sampled_rows(lengths):
    ids = torch.randint(0, 12, (len(lengths), 6)).tolist()
    masks = [[0] * (6 - n) + [1] * n for n in lengths]
    rewards = torch.rand(len(lengths)).tolist()
    return [{"input_ids": i, "completion_mask": m, "reward": r} for i, m, r in zip(ids, masks, rewards, strict=True)]


def sampled_training():
    rows = sampled_rows(lengths=[3, 4, 2, 3, 4, 4, 2, 3, 3, 3, 0, 4, 3, 2, 4, 3])
    run = trainer(Policy(), InOrder(rows), max_steps=8, logging_steps=4)

    def step():
        result = run.train()
        log = [{key: entry[key] for key in ("loss", "step")} for entry in run.state.log_history if "loss" in entry]
        return {"log": log, "train_loss": result.training_loss}

    return step


def sampled_training_fixed():
    rows = sampled_rows(lengths=[3, 4, 2, 3, 4, 4, 2, 3, 3, 3, 0, 4, 3, 2, 4, 3])
    rows = [row for row in rows if any(row["completion_mask"])]  # an answer without a token teaches nothing
    run = trainer(Policy(), InOrder(rows), max_steps=7, logging_steps=4)

    def step():
        result = run.train()
        log = [{key: entry[key] for key in ("loss", "step")} for entry in run.state.log_history if "loss" in entry]
        return {"log": log, "train_loss": result.training_loss}

    return step


def sampled_training_reference():
    """Seven steps of AdamW in a loop of our own, in float64, row by row."""
    torch.manual_seed(0)
    rows = sampled_rows(lengths=[3, 4, 2, 3, 4, 4, 2, 3, 3, 3, 0, 4, 3, 2, 4, 3])
    model = Policy().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    rows, losses = [row for row in rows if sum(row["completion_mask"])], []
    for n in range(7):
        optimizer.param_groups[0]["lr"], loss = 5e-5 * (1 - n / 7), 0.0
        for row in rows[2 * n : 2 * n + 2]:
            ids, start = row["input_ids"], 6 - sum(row["completion_mask"])
            logits = model.head(model.embed(torch.tensor(ids[start - 1 : -1])))
            picked = logits[range(6 - start), ids[start:]] - logits.exp().sum(-1).log()
            loss = loss - row["reward"] * picked.mean() / len(rows[2 * n : 2 * n + 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"train_loss": torch.stack(losses).mean()}


CASES.append(
    Case(
        id="trl-6702",
        title="The loss falls",
        symptom="The loss in the log of my run falls, line by line. The model at the end writes one and the same token "
        "for ever, and a look into the checkpoint shows weights that are not numbers. When did that happen?",
        broken=sampled_training,
        fixed=sampled_training_fixed,
        reference=sampled_training_reference,
        parts=(Policy, sampled_rows),
        cause="empty_mean",
        phase="forward",
        line="score = (chosen * mask).sum(-1) / mask.sum(-1)",
        link="https://github.com/huggingface/trl/issues/6702",
        family="logging_filter",
        trap="finite and wrong",
        story="One answer was empty: the mean of its log-probs is 0/0, at step 6 of 8. The trainer adds a share of the "
        "sum since the last entry, sum / (steps + 1), in place of each nan, while backward and the optimizer use the "
        "nan. Set logging_nan_inf_filter=False, and look at grad_norm, which nothing filters.",
        difficulty=3,
    )
)


# -- hf-13758 --------------------------------------------------------------------------------------------------------
def log_losses():
    losses = [2.1, 2.0, 1.9, 1.9, float("nan"), 1.8, 1.7, 1.7, 1.6, float("nan")]
    logging_steps = 5

    def step():
        total, last_logged, log = 0.0, 0, []
        for done, loss in enumerate(losses):
            if math.isfinite(loss):
                total += loss
            else:
                total += total / 1 + done - last_logged
            if (done + 1) % logging_steps == 0:
                log.append({"loss": total / logging_steps, "step": done + 1})
                total, last_logged = 0.0, done + 1
        return {"log": log, "last logged loss": log[-1]["loss"]}

    return step


def log_losses_fixed():
    losses = [2.1, 2.0, 1.9, 1.9, float("nan"), 1.8, 1.7, 1.7, 1.6, float("nan")]
    logging_steps = 5

    def step():
        kept, left_out, log = [], 0, []
        for done, loss in enumerate(losses):
            kept, left_out = ([*kept, loss], left_out) if math.isfinite(loss) else (kept, left_out + 1)
            if (done + 1) % logging_steps == 0:  # the mean of what there is, and how much is missing
                mean = sum(kept) / len(kept) if kept else math.nan
                log.append({"loss": mean, "left out": left_out, "step": done + 1})
                kept, left_out = [], 0
        return {"log": log, "last logged loss": log[-1]["loss"]}

    return step


CASES.append(
    Case(
        id="hf-13758",
        title="The loss that doubled in the log",
        symptom="Losses printed by hand fall from 2.1 to 1.6, with a nan here and there that I know of. The trainer's "
        "log, which leaves nan out, says more than 3. Who is right?",
        broken=log_losses,
        fixed=log_losses_fixed,
        reference=lambda: {"last logged loss": torch.tensor([1.8, 1.7, 1.7, 1.6]).double().mean()},
        phase="forward",
        line="total += total / 1 + done - last_logged",
        link="https://github.com/huggingface/transformers/issues/13758",
        family="logging_filter",
        trap="finite and wrong",
        tool="none: compare with a reference",
        lesson="09_guard",
        story="A share of the sum so far should stand in for a nan: total / (1 + done − last_logged). Without the "
        "brackets the number of steps is added to the loss. Code that handles nan runs rarely and is tested rarely; "
        "better to leave the nan out and count it.",
        difficulty=3,
    )
)
