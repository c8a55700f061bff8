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
        symptom="KTO on two GPUs: the loss falls as it should and samples get better, but rewards/chosen is nan in every "
        "other log line.",
        broken=kto_metrics,
        fixed=kto_metrics_fixed,
        reference=kto_reference,
        cause="empty_mean",
        phase="forward",
        line="per_rank = torch.stack([c.mean() for c in chosen])",
        link="https://github.com/huggingface/trl/pull/1386",
        family="metric_only",
        story="One rank had no desirable example: its mean is a mean of nothing, and the mean over ranks is nan. The "
        "weights never saw it. Gather sums and counts, divide once.",
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
        link="https://github.com/huggingface/trl/issues/6668",
        family="logging_filter",
        trap="finite and wrong",
        story="max_length cut off every completion: all labels are -100 and each loss is nan. logging_nan_inf_filter "
        "replaces a nan with the running mean, which is 0.0 as long as nothing finite was seen. A 0.0 is no success.",
        difficulty=2,
    )
)
