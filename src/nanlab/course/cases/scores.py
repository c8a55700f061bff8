"""Cases: losses and metrics of distributions, distances and classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanlab.course.cases.frame import Case

CASES: list[Case] = []


# -- optax-896 -------------------------------------------------------------------------------------------------------
def legal_moves():
    network, boards = nn.Linear(6, 4), torch.randn(3, 6)
    legal = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 0]]).bool()
    played, smoothing = torch.tensor([0, 2, 1]), 0.1

    def step():
        logits = network(boards).masked_fill(~legal, -torch.inf)
        spread = smoothing * legal / legal.sum(-1, keepdim=True)
        target = (1 - smoothing) * F.one_hot(played, 4) + spread
        loss = -(target * logits.log_softmax(-1)).sum(-1).mean()
        loss.backward()
        return {"loss": loss, "grad_norm": network.weight.grad.norm()}

    return step


def legal_moves_fixed():
    network, boards = nn.Linear(6, 4), torch.randn(3, 6)
    legal = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 0]]).bool()
    played, smoothing = torch.tensor([0, 2, 1]), 0.1

    def step():
        logits = network(boards).masked_fill(~legal, -torch.inf)
        target = (1 - smoothing) * F.one_hot(played, 4) + smoothing * legal / legal.sum(-1, keepdim=True)
        log_probs = logits.log_softmax(-1).masked_fill(~legal, 0)  # select; 0 · −inf is not 0
        loss = -(target * log_probs).sum(-1).mean()
        loss.backward()
        return {"loss": loss, "grad_norm": network.weight.grad.norm()}

    return step


def legal_moves_reference():
    """Board by board, only over its legal moves, in float64; the slope by hand: softmax − target."""
    torch.manual_seed(0)
    network, boards = nn.Linear(6, 4), torch.randn(3, 6).double()
    network, losses, slope = network.double(), [], torch.zeros(4, 6).double()
    for board, moves, move in zip(boards, [[0, 1, 3], [0, 1, 2, 3], [1, 2]], [0, 2, 1], strict=True):
        scores = network(board).detach()[moves]
        target = torch.tensor([0.9 * (m == move) + 0.1 / len(moves) for m in moves]).double()
        losses.append((target * (scores.exp().sum().log() - scores)).sum())
        slope[moves] += torch.outer(torch.softmax(scores, 0) - target, board) / 3
    return {"loss": torch.stack(losses).mean(), "grad_norm": slope.square().sum().sqrt()}


CASES.append(
    Case(
        id="optax-896",
        title="Only legal moves",
        symptom="A policy over moves. I mask illegal moves and smooth the targets over the legal ones. As soon as a "
        "board has an illegal move, the loss is nan and my loop skips the batch; that is nearly every batch.",
        broken=legal_moves,
        fixed=legal_moves_fixed,
        reference=legal_moves_reference,
        cause="zero_times_inf",
        phase="forward",
        line="loss = -(target * logits.log_softmax(-1)).sum(-1).mean()",
        link="https://github.com/google-deepmind/optax/issues/896",
        family="log0_or_inf_times_0",
        story="An illegal move has a log-probability of −inf, which is right, and a target of 0, which is right too. "
        "Their product is nan. A weight of 0 does not switch a term off; only selection does.",
        difficulty=1,
    )
)


# -- torchmetrics-1029 -----------------------------------------------------------------------------------------------
def distil():
    student, hidden = nn.Linear(6, 5), torch.randn(4, 6)
    teacher_logits = torch.randn(4, 5)

    def step():
        top = teacher_logits.topk(3).indices
        kept = torch.zeros_like(teacher_logits).scatter(-1, top, 1.0)
        teacher = torch.softmax(teacher_logits, -1) * kept
        teacher = teacher / teacher.sum(-1, keepdim=True)
        log_student = student(hidden).log_softmax(-1)
        log_teacher = torch.log(teacher)
        loss = (teacher * (log_teacher - log_student)).sum(-1).mean()
        loss.backward()
        return {"loss": loss, "grad_norm": student.weight.grad.norm()}

    return step


def distil_fixed():
    student, hidden = nn.Linear(6, 5), torch.randn(4, 6)
    teacher_logits = torch.randn(4, 5)

    def step():
        top = teacher_logits.topk(3).indices
        kept = torch.zeros_like(teacher_logits).scatter(-1, top, 1.0)
        teacher = torch.softmax(teacher_logits, -1) * kept
        teacher = teacher / teacher.sum(-1, keepdim=True)
        log_student = student(hidden).log_softmax(-1)
        loss = F.kl_div(log_student, teacher, reduction="batchmean")  # its p · log p is 0 at p = 0
        loss.backward()
        return {"loss": loss, "grad_norm": student.weight.grad.norm()}

    return step


def distil_reference():
    """Row by row over the three kept classes in float64; the slope by hand: student − teacher."""
    torch.manual_seed(0)
    student, hidden = nn.Linear(6, 5), torch.randn(4, 6).double()
    logits, student = torch.randn(4, 5).double(), student.double()
    losses, slope = [], torch.zeros(5, 6).double()
    for row, scores in zip(hidden, logits, strict=True):
        top, q = scores.sort(descending=True).indices[:3], torch.softmax(student(row).detach(), 0)
        p = torch.softmax(scores[top], 0)
        losses.append((p * (p / q[top]).log()).sum())
        slope += torch.outer(q - torch.zeros(5).double().scatter(0, top, p), row) / 4
    return {"loss": torch.stack(losses).mean(), "grad_norm": slope.square().sum().sqrt()}


CASES.append(
    Case(
        id="torchmetrics-1029",
        title="Distillation from the top 3",
        symptom="To save disk I keep only the three most likely tokens of the teacher. The KL loss is nan from the "
        "first batch, and early stopping ends the run there. With all tokens kept it works.",
        broken=distil,
        fixed=distil_fixed,
        reference=distil_reference,
        cause="log_of_zero",
        phase="forward",
        line="log_teacher = torch.log(teacher)",
        link="https://github.com/Lightning-AI/torchmetrics/issues/1029",
        family="log0_or_inf_times_0",
        story="Dropped tokens have probability 0: log 0 is −inf, and 0 · (−inf) is nan. The limit of p · log p is 0, "
        "and xlogy and kl_div know it. A missing term of a sum is not a term that is nearly 0.",
        difficulty=1,
    )
)


# -- rul-adapt-22 ----------------------------------------------------------------------------------------------------
def spread_out():
    encoder, x = nn.Linear(6, 3), torch.randn(4, 6)

    def step():
        z = encoder(x)
        difference = z[:, None, :] - z[None, :, :]
        distance = torch.sqrt(difference.square().sum(-1))
        loss = torch.exp(-distance).mean()
        loss.backward()
        return {"loss": loss, "grad_norm": encoder.weight.grad.norm()}

    return step


def spread_out_fixed():
    encoder, x = nn.Linear(6, 3), torch.randn(4, 6)

    def step():
        z = encoder(x)
        i, j = torch.triu_indices(4, 4, offset=1)  # each pair once, and no point with itself
        distance = torch.sqrt((z[i] - z[j]).square().sum(-1))
        loss = (2 * torch.exp(-distance).sum() + 4) / 16
        loss.backward()
        return {"loss": loss, "grad_norm": encoder.weight.grad.norm()}

    return step


def spread_out_reference():
    """In float64, the slope by hand: d exp(−d)/dz = −exp(−d) (z_i − z_j)/d, and nothing from a point to itself."""
    torch.manual_seed(0)
    encoder, x = nn.Linear(6, 3).double(), torch.randn(4, 6).double()
    z, slope, loss = encoder(x).detach(), torch.zeros(4, 3).double(), 0.0
    for i in range(4):
        for j in range(4):
            d = (z[i] - z[j]).square().sum() ** 0.5
            loss += torch.exp(-d) / 16
            if i != j:
                slope[i] -= 2 * torch.exp(-d) * (z[i] - z[j]) / d / 16
    return {"loss": loss, "grad_norm": (slope.T @ x).square().sum().sqrt()}


CASES.append(
    Case(
        id="rul-adapt-22",
        title="All against all",
        symptom="A loss that pushes embeddings apart, by all pairwise distances. The first loss looks right; after one "
        "step every weight is nan. The points are all different, I checked.",
        broken=spread_out,
        fixed=spread_out_fixed,
        reference=spread_out_reference,
        cause="gradient_at_edge",
        phase="backward",
        line="distance = torch.sqrt(difference.square().sum(-1))",
        link="https://github.com/tilman151/rul-adapt/pull/22",
        family="nan_times_zero_mask",
        story="All against all includes each point against itself: the distance is 0, the slope of √ there is "
        "infinite, and times 0 it is nan. The value of the loss shows nothing of it. Leave the diagonal out before the "
        "root.",
        difficulty=2,
    )
)


# -- segmentation-191 ------------------------------------------------------------------------------------------------
def pixel_accuracy():
    network = nn.Linear(3, 4)
    pixels = torch.randn(2, 50, 3) * torch.tensor([1.0, 1.0, 0.0])  # these images are without blue
    labels = torch.zeros(2, 50).long()
    labels[0, :3] = 2  # nearly all is background, class 0

    @torch.no_grad()
    def step():
        x = pixels.flatten(0, 1)
        normalised = (x - x.mean(0)) / x.std(0)
        logits = network(normalised)
        predicted = logits.argmax(-1)
        return {"accuracy": (predicted == labels.flatten()).float().mean()}

    return step


def pixel_accuracy_fixed():
    network = nn.Linear(3, 4)
    pixels = torch.randn(2, 50, 3) * torch.tensor([1.0, 1.0, 0.0])
    labels = torch.zeros(2, 50).long()
    labels[0, :3] = 2

    @torch.no_grad()
    def step():
        x = pixels.flatten(0, 1)
        spread = x.std(0)
        normalised = (x - x.mean(0)) / torch.where(spread > 0, spread, 1.0)  # a constant channel stays 0
        logits = network(normalised)
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the scores are not finite: no accuracy")
        return {"accuracy": (logits.argmax(-1) == labels.flatten()).float().mean()}

    return step


def pixel_accuracy_reference():
    """In float64, over the two channels that say something."""
    torch.manual_seed(0)
    network, x = nn.Linear(3, 4).double(), torch.randn(2, 50, 3).double().flatten(0, 1)[:, :2]
    x = (x - x.mean(0)) / x.std(0)
    scores = x @ network.weight[:, :2].T + network.bias
    truth = torch.tensor([2] * 3 + [0] * 97)
    return {"accuracy": sum(int(s.max(0).indices) == int(t) for s, t in zip(scores, truth, strict=True)) / 100}


CASES.append(
    Case(
        id="segmentation-191",
        title="0.97 from the first epoch on",
        symptom="Segmentation, an untrained network: accuracy 0.97, and it never changes, whatever I do to the "
        "learning rate. A great start, or so I thought; all masks that it draws are background.",
        broken=pixel_accuracy,
        fixed=pixel_accuracy_fixed,
        reference=pixel_accuracy_reference,
        cause="zero_over_zero",
        phase="forward",
        line="normalised = (x - x.mean(0)) / x.std(0)",
        also=(
            ("", "forward", "predicted = logits.argmax(-1)"),
            ("", "forward", 'return {"accuracy": (predicted == labels.flatten()).float().mean()}'),
        ),
        link="https://github.com/GeorgeSeif/Semantic-Segmentation-Suite/issues/191",
        family="metric_only",
        trap="finite and wrong",
        tool="none: compare with a reference",
        story="In the report the loss is nan and the accuracy stays at 0.998. Here an empty channel makes every score "
        "nan; argmax of nothing but nan is class 0, and most pixels are class 0. A metric that turns numbers into "
        "choices hides nan: look at the scores first.",
        difficulty=3,
    )
)


# -- torchmetrics-483 ------------------------------------------------------------------------------------------------
def class_accuracy():
    network, x = nn.Linear(5, 4), torch.randn(8, 5)
    labels, classes = torch.tensor([0, 1, 1, 0, 2, 2, 1, 0]), 4

    @torch.no_grad()
    def step():
        right = network(x).argmax(-1) == labels
        members = labels == torch.arange(classes)[:, None]
        by_class = (members & right).sum(-1) / members.sum(-1)
        print("accuracy by class", *(f"{accuracy:.4f}" for accuracy in by_class))
        return {"balanced accuracy": by_class.nanmean()}

    return step


def class_accuracy_fixed():
    network, x = nn.Linear(5, 4), torch.randn(8, 5)
    labels = torch.tensor([0, 1, 1, 0, 2, 2, 1, 0])

    @torch.no_grad()
    def step():
        right = network(x).argmax(-1) == labels
        present = labels.unique()  # the same number: it asks only for classes that there are
        by_class = torch.stack([right[labels == label].float().mean() for label in present])
        print("accuracy by class", dict(zip(present.tolist(), by_class.tolist(), strict=True)))
        return {"balanced accuracy": by_class.mean()}

    return step


def class_accuracy_reference():
    """Class by class, in plain Python; class 3 does not occur."""
    torch.manual_seed(0)
    network, x = nn.Linear(5, 4).double(), torch.randn(8, 5).double()
    scores, labels, hits = network(x).tolist(), [0, 1, 1, 0, 2, 2, 1, 0], {}
    for row, label in zip(scores, labels, strict=True):
        hits.setdefault(label, []).append(row.index(max(row)) == label)
    return {"balanced accuracy": sum(sum(h) / len(h) for h in hits.values()) / len(hits)}


CASES.append(
    Case(
        id="torchmetrics-483",
        title="nan for one class",
        symptom="The log of my evaluation has a nan among the accuracies by class. Is my model broken? Can I trust the "
        "balanced accuracy, which is a number?",
        broken=class_accuracy,
        fixed=class_accuracy_fixed,
        reference=class_accuracy_reference,
        lesson="03_empty_batch",
        phase="forward",
        line="by_class = (members & right).sum(-1) / members.sum(-1)",
        link="https://github.com/Lightning-AI/torchmetrics/issues/483",
        family="metric_only",
        trap="NaN and harmless",
        story="No example of the last class is in the data. Its accuracy is unknown, and nan is the honest word for "
        "that; a 0 or a 1 there would be a lie. nanmean leaves it out. Fill it with a number, and the mean is wrong.",
        difficulty=2,
    )
)
