"""Cases: clipping, scaling, running statistics, and what one bad step leaves behind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanlab.course.cases.frame import Case
from nanlab.course.cases.helpers import InOrder, trainer

CASES: list[Case] = []


# -- hf-13619 --------------------------------------------------------------------------------------------------------
class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids)).flatten(0, 1)
        return {"loss": F.cross_entropy(logits, labels.flatten()), "logits": logits}


def log_of_four_steps():
    rows = [{"input_ids": [1, 2, 3], "labels": [2, 3, 4]} for _ in range(8)]
    rows[2]["labels"] = rows[3]["labels"] = [-100, -100, -100]
    settings = {"logging_nan_inf_filter": False, "learning_rate": 0.0}
    run = trainer(TokenModel(), InOrder(rows), max_steps=4, **settings)

    def step():
        run.train()
        return {"log": run.state.log_history, "last loss": run.state.log_history[-2]["loss"]}

    return step


def log_of_four_steps_fixed():
    rows = [{"input_ids": [1, 2, 3], "labels": [2, 3, 4]} for _ in range(8)]
    rows[2]["labels"] = rows[3]["labels"] = [-100, -100, -100]
    rows = [row for row in rows if any(label != -100 for label in row["labels"])]
    settings = {"logging_nan_inf_filter": False, "learning_rate": 0.0}
    run = trainer(TokenModel(), InOrder(rows), max_steps=3, **settings)

    def step():
        run.train()
        return {"log": run.state.log_history, "last loss": run.state.log_history[-2]["loss"]}

    return step


def log_of_four_steps_reference():
    torch.manual_seed(0)
    model = TokenModel().double()
    probabilities = torch.softmax(model.head(model.embed(torch.tensor([1, 2, 3]))), -1)
    return {"last loss": -probabilities[[0, 1, 2], [2, 3, 4]].log().mean()}


CASES.append(
    Case(
        id="hf-13619",
        title="nan for the rest of the log",
        symptom="A dry run over my data, learning rate 0, logging filter off. From step 2 on every loss is nan, "
        "although the gradient norm is a normal number again. The later ones I can explain. What makes the first?",
        broken=log_of_four_steps,
        fixed=log_of_four_steps_fixed,
        reference=log_of_four_steps_reference,
        parts=(TokenModel,),
        cause="empty_mean",
        phase="forward",
        line='return {"loss": F.cross_entropy(logits, labels.flatten()), "logits": logits}',
        link="https://github.com/huggingface/transformers/pull/13619",
        family="logging_filter",
        story="One batch without a label: its loss is nan, its gradient 0, so the weights never saw it. The trainer "
        "adds up losses and takes the logged sum off again, and nan minus nan stays nan. Look at grad_norm "
        "too, and drop the row.",
        difficulty=2,
    )
)


# -- habitat-lab-2226 ------------------------------------------------------------------------------------------------
def ppo_update():
    actor, critic = nn.Linear(4, 3), nn.Linear(4, 1)
    nn.init.zeros_(critic.weight), nn.init.zeros_(critic.bias)
    observations, returns = torch.randn(6, 4), torch.zeros(6)  # nothing was won or lost in this batch
    actions, advantages = torch.randint(3, (6,)), torch.randn(6)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step():
        log_probs = F.log_softmax(actor(observations), -1)[range(6), actions]
        value_loss = torch.sqrt((critic(observations)[:, 0] - returns).square().mean())
        loss = 0.5 * value_loss - (advantages * log_probs).mean()
        loss.backward()
        print(f"loss {loss:.4f}, gradient of the actor {actor.weight.grad.norm():.4f}")
        nn.utils.clip_grad_norm_(parameters, 0.2)
        optimizer.step()
        return {"actor": actor.weight, "critic": critic.weight}

    return step


def ppo_update_fixed():
    actor, critic = nn.Linear(4, 3), nn.Linear(4, 1)
    nn.init.zeros_(critic.weight), nn.init.zeros_(critic.bias)
    observations, returns = torch.randn(6, 4), torch.zeros(6)
    actions, advantages = torch.randint(3, (6,)), torch.randn(6)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step():
        log_probs = F.log_softmax(actor(observations), -1)[range(6), actions]
        value_loss = torch.linalg.vector_norm(critic(observations)[:, 0] - returns) / 6**0.5  # its slope at 0 is 0
        loss = 0.5 * value_loss - (advantages * log_probs).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.2, error_if_nonfinite=True)  # and stop rather than spread
        optimizer.step()
        return {"actor": actor.weight, "critic": critic.weight}

    return step


def ppo_update_reference():
    """By hand, in float64: the critic is right already, and the actor's gradient is cut to length 0.2."""
    torch.manual_seed(0)
    actor, _ = nn.Linear(4, 3).double(), nn.Linear(4, 1)
    x, actions, advantages = torch.randn(6, 4).double(), torch.randint(3, (6,)), torch.randn(6).double()
    error = (torch.softmax(actor(x), -1) - torch.eye(3).double()[actions]) * advantages[:, None] / 6
    slope, slope_of_bias = error.T @ x, error.sum(0)
    length = (slope.square().sum() + slope_of_bias.square().sum()).sqrt()
    return {"actor": actor.weight - 0.1 * slope * min(1, 0.2 / length), "critic": torch.zeros(1, 4)}


CASES.append(
    Case(
        id="habitat-lab-2226",
        title="Clipping was meant to protect me",
        symptom="PPO, days of it, gradients clipped at norm 0.2. Then a batch in which nothing happened: the loss is a "
        "number, the gradient of the actor is too, and after the step actor and critic both are nan.",
        broken=ppo_update,
        fixed=ppo_update_fixed,
        reference=ppo_update_reference,
        cause="gradient_at_edge",
        phase="backward",
        line="value_loss = torch.sqrt((critic(observations)[:, 0] - returns).square().mean())",
        link="https://github.com/facebookresearch/habitat-lab/issues/2226",
        family="clip_spreads",
        story="In the report one nan in one gradient went through clip_grad_norm_ and destroyed every parameter: the "
        "common norm is nan, and all are divided by it. Here it is born in the slope of a root at 0. Clipping "
        "is no guard; error_if_nonfinite=True is one.",
        difficulty=3,
    )
)


# -- pt-88474 --------------------------------------------------------------------------------------------------------
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.lift(x).half()  # as under autocast
        return self.head(self.norm(hidden.float())).mean()


def train_then_evaluate():
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(8, 4), torch.randn(8, 4) * 1e5, torch.randn(8, 4)]

    def step():
        for x in batches:
            loss = model.train()(x)
            if loss.isfinite():
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"train loss {loss:.2f}")
        with torch.no_grad():
            return {"eval_loss": model.eval()(batches[0])}

    return step


def train_then_evaluate_fixed():
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(8, 4), torch.randn(8, 4) * 1e5, torch.randn(8, 4)]

    def step():
        for x in batches:
            kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
            loss = model.train()(x)
            if loss.isfinite():
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:  # a skipped step leaves no trace, in the statistics either
                model.load_state_dict(kept, strict=False)
        with torch.no_grad():
            return {"eval_loss": model.eval()(batches[0])}

    return step


def train_then_evaluate_reference():
    """Only the two good batches, in float64 throughout."""
    torch.manual_seed(0)
    model = Encoder()
    first, _, last = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 4)
    model = model.double()
    forward = lambda x: model.head(model.norm(model.lift(x.double()))).mean()
    for x in (first, last):
        gradients = torch.autograd.grad(forward(x), list(model.parameters()), allow_unused=True)
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= 0.1 * g
    return {"eval_loss": model.eval() and forward(first)}


CASES.append(
    Case(
        id="pt-88474",
        title="Good in train mode, nan in eval mode",
        symptom="Mixed precision. Bad steps are skipped, there was one, and the training loss is fine before and after "
        "it. In validation everything is nan, from then on and for good.",
        broken=train_then_evaluate,
        fixed=train_then_evaluate_fixed,
        reference=train_then_evaluate_reference,
        parts=(Encoder,),
        cause="overflow",
        phase="forward",
        line="hidden = self.lift(x).half()  # as under autocast",
        link="https://github.com/pytorch/pytorch/issues/88474",
        family="running_statistics",
        tolerance=1e-2,
        story="float16 overflowed in the first layer. The step was skipped, but the forward pass had already moved "
        "the running mean of the batch norm to inf, and only evaluation reads it. A step that is skipped must "
        "leave no trace.",
        difficulty=3,
    )
)


# -- dion-24 ---------------------------------------------------------------------------------------------------------
class NormedMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.grad / (p.grad.norm(dim=1, keepdim=True) + 1e-8)
                scale = p.grad.norm() / rows.norm()
                p -= group["lr"] * rows * scale


def first_step():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 1, bias=False))
    nn.init.zeros_(model[1].weight)  # as is usual for the last projection
    optimizer, x, y = NormedMomentum(model.parameters()), torch.randn(6, 4), torch.randn(6, 1)

    def step():
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "loss after": (model(x) - y).square().mean()}

    return step


def first_step_fixed():
    class Guarded(NormedMomentum):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    rows = p.grad / (p.grad.norm(dim=1, keepdim=True) + 1e-8)
                    scale = p.grad.norm() / rows.norm().clamp(min=1e-8)  # no gradient, no step
                    p -= group["lr"] * rows * scale

    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 1, bias=False))
    nn.init.zeros_(model[1].weight)
    optimizer, x, y = Guarded(model.parameters()), torch.randn(6, 4), torch.randn(6, 1)

    def step():
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "loss after": (model(x) - y).square().mean()}

    return step


def first_step_reference():
    """Only the last layer moves, along its gradient (one row: the scale gives back its own length)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 1, bias=False))
    x, y = torch.randn(6, 4).double(), torch.randn(6, 1).double()
    hidden = x @ model[0].weight.double().T
    weight = 0.1 * 2 * (y * hidden).mean(0)
    return {"loss": y.square().mean(), "loss after": (hidden @ weight - y[:, 0]).square().mean()}


CASES.append(
    Case(
        id="dion-24",
        title="The first step of a new optimizer",
        symptom="A new optimizer that normalises its updates: the first loss is right, the second nan. AdamW is fine "
        "on the same model, and so is the new one if I do not zero the last projection.",
        broken=first_step,
        fixed=first_step_fixed,
        reference=first_step_reference,
        parts=(NormedMomentum,),
        cause="zero_over_zero",
        phase="optimizer",
        line="scale = p.grad.norm() / rows.norm()",
        link="https://github.com/microsoft/dion/pull/24",
        family="optimizer_0_0",
        story="The last layer is all zeros, so the first one gets a gradient of exactly 0, and the optimizer divides "
        "the length 0 by the length 0. A guard on one division does not cover the next. No gradient means no "
        "step.",
        difficulty=2,
    )
)


# -- espnet-3237 -----------------------------------------------------------------------------------------------------
def scaled_training():
    head = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
    x, y = torch.randn(16, 4), torch.randn(16, 1)

    def step():
        for number in range(5):
            optimizer.zero_grad()
            output = head(x).half()  # as under autocast
            loss = (output.float() - y).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(head.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            print(f"step {number}: loss {loss:.2f}, grad_norm {norm:.2f}")
        return {"loss": loss}

    return step


def scaled_training_fixed():
    head = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
    x, y = torch.randn(16, 4), torch.randn(16, 1)

    def step():
        for _ in range(3):  # float32 and no scale: the same three steps, without the two that were only tried
            optimizer.zero_grad()
            loss = (head(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        return {"loss": loss}

    return step


def scaled_training_reference():
    """Two steps of gradient descent by hand, in float64."""
    torch.manual_seed(0)
    head = nn.Linear(4, 1).double()
    weight, bias = head.weight.detach(), head.bias.detach()
    x, y = torch.randn(16, 4).double(), torch.randn(16, 1).double()
    for _ in range(2):
        error = x @ weight.T + bias - y
        weight, bias = weight - 0.05 * 2 * (error * x).mean(0), bias - 0.05 * 2 * error.mean()
    return {"loss": (x @ weight.T + bias - y).square().mean()}


CASES.append(
    Case(
        id="espnet-3237",
        title="grad_norm nan at the start of every run",
        symptom="With mixed precision switched on, the first lines of every run have a grad_norm of nan, and "
        "the loss does not move in those. What is broken in my model?",
        broken=scaled_training,
        fixed=scaled_training_fixed,
        reference=scaled_training_reference,
        cause="overflow",
        phase="backward",
        line="scaler.scale(loss).backward()",
        also=(
            ("overflow", "backward", "output = head(x).half()  # as under autocast"),
            ("overflow", "backward", "loss = (output.float() - y).square().mean()"),
            ("overflow", "backward", "norm = nn.utils.clip_grad_norm_(head.parameters(), 5.0)"),
        ),
        link="https://github.com/espnet/espnet/issues/3237",
        family="loss_scale",
        trap="NaN and harmless",
        tolerance=1e-2,
        story="Nothing is. The scaler starts high on purpose, meets gradients that do not fit into float16, skips "
        "the step and halves its scale until they do. It is a fault only if it never stops.",
        difficulty=2,
    )
)


# -- deepethogram-15 -------------------------------------------------------------------------------------------------
def behaviour_classifier():
    counts = torch.tensor([[120.0, 880.0], [35.0, 965.0], [0.0, 1000.0]])  # frames with a behaviour, and without
    head = nn.Linear(6, 3)
    head.bias = nn.Parameter((counts[:, 0] / counts[:, 1]).log())  # start from the base rates
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    features, present = torch.randn(10, 6), torch.tensor([[1.0, 0.0, 0.0]] * 10)

    def step():
        logits = head(features)
        loss = F.binary_cross_entropy_with_logits(logits, present)
        loss.backward()
        optimizer.step()
        return {"loss": loss, "bias": head.bias}

    return step


def behaviour_classifier_fixed():
    counts = torch.tensor([[120.0, 880.0], [35.0, 965.0], [0.0, 1000.0]])
    head = nn.Linear(6, 3)
    head.bias = nn.Parameter(((counts[:, 0] + 1) / (counts[:, 1] + 1)).log())  # one more of each: no rate is 0
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    features, present = torch.randn(10, 6), torch.tensor([[1.0, 0.0, 0.0]] * 10)

    def step():
        logits = head(features)
        loss = F.binary_cross_entropy_with_logits(logits, present)
        loss.backward()
        optimizer.step()
        return {"loss": loss, "bias": head.bias}

    return step


def behaviour_classifier_reference():
    """One step by hand, in float64: −log of the probability of what was seen, and its slope p − seen."""
    torch.manual_seed(0)
    weight, features = nn.Linear(6, 3).weight.detach().double(), torch.randn(10, 6).double()
    bias = torch.tensor([121 / 881, 36 / 966, 1 / 1001], dtype=torch.float64).log()
    p, present = 1 / (1 + (-(features @ weight.T) - bias).exp()), torch.tensor([1.0, 0, 0]).double()
    loss = -torch.where(present > 0, p, 1 - p).log().mean()
    return {"loss": loss, "bias": bias - 0.1 * (p - present).mean(0) / 3}


CASES.append(
    Case(
        id="deepethogram-15",
        title="Not a single example of one behaviour",
        symptom="I start the classifier from the base rates of the training set, so that it need not learn them. In "
        "one project the first loss is nan already, in all others this works.",
        broken=behaviour_classifier,
        fixed=behaviour_classifier_fixed,
        reference=behaviour_classifier_reference,
        cause="bad_state",
        phase="state",
        op="parameter bias",
        line="logits = head(features)",
        also=(
            (
                "bad_state",
                "state",
                "head.bias = nn.Parameter((counts[:, 0] / counts[:, 1]).log())  # start from the base rates",
            ),
            (
                "log_of_zero",
                "state",
                "head.bias = nn.Parameter((counts[:, 0] / counts[:, 1]).log())  # start from the base rates",
            ),
            ("log_of_zero", "state", "logits = head(features)"),
        ),
        link="https://github.com/jbohnslav/deepethogram/issues/15",
        family="bad_weights",
        story="A behaviour that never occurs has a rate of 0, and its bias is log 0 = −inf: the model is broken "
        "before the first batch. Look at every parameter after an initialisation of your own, and never start "
        "from certainty.",
        difficulty=2,
    )
)
