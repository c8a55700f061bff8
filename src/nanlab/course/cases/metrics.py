"""Cases: the training is fine, or looks fine, and the number in the log is not what it says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanlab.course.cases.frame import Case
from nanlab.course.cases.helpers import trainer

CASES: list[Case] = []


# -- trl-1386 --------------------------------------------------------------------------------------------------------
def kto_metrics():
    rewards = [torch.tensor([0.4, 0.1, 0.7]), torch.tensor([-0.2, 0.3])]  # one tensor for each rank
    desirable = [torch.tensor([True, False, True]), torch.tensor([False, False])]

    def step():
        chosen = [r[d] for r, d in zip(rewards, desirable, strict=True)]
        per_rank = torch.stack([c.mean() for c in chosen])
        loss = torch.cat([1 - torch.sigmoid(r) for r in rewards]).mean()
        return {"loss": loss, "rewards/chosen": per_rank.mean()}

    return step


def kto_metrics_fixed():
    rewards = [torch.tensor([0.4, 0.1, 0.7]), torch.tensor([-0.2, 0.3])]
    desirable = [torch.tensor([True, False, True]), torch.tensor([False, False])]

    def step():
        sums = torch.stack([r[d].sum() for r, d in zip(rewards, desirable, strict=True)])
        counts = torch.stack([d.sum() for d in desirable])
        loss = torch.cat([1 - torch.sigmoid(r) for r in rewards]).mean()
        return {"loss": loss, "rewards/chosen": sums.sum() / counts.sum()}

    return step


def kto_reference():
    values = torch.tensor([0.4, 0.1, 0.7, -0.2, 0.3]).double()
    return {"loss": (1 / (1 + values.exp())).mean(), "rewards/chosen": (0.4 + 0.7) / 2}


CASES.append(
    Case(
        id="trl-1386",
        title="KTO learns, and its chart has holes",
        symptom="KTO on two GPUs: the loss falls as it should, but rewards/chosen is nan in every other log line. I "
        "keep the checkpoint in which it is highest, and so I keep none.",
        broken=kto_metrics,
        fixed=kto_metrics_fixed,
        reference=kto_reference,
        cause="empty_mean",
        phase="forward",
        line="per_rank = torch.stack([c.mean() for c in chosen])",
        link="https://github.com/huggingface/trl/pull/1386",
        family="metric_only",
        story="One rank had no desirable example: its mean is a mean of nothing, and the mean over ranks is nan. The "
        "weights never saw it, the choice of a checkpoint did. Gather sums and counts, divide once.",
        difficulty=1,
    )
)


# -- trl-6668 --------------------------------------------------------------------------------------------------------
class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def prompt_and_completion(max_length):
    ids, prompt_length = [1, 2, 3, 4, 5, 6, 7, 8], 5
    labels = [-100] * prompt_length + ids[prompt_length:]
    return [{"input_ids": ids[:max_length], "labels": labels[:max_length]}] * 6


def completion_only():
    run = trainer(LanguageModel(), prompt_and_completion(max_length=4), max_steps=3, learning_rate=1e-2)

    def step():
        result = run.train()
        return {"log": run.state.log_history, "train_loss": result.training_loss}

    return step


def completion_only_fixed():
    run = trainer(LanguageModel(), prompt_and_completion(max_length=8), max_steps=3, learning_rate=0.0)

    def step():
        result = run.train()
        return {"log": run.state.log_history, "train_loss": result.training_loss}

    return step


def completion_only_reference():
    """The learning rate is 0, so that every step has the loss of the fresh model, here in float64."""
    torch.manual_seed(0)
    model = LanguageModel().double()
    probabilities = torch.softmax(model.head(model.embed(torch.tensor([5, 6, 7]))), -1)
    return {"train_loss": -probabilities[[0, 1, 2], [6, 7, 8]].log().mean()}


CASES.append(
    Case(
        id="trl-6668",
        title="A perfect loss",
        symptom="SFT on completions only. The loss is 0.0 from the first step to the last and the run ends without a "
        "complaint; the model is what it was before.",
        broken=completion_only,
        fixed=completion_only_fixed,
        reference=completion_only_reference,
        parts=(LanguageModel, prompt_and_completion),
        cause="empty_mean",
        phase="forward",
        line="loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
        also=(
            (
                "empty_mean",
                "forward",
                "run = trainer(LanguageModel(), prompt_and_completion(max_length=4), max_steps=3, learning_rate=1e-2)",
            ),
        ),
        link="https://github.com/huggingface/trl/issues/6668",
        family="logging_filter",
        trap="finite and wrong",
        story="max_length cut off every completion: all labels are -100 and each loss is nan. logging_nan_inf_filter "
        "replaces a nan with a share of the sum since the last entry, which is 0.0 as long as nothing finite was added "
        "to it. A 0.0 is no success.",
        difficulty=2,
    )
)


# -- trl-5775 --------------------------------------------------------------------------------------------------------
def group_advantages():
    nan = float("nan")  # a reward function had nothing to say about this completion
    per_function = torch.tensor([[0.9, 0.8], [0.7, nan], [nan, nan], [0.8, 0.6]])

    def step():
        rewards = per_function.nansum(1)
        spread = rewards.std() + 1e-4
        return {"advantages": (rewards - rewards.mean()) / spread}

    return step


def group_advantages_fixed():
    nan = float("nan")
    per_function = torch.tensor([[0.9, 0.8], [0.7, nan], [nan, nan], [0.8, 0.6]])

    def step():
        scored = ~per_function.isnan().all(1)
        rewards = per_function.nansum(1)
        known = rewards[scored]
        advantages = torch.zeros(len(rewards))  # nothing is known about the rest: no push, in either direction
        advantages[scored] = (known - known.mean()) / (known.std() + 1e-4)
        return {"advantages": advantages}

    return step


def group_advantages_reference():
    """By hand, over the three completions that have a reward."""
    rewards = [1.7, 0.7, 1.4]
    mean = sum(rewards) / 3
    spread = (sum((r - mean) ** 2 for r in rewards) / 2) ** 0.5
    one, two, four = ((r - mean) / (spread + 1e-4) for r in rewards)
    return {"advantages": torch.tensor([one, two, 0.0, four])}


CASES.append(
    Case(
        id="trl-5775",
        title="No opinion",
        symptom="My reward functions return None where they cannot judge. Training is stable, without any nan. But the "
        "model unlearns the kind of answer that none of them can judge.",
        broken=group_advantages,
        fixed=group_advantages_fixed,
        reference=group_advantages_reference,
        phase="forward",
        line="rewards = per_function.nansum(1)",
        link="https://github.com/huggingface/trl/pull/5775",
        family="dirty_data",
        trap="finite and wrong",
        tool="none: compare with a reference",
        lesson="02_zero_std",
        story="The sum over nothing is 0, so a completion without any reward counts as the worst of its group. "
        "Missing is not 0: leave it out of mean and spread, and give it no advantage. TRL 1.16 does so.",
        difficulty=3,
    )
)


# -- trl-4501 --------------------------------------------------------------------------------------------------------
def two_tasks():
    nan = float("nan")
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -1.5], requires_grad=True)
    per_function = torch.tensor([[0.2, nan], [0.9, nan], [nan, 0.4], [nan, 0.8]])  # each task has its own function

    def step():
        rewards = per_function.nansum(1)
        advantages = rewards - rewards.view(2, 2).mean(1).repeat_interleave(2)
        loss = -(advantages * log_probs).mean()
        loss.backward()
        for name, column in zip(("math", "code"), per_function.T, strict=True):
            print(f"rewards/{name}/mean: {column.mean():.4f}")
        return {"loss": loss, "gradient": log_probs.grad}

    return step


def two_tasks_fixed():
    nan = float("nan")
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -1.5], requires_grad=True)
    per_function = torch.tensor([[0.2, nan], [0.9, nan], [nan, 0.4], [nan, 0.8]])

    def step():
        rewards = per_function.nansum(1)
        advantages = rewards - rewards.view(2, 2).mean(1).repeat_interleave(2)
        loss = -(advantages * log_probs).mean()
        loss.backward()
        for name, column in zip(("math", "code"), per_function.T, strict=True):
            print(f"rewards/{name}/mean: {column.nanmean():.4f}")  # only the chart was wrong
        return {"loss": loss, "gradient": log_probs.grad}

    return step


def two_tasks_reference():
    """By hand: advantages ∓0.35 and ∓0.2."""
    advantages = torch.tensor([-0.35, 0.35, -0.2, 0.2]).double()
    return {"loss": -(advantages * torch.tensor([-1.0, -2.0, -0.5, -1.5])).mean(), "gradient": -advantages / 4}


CASES.append(
    Case(
        id="trl-4501",
        title="Every reward is nan",
        symptom="GRPO on two tasks, each with a reward function that returns None for the other's prompts. Both reward "
        "curves are nan at every step. Should I stop the run?",
        broken=two_tasks,
        fixed=two_tasks_fixed,
        reference=two_tasks_reference,
        cause="bad_input",
        phase="data",
        line='print(f"rewards/{name}/mean: {column.mean():.4f}")',
        also=(
            (
                "bad_input",
                "data",
                "per_function = torch.tensor([[0.2, nan], [0.9, nan], [nan, 0.4], [nan, 0.8]])"
                "  # each task has its own function",
            ),
            ("bad_input", "data", "rewards = per_function.nansum(1)"),
        ),
        link="https://github.com/huggingface/trl/issues/4501",
        family="metric_only",
        trap="NaN and harmless",
        story="The nan is a mark for 'not mine', the sum that is trained on leaves it out, and every sample has a "
        "reward. Only the mean for the chart does not. Ask of each nan whether it reaches the weights.",
        difficulty=2,
    )
)


# -- nemo-rl-4161 ----------------------------------------------------------------------------------------------------
def leave_one_out():
    rewards = torch.tensor([0.35, 0.35, 0.35, 0.35, 0.35, 0.35, 0.35, 0.95])

    def step():
        mean = (sum(rewards) - rewards) / 7  # of the other seven
        variance = (sum(rewards**2) - rewards**2) / 7 - mean**2
        spread = variance.clamp(min=0).sqrt()
        advantages = rewards - mean
        return {"advantages": torch.where(spread > 0, advantages / spread, advantages)}

    return step


def leave_one_out_fixed():
    rewards = torch.tensor([0.35, 0.35, 0.35, 0.35, 0.35, 0.35, 0.35, 0.95])

    def step():
        others = torch.stack([torch.cat([rewards[:i], rewards[i + 1 :]]) for i in range(8)])
        mean, equal = others.mean(1), others.amax(1) == others.amin(1)
        spread = others.std(1, correction=0)
        advantages = rewards - mean
        return {"advantages": torch.where(equal, advantages, advantages / torch.where(equal, 1.0, spread))}

    return step


def leave_one_out_reference():
    """By hand in float64: the others of the last are all equal, so its advantage is 0.95 − 0.35 undivided."""
    seven = [0.35] * 6 + [0.95]
    mean = sum(seven) / 7
    spread = (sum((r - mean) ** 2 for r in seven) / 7) ** 0.5
    return {"advantages": torch.tensor([(0.35 - mean) / spread] * 7 + [0.95 - 0.35])}


CASES.append(
    Case(
        id="nemo-rl-4161",
        title="An advantage of thousands",
        symptom="Most groups are fine. When seven of eight samples have the same reward, one advantage is in the "
        "thousands and the step ruins the policy. I do guard against a spread of 0.",
        broken=leave_one_out,
        fixed=leave_one_out_fixed,
        reference=leave_one_out_reference,
        phase="forward",
        line="variance = (sum(rewards**2) - rewards**2) / 7 - mean**2",
        also=(("", "forward", 'return {"advantages": torch.where(spread > 0, advantages / spread, advantages)}'),),
        link="https://github.com/NVIDIA-NeMo/RL/pull/4161",
        family="zero_std_0_0",
        trap="finite and wrong",
        tool="none: compare with a reference",
        lesson="02_zero_std",
        story="The mean of squares minus the square of the mean leaves rounding noise where the spread is 0, and the "
        "guard lets noise pass. Ask whether the values are equal, not whether a difference came out as exactly "
        "0.",
        difficulty=3,
    )
)
