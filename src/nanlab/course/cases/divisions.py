"""Cases: a mean of nothing, a spread of zero, a division that should not happen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanlab.course.cases.frame import Case
from nanlab.course.materials import load_model

CASES: list[Case] = []


# -- verl-785 --------------------------------------------------------------------------------------------------------
def sft_step():
    hidden, targets = torch.randn(2, 6, 8), torch.randint(0, 10, (2, 6))
    prompt_lengths, max_length = torch.tensor([6, 9]), 6
    head = nn.Linear(8, 10)
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
    head = nn.Linear(8, 10)
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
    return {"weight norm": nn.Linear(8, 10).weight.double().square().sum().sqrt()}


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
        story="Truncation left a batch in which no token counts: 0/0 in the loss and, unlike the built-in "
        "cross-entropy, in every gradient too. One batch destroyed all weights. Skip what has nothing to "
        "teach, before the division.",
        difficulty=1,
    )
)


# -- pt-70348 --------------------------------------------------------------------------------------------------------
def two_micro_batches():
    head, x = nn.Linear(4, 3), torch.randn(2, 5, 4)
    targets = torch.tensor([[0, 2, 1, 1, 2], [-100, -100, -100, -100, -100]])

    def step():
        for features, labels in zip(x, targets, strict=True):
            loss = F.cross_entropy(head(features), labels)
            (loss / 2).backward()
            print(f"loss {loss:.4f}")
        return {"loss": loss, "grad_norm": head.weight.grad.norm()}

    return step


def two_micro_batches_fixed():
    head, x = nn.Linear(4, 3), torch.randn(2, 5, 4)
    targets = torch.tensor([[0, 2, 1, 1, 2], [-100, -100, -100, -100, -100]])

    def step():
        count = (targets != -100).sum().clamp(min=1)
        total = torch.zeros(())
        for features, labels in zip(x, targets, strict=True):
            loss = F.cross_entropy(head(features), labels, reduction="sum") / count
            loss.backward()
            total += loss.detach()
        return {"loss": total, "grad_norm": head.weight.grad.norm()}

    return step


def two_micro_batches_reference():
    """softmax − one-hot, averaged over the five targets that count, in float64."""
    torch.manual_seed(0)
    head, x = nn.Linear(4, 3).double(), torch.randn(2, 5, 4)[0].double()
    labels = torch.tensor([0, 2, 1, 1, 2])
    probabilities = torch.softmax(head(x), -1)
    slope = (probabilities - torch.eye(3).double()[labels]).T @ x / 5
    return {"loss": -probabilities[range(5), labels].log().mean(), "grad_norm": slope.square().sum().sqrt()}


CASES.append(
    Case(
        id="pt-70348",
        title="CrossEntropyLoss used to give 0 here",
        symptom="Since an upgrade the loss of some micro-batches is nan. In those all targets are the ignore_index. "
        "The old version gave 0, and nothing else has changed. My chart of the mean loss is gone.",
        broken=two_micro_batches,
        fixed=two_micro_batches_fixed,
        reference=two_micro_batches_reference,
        cause="empty_mean",
        phase="forward",
        line="loss = F.cross_entropy(head(features), labels)",
        link="https://github.com/pytorch/pytorch/issues/70348",
        family="empty_selection",
        story="The mean over no target is nan since torch 1.11, on purpose. Its gradient is still 0, so that the "
        "weights live; but the other micro-batch now counts half. Sum the losses and divide once by the number "
        "of targets.",
        difficulty=1,
    )
)


# -- instructlab-547 -------------------------------------------------------------------------------------------------
def accumulate_and_log():
    head, hidden = nn.Linear(8, 6), torch.randn(2, 5, 8)
    labels = torch.tensor([[-100, -100, 3, 1, 4], [-100, -100, -100, -100, -100]])

    def step():
        for number, (states, targets) in enumerate(zip(hidden, labels, strict=True)):
            log_probs = head(states).log_softmax(-1)
            per_token = -log_probs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
            tokens = int((targets != -100).sum())
            loss = (per_token * (targets != -100)).sum() / tokens
            loss.backward()
            print(f"step {68 + number}: loss {loss:.4f}, seconds for a token {0.25 / tokens:.4f}")
        return {"loss": loss}

    return step


def accumulate_and_log_fixed():
    head, hidden = nn.Linear(8, 6), torch.randn(2, 5, 8)
    labels = torch.tensor([[-100, -100, 3, 1, 4], [-100, -100, -100, -100, -100]])

    def step():
        total, tokens = torch.zeros(()), 0
        for states, targets in zip(hidden, labels, strict=True):
            kept = targets != -100
            if kept.any():  # nothing to learn, nothing to log
                loss = F.cross_entropy(head(states)[kept], targets[kept], reduction="sum")
                loss.backward()
                total, tokens = total + loss.detach(), tokens + int(kept.sum())
        return {"loss": total / tokens}

    return step


def accumulate_and_log_reference():
    torch.manual_seed(0)
    head, hidden = nn.Linear(8, 6).double(), torch.randn(2, 5, 8).double()
    logits = head(hidden[0, 2:])
    return {"loss": (logits.exp().sum(-1).log() - logits[range(3), [3, 1, 4]]).mean()}


CASES.append(
    Case(
        id="instructlab-547",
        title="It stops in the line that prints",
        symptom="Multi-GPU fine-tuning dies at step 69 with a ZeroDivisionError. The traceback points at the logging "
        "call, so I removed the print: now it goes on, and every loss is nan.",
        broken=accumulate_and_log,
        fixed=accumulate_and_log_fixed,
        reference=accumulate_and_log_reference,
        cause="empty_mean",
        phase="forward",
        line="loss = (per_token * (targets != -100)).sum() / tokens",
        link="https://github.com/instructlab/training/issues/547",
        family="empty_selection",
        story="Not one token of the micro-batch counts. A tensor divided by 0 is silently nan, and so are its "
        "gradients; only the division of two Python numbers raises. The crash came a line too late, and it was "
        "the luck.",
        difficulty=1,
    )
)


# -- axolotl-3026 ----------------------------------------------------------------------------------------------------
def context_parallel_loss():
    logits, labels = torch.randn(8, 6), torch.tensor([2, 0, 5, 1, -100, -100, -100, -100])
    ranks = 2

    def local_loss(rank):
        piece = slice(rank * len(labels) // ranks, (rank + 1) * len(labels) // ranks)
        kept = labels[piece] != -100
        per_token = F.cross_entropy(logits[piece], labels[piece], reduction="none")
        return per_token[kept].mean()

    def step():
        losses = torch.stack([local_loss(rank) for rank in range(ranks)])
        return {"eval_loss": losses.mean()}

    return step


def context_parallel_loss_fixed():
    logits, labels = torch.randn(8, 6), torch.tensor([2, 0, 5, 1, -100, -100, -100, -100])
    ranks = 2

    def local_sum_and_count(rank):
        piece = slice(rank * len(labels) // ranks, (rank + 1) * len(labels) // ranks)
        loss = F.cross_entropy(logits[piece], labels[piece], reduction="sum")
        return torch.stack([loss, (labels[piece] != -100).sum()])

    def step():
        loss, count = sum(local_sum_and_count(rank) for rank in range(ranks))  # what all_reduce does
        return {"eval_loss": loss / count}

    return step


def context_parallel_reference():
    torch.manual_seed(0)
    logits = torch.randn(8, 6).double()[:4]
    return {"eval_loss": (logits.exp().sum(-1).log() - logits[range(4), [2, 0, 5, 1]]).mean()}


CASES.append(
    Case(
        id="axolotl-3026",
        title="nan only with two ranks",
        symptom="The same configuration, the same data: eval_loss is fine on one GPU. With context parallelism over "
        "two it is nan. The training loss is fine on both.",
        broken=context_parallel_loss,
        fixed=context_parallel_loss_fixed,
        reference=context_parallel_reference,
        cause="empty_mean",
        phase="forward",
        line="return per_token[kept].mean()",
        link="https://github.com/axolotl-ai-cloud/axolotl/issues/3026",
        family="distributed",
        story="A long row is cut in pieces, one a rank. The piece with nothing but padding has a mean of nothing, "
        "and the mean over ranks spreads it. Reduce sums and counts over ranks; a mean of means is not even "
        "right when finite.",
        difficulty=2,
    )
)


# -- trl-1380 --------------------------------------------------------------------------------------------------------
def kto_step():
    policy, reference = torch.randn(4, requires_grad=True), torch.randn(4)
    kind = ["real", "real", "real", "real"]  # of each row: "real", or "kl" for a mismatched pair

    def step():
        log_ratio = policy - reference
        is_kl = torch.tensor([k == "kl" for k in kind])
        kl = log_ratio[is_kl].detach().mean().clamp(min=0)
        loss = (1 - torch.sigmoid(log_ratio[~is_kl] - kl)).mean()
        loss.backward()
        return {"loss": loss, "kl": kl}

    return step


def kto_step_fixed():
    policy, reference = torch.randn(4, requires_grad=True), torch.randn(4)
    mismatched = -torch.ones(4)  # a stream of its own: log-ratios of the prompts with other completions

    def step():
        kl = mismatched.mean().clamp(min=0)
        loss = (1 - torch.sigmoid(policy - reference - kl)).mean()
        loss.backward()
        return {"loss": loss, "kl": kl}

    return step


def kto_step_reference():
    torch.manual_seed(0)
    ratio = (torch.randn(4) - torch.randn(4)).double()
    return {"loss": (1 / (1 + ratio.exp())).mean(), "kl": 0.0}


CASES.append(
    Case(
        id="trl-1380",
        title="KTO, some batches",
        symptom="KTO training: kl and loss are nan in about one batch of sixteen, without a pattern that I can see. "
        "Larger batches make it rarer.",
        broken=kto_step,
        fixed=kto_step_fixed,
        reference=kto_step_reference,
        cause="empty_mean",
        phase="forward",
        line="kl = log_ratio[is_kl].detach().mean().clamp(min=0)",
        link="https://github.com/huggingface/trl/pull/1380",
        family="empty_selection",
        story="Examples for the KL estimate were shuffled among the others; a batch without one averages nothing. "
        "clamp lets nan through. What a step needs must be in every batch by construction, not by luck.",
        difficulty=1,
    )
)


# -- sentence-transformers-625 ---------------------------------------------------------------------------------------
def cosine_scores():
    vectors = torch.randn(6, 4)
    vectors[0] = 0  # row 0 stands for every word that is not in the table
    sentences = [[1, 2, 5], [0, 0], [3, 4]]

    def step():
        embedded = torch.stack([vectors[words].mean(0) for words in sentences])
        unit = embedded / embedded.norm(dim=1, keepdim=True)
        scores = unit @ unit.T
        return {"scores": scores}

    return step


def cosine_scores_fixed():
    vectors = torch.randn(6, 4)
    vectors[0] = 0
    sentences = [[1, 2, 5], [0, 0], [3, 4]]

    def step():
        embedded = torch.stack([vectors[words].mean(0) for words in sentences])
        unit = F.normalize(embedded, dim=1)  # x / max(|x|, 1e-12): a sentence without a word is like no other
        return {"scores": unit @ unit.T}

    return step


def cosine_reference():
    torch.manual_seed(0)
    vectors = torch.randn(6, 4).double()
    a, c = vectors[[1, 2, 5]].sum(0), vectors[[3, 4]].sum(0)
    between = (a * c).sum() / ((a * a).sum() * (c * c).sum()).sqrt()
    scores = torch.zeros(3, 3).double()
    scores[0, 0] = scores[2, 2] = 1
    scores[0, 2] = scores[2, 0] = between
    return {"scores": scores}


CASES.append(
    Case(
        id="sentence-transformers-625",
        title="A sentence like no other",
        symptom="I compare sentences by the mean of their word vectors. One of my sentences has a similarity of nan to "
        "all others, and to itself.",
        broken=cosine_scores,
        fixed=cosine_scores_fixed,
        reference=cosine_reference,
        cause="zero_over_zero",
        phase="forward",
        line="unit = embedded / embedded.norm(dim=1, keepdim=True)",
        link="https://github.com/huggingface/sentence-transformers/issues/625",
        family="zero_std_0_0",
        story="None of its words is in the table: the mean is the zero vector, and it has no direction. 0/0. Decide "
        "what such a row means (here: like nothing) and write that, or drop it.",
        difficulty=1,
    )
)


# -- trl-1053 --------------------------------------------------------------------------------------------------------
def collate(rows, marker, max_length):
    ids = torch.tensor([row[:max_length] + [1] * (max_length - len(row)) for row in rows])
    labels = torch.full_like(ids, -100)
    for row, target in zip(ids, labels, strict=True):
        places = (row == marker).nonzero()
        if len(places):
            target[places[0] + 1 :] = row[places[0] + 1 :]
    return ids, labels


def evaluate_answers():
    model, marker = load_model("tiny")[0], 9
    rows = [[20, 21, marker, 30, 31], [22, marker, 32], [23, 24, 25, 26, 27, 28, marker, 33], [marker, 34, 35]]

    @torch.no_grad()
    def step():
        losses = []
        for row in rows:
            ids, labels = collate([row], marker, max_length=6)
            logits = model(input_ids=ids).logits
            losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
            print(f"eval batch {len(losses)}: loss {losses[-1]:.4f}")
        return {"eval_loss": torch.stack(losses).mean()}

    return step


def evaluate_answers_fixed():
    model, marker = load_model("tiny")[0], 9
    rows = [[20, 21, marker, 30, 31], [22, marker, 32], [23, 24, 25, 26, 27, 28, marker, 33], [marker, 34, 35]]

    @torch.no_grad()
    def step():
        loss, count = 0.0, 0
        for row in rows:
            ids, labels = collate([row], marker, max_length=6)
            targets = labels[:, 1:].flatten()
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            loss += F.cross_entropy(logits, targets, reduction="sum")
            count += (targets != -100).sum()
        return {"eval_loss": loss / count}

    return step


def evaluate_answers_reference():
    """The log-probs of every token behind the marker, one by one, from the model in float64."""
    model, total, count = load_model("tiny")[0].double(), 0.0, 0
    with torch.no_grad():
        for row, start in (([20, 21, 9, 30, 31, 1], 3), ([22, 9, 32, 1, 1, 1], 2), ([9, 34, 35, 1, 1, 1], 1)):
            probabilities = torch.softmax(model(input_ids=torch.tensor([row])).logits[0], -1)
            for place in range(start, 6):
                total, count = total - probabilities[place - 1, row[place]].log(), count + 1
    return {"eval_loss": total / count}


CASES.append(
    Case(
        id="trl-1053",
        title="Only eval_loss is nan",
        symptom="SFT with a response marker so that only the answers count. The training loss is healthy, eval_loss is "
        "nan at every evaluation.",
        broken=evaluate_answers,
        fixed=evaluate_answers_fixed,
        reference=evaluate_answers_reference,
        parts=(collate,),
        cause="empty_mean",
        phase="forward",
        line="losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))",
        link="https://github.com/huggingface/trl/issues/1053",
        family="empty_selection",
        story="Truncation cut the marker off one row, so that the collator masked the row whole: a mean of nothing. "
        "In training the logging filter hides the same thing. Count the rows without any label before you "
        "train.",
        difficulty=2,
    )
)


# -- balanced-loss-12 ------------------------------------------------------------------------------------------------
def class_balanced_loss():
    logits, labels = torch.randn(5, 4, requires_grad=True), torch.tensor([3, 0, 3, 0, 1])
    samples_per_class = torch.tensor([310.0, 17.0, 0.0, 725.0])

    def step():
        effective = (1 - 0.999**samples_per_class) / (1 - 0.999)
        weights = 1 / effective
        weights = weights / weights.sum() * len(weights)
        loss = F.cross_entropy(logits, labels, weight=weights)
        loss.backward()
        return {"loss": loss}

    return step


def class_balanced_loss_fixed():
    logits, labels = torch.randn(5, 4, requires_grad=True), torch.tensor([3, 0, 3, 0, 1])
    samples_per_class = torch.tensor([310.0, 17.0, 0.0, 725.0])

    def step():
        seen = samples_per_class > 0  # a class without a sample has no say in the loss, and no weight
        effective = (1 - 0.999 ** samples_per_class[seen]) / (1 - 0.999)
        weights = torch.zeros(4)
        weights[seen] = 1 / effective
        loss = F.cross_entropy(logits, labels, weight=weights / weights.sum() * len(weights))
        loss.backward()
        return {"loss": loss}

    return step


def class_balanced_loss_reference():
    """The weighted mean by hand, in float64; a common factor of the weights cancels."""
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 4).double(), [3, 0, 3, 0, 1]
    weight = {k: 1 / (1 - 0.999**n) for k, n in {0: 310, 1: 17, 3: 725}.items()}
    losses = [logits[i].exp().sum().log() - logits[i, k] for i, k in enumerate(labels)]
    return {"loss": sum(weight[k] * x for k, x in zip(labels, losses, strict=True)) / sum(weight[k] for k in labels)}


CASES.append(
    Case(
        id="balanced-loss-12",
        title="A dry run on a tenth of the data",
        symptom="With all the data the class-balanced loss is fine. On a sample of it, for a quick try, the loss is "
        "nan from the first batch on. The labels in the sample are all valid.",
        broken=class_balanced_loss,
        fixed=class_balanced_loss_fixed,
        reference=class_balanced_loss_reference,
        cause="division_by_zero",
        phase="forward",
        line="weights = 1 / effective",
        link="https://github.com/fcakyon/balanced-loss/pull/12",
        family="division_by_count",
        tolerance=1e-4,
        story="One class does not occur in the sample: its weight is 1/0 = inf, and normalising makes nan, inf/inf, "
        "of it and 0 of all others. A count can be 0; say what a class without a sample weighs.",
        difficulty=1,
    )
)


# -- stable-baselines3-325 -------------------------------------------------------------------------------------------
def normalised_minibatches():
    policy = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    observations, actions, advantages = torch.randn(9, 3), torch.randint(2, (9,)), torch.randn(9)

    def step():
        for picked in torch.arange(9).split(4):
            adv = advantages[picked]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            log_probs = F.log_softmax(policy(observations[picked]), -1).gather(-1, actions[picked, None])[:, 0]
            loss = -(adv * log_probs).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"policy loss {loss:.4f}")
        return {"loss": loss, "weight": policy.weight}

    return step


def normalised_minibatches_fixed():
    policy = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    observations, actions, advantages = torch.randn(9, 3), torch.randint(2, (9,)), torch.randn(9)

    def step():
        for picked in torch.arange(9).split(4):
            if len(picked) < 2:  # one number has no spread: there is nothing to compare it with
                continue
            adv = advantages[picked]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            log_probs = F.log_softmax(policy(observations[picked]), -1).gather(-1, actions[picked, None])[:, 0]
            loss = -(adv * log_probs).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"weight": policy.weight}

    return step


def normalised_minibatches_reference():
    """Two steps by hand, in float64: the slope of −a · log softmax is a · (p − one-hot)."""
    torch.manual_seed(0)
    policy = nn.Linear(3, 2).double()
    weight, bias = policy.weight.detach(), policy.bias.detach()
    x, actions, advantages = torch.randn(9, 3).double(), torch.randint(2, (9,)), torch.randn(9).double()
    for rows in (slice(0, 4), slice(4, 8)):
        a = advantages[rows] - advantages[rows].mean()
        a = a / (a.square().sum() / 3).sqrt()
        error = a[:, None] * (torch.softmax(x[rows] @ weight.T + bias, -1) - torch.eye(2).double()[actions[rows]])
        weight, bias = weight - 0.1 * error.T @ x[rows] / 4, bias - 0.1 * error.mean(0)
    return {"weight": weight}


CASES.append(
    Case(
        id="stable-baselines3-325",
        title="nan at the end of the epoch",
        symptom="PPO with a rollout buffer of odd size. All minibatches of the epoch are fine, the very last one has a "
        "loss of nan, and with it the policy is gone. There is an eps in the denominator.",
        broken=normalised_minibatches,
        fixed=normalised_minibatches_fixed,
        reference=normalised_minibatches_reference,
        cause="zero_over_zero",
        phase="forward",
        op="std",
        line="adv = (adv - adv.mean()) / (adv.std() + 1e-8)",
        link="https://github.com/DLR-RM/stable-baselines3/issues/325",
        family="zero_std_0_0",
        story="The last minibatch has one element. std divides by n − 1 = 0, so it is 0/0 before any eps is added. "
        "Drop the remainder, or leave a group of one as it is.",
        difficulty=2,
    )
)
