"""Cases: what the optimizer, its schedule or the clipping does to good gradients."""

from __future__ import annotations

import copy
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

from nanlab.course.cases.frame import Case
from nanlab.course.cases.helpers import trainer
from nanlab.course.materials import tiny_tokenizer
from nanlab.course.notebook import quiet
from nanlab.models import clone

CASES: list[Case] = []


# -- trl-1789 --------------------------------------------------------------------------------------------------------
ANSWERS = ("chosen", "rejected")


def preferences():
    facts = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo"}
    asked = [{"prompt": f"The capital of {land} is", "chosen": f" {city}."} for land, city in facts.items()]
    return [{**row, "rejected": " a secret."} for row in asked]


def small_pythia(dtype):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=1536, **sizes)).eval().to(dtype)


def dpo_trainer(model, tokenizer, **settings):
    """TRL's own trainer, silent, two steps on all four pairs; ``settings`` go to its DPOConfig."""
    quiet()
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import DPOConfig, DPOTrainer

    silent = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    size = {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_checkpointing": False, "bf16": False}
    folder = tempfile.TemporaryDirectory()
    args = DPOConfig(folder.name, **silent, **size, **settings)
    run = DPOTrainer(
        model, clone(model), args, train_dataset=Dataset.from_list(preferences()), processing_class=tokenizer
    )
    run.folder = folder
    run.remove_callback(PrinterCallback)
    return run


def lines(run):
    keys = ("loss", "grad_norm", "rewards/chosen", "rewards/accuracies", "step")
    return [{key: entry[key] for key in keys} for entry in run.state.log_history if "loss" in entry]


def dpo_training():
    model, tokenizer = small_pythia(torch.float16), tiny_tokenizer()
    tokenizer.pad_token = "<|padding|>"
    run = dpo_trainer(model, tokenizer, optim="adamw_torch", learning_rate=1e-4)

    def step():
        run.train()
        log = lines(run)
        return {"log": log, "second loss": log[1]["loss"]}

    return step


def dpo_training_fixed():
    model, tokenizer = small_pythia(torch.float32), tiny_tokenizer()
    tokenizer.pad_token = "<|padding|>"
    run = dpo_trainer(model, tokenizer, optim="adamw_torch", learning_rate=1e-4)

    def step():
        run.train()
        log = lines(run)
        return {"log": log, "second loss": log[1]["loss"]}

    return step


def dpo_training_reference():
    """Both steps in a loop of our own, in float64, pair by pair; the reference is the fresh model."""
    torch.manual_seed(0)
    model, tokenizer = small_pythia(torch.float64), tiny_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    ids = {name: [tokenizer(row["prompt"] + row[name])["input_ids"] + [0] for row in preferences()] for name in ANSWERS}
    starts, fresh, losses = [len(tokenizer(row["prompt"])["input_ids"]) for row in preferences()], None, []
    for n in range(2):
        sums = []
        for name in ANSWERS:
            for row, start in zip(ids[name], starts, strict=True):
                log_probs = model(input_ids=torch.tensor([row])).logits[0, start - 1 : -1].log_softmax(-1)
                sums.append(log_probs[range(len(row) - start), row[start:]].sum())
        ratio = torch.stack(sums)
        fresh = ratio.detach() if fresh is None else fresh
        chosen, rejected = (ratio - fresh).view(2, 4)
        loss = torch.log1p(torch.exp(-0.1 * (chosen - rejected))).mean()
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-4 * (1 - n / 2)
        optimizer.step()
    return {"second loss": losses[1]}


CASES.append(
    Case(
        id="trl-1789",
        title="A small model, two steps",
        symptom="DPO with a Pythia model that is loaded in float16 and trained on the CPU. The first line of the log "
        "is perfect: 0.6931. In the second the loss is 0.0, and the rewards are nan.",
        broken=dpo_training,
        fixed=dpo_training_fixed,
        reference=dpo_training_reference,
        parts=(preferences, small_pythia, lines),
        cause="optimizer_underflow",
        phase="optimizer",
        line="run.train()",
        also=(
            ("optimizer_underflow", "optimizer", "model, tokenizer = small_pythia(torch.float16), tiny_tokenizer()"),
        ),
        link="https://github.com/huggingface/trl/issues/1789",
        family="half_optimizer_underflow",
        story="The thread closed without a cause; padding was suspected. A run with all else equal shows that float16 "
        "weights do it: AdamW's eps of 1e-8 is 0 there, its average of squared gradients is 0 there for nearly all "
        "weights, and it divides by them. Load in float32 or bfloat16.",
        difficulty=2,
        tolerance=1e-4,
    )
)


# -- ptforum-1765 ----------------------------------------------------------------------------------------------------
def half_adam():
    weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]).half())
    optimizer = torch.optim.Adam([weight], lr=0.01)
    features = torch.tensor([[0.0, 1e-3, 1.0]]).half()  # the first did not occur in this batch

    def step():
        loss = (features @ weight - 1.0).square().mean()
        loss.backward()
        print(f"loss {loss:.4f}, gradient {weight.grad.tolist()}")
        optimizer.step()
        return {"weight": weight}

    return step


def half_adam_fixed():
    weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))  # the optimizer sees float32
    optimizer = torch.optim.Adam([weight], lr=0.01)
    features = torch.tensor([[0.0, 1e-3, 1.0]]).half()

    def step():
        loss = (features.float() @ weight - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        return {"weight": weight}

    return step


CASES.append(
    Case(
        id="ptforum-1765",
        title="Adam yes, half no; SGD both",
        symptom="I turned model and inputs to half. With SGD it trains. With Adam the loss and the gradients of the "
        "first step are fine, and after it the weights are not.",
        broken=half_adam,
        fixed=half_adam_fixed,
        # The first step of Adam is the learning rate times the sign of the gradient: 0, +, +.
        reference=lambda: {"weight": torch.tensor([0.5, -1.0 - 0.01, 2.0 - 0.01]).double()},
        cause="optimizer_underflow",
        phase="optimizer",
        line="optimizer.step()",
        also=(("optimizer_underflow", "optimizer", "weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]).half())"),),
        link="https://discuss.pytorch.org/t/adam-half-precision-nans/1765",
        family="half_optimizer_underflow",
        story="Adam's v is 0.001 of the squared gradient, and that is 0 in float16 for the first two weights, as is "
        "eps = 1e-8. The first weight moves by 0/0, the second by something/0, only the third is fine. Let the "
        "optimizer keep its weights and its state in float32.",
        difficulty=1,
        tolerance=1e-4,
    )
)


# -- tropt-8 ---------------------------------------------------------------------------------------------------------
def soft_prompt():
    embed, head = nn.Embedding(30, 16).half(), nn.Linear(16, 30).half()
    text, target = torch.randint(0, 30, (200,)), torch.tensor([17])
    prompt = nn.Parameter(embed(torch.tensor([1, 2])).detach())
    optimizer = torch.optim.Adam([prompt], lr=0.05)

    def step():
        for n in range(3):
            hidden = torch.cat([prompt, embed(text)]).mean(0, keepdim=True)
            loss = F.cross_entropy(head(hidden).float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {n}: loss {loss:.4f}, largest number of the prompt {prompt.abs().max():.4f}")
        return {"loss": loss}

    return step


def soft_prompt_fixed():
    embed, head = nn.Embedding(30, 16).half(), nn.Linear(16, 30).half()
    text, target = torch.randint(0, 30, (200,)), torch.tensor([17])
    prompt = nn.Parameter(embed(torch.tensor([1, 2])).detach().float())  # what is trained is float32
    optimizer = torch.optim.Adam([prompt], lr=0.05)

    def step():
        for _ in range(3):
            hidden = torch.cat([prompt, embed(text).float()]).mean(0, keepdim=True)
            loss = F.cross_entropy(F.linear(hidden, head.weight.float(), head.bias.float()), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"loss": loss}

    return step


def soft_prompt_reference():
    """Three steps of Adam written out, in float64."""
    torch.manual_seed(0)
    embed, head = nn.Embedding(30, 16).half(), nn.Linear(16, 30).half()
    table, w, b = embed.weight.detach().double(), head.weight.detach().double(), head.bias.detach().double()
    p, m, v, text = table[[1, 2]], 0.0, 0.0, torch.randint(0, 30, (200,))
    for t in range(1, 4):
        logits = torch.cat([p, table[text]]).mean(0) @ w.T + b
        loss = logits.exp().sum().log() - logits[17]
        slope = ((torch.softmax(logits, 0) - torch.eye(30).double()[17]) @ w / 202).expand(2, 16)
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
        p = p - 0.05 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return {"loss": loss}


CASES.append(
    Case(
        id="tropt-8",
        title="The prompt of infinities",
        symptom="I optimise a soft prompt for a frozen model. The first loss is a good number, the second is nan. The "
        "model is frozen and its weights are fine; the prompt is full of inf.",
        broken=soft_prompt,
        fixed=soft_prompt_fixed,
        reference=soft_prompt_reference,
        cause="optimizer_underflow",
        phase="optimizer",
        line="optimizer.step()",
        also=(("optimizer_underflow", "optimizer", "prompt = nn.Parameter(embed(torch.tensor([1, 2])).detach())"),),
        link="https://github.com/matanbt/TROPT/pull/8",
        family="half_optimizer_underflow",
        story="The prompt was cut out of the embedding and took its float16 with it. Its gradients are about 1e-3 at "
        "most: 0.001 of their squares, which is Adam's v, is 0 there, and so is eps: the update divides by 0. A frozen "
        "model may be half; what is trained may not.",
        difficulty=2,
        tolerance=1e-4,
    )
)


# -- llm-dojo-23 -----------------------------------------------------------------------------------------------------
def dpo_loop():
    policy, dtype = nn.Linear(4, 6, bias=False), torch.float16
    with torch.no_grad():
        policy.weight.zero_()
    policy = policy.to(dtype)
    reference = copy.deepcopy(policy).requires_grad_(False)
    hidden = torch.tensor([[1.0, 0.5, -1.0, 2.0]] * 3, dtype=dtype)
    chosen, rejected = torch.tensor([2, 2, 4]), torch.tensor([4, 4, 2])  # one annotator disagrees
    optimizer = torch.optim.SGD(policy.parameters(), lr=20.0)

    def margin(model):
        log_probs = model(hidden).log_softmax(-1)
        return log_probs[range(3), chosen] - log_probs[range(3), rejected]

    def step():
        for n in range(3):
            preference = torch.sigmoid(margin(policy) - margin(reference))
            loss = -torch.log(preference).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {n}: loss {loss:.4f}, largest logit {policy(hidden).max():.2f}")
        return {"loss": loss}

    return step


def dpo_loop_fixed():
    policy = nn.Linear(4, 6, bias=False)
    nn.init.zeros_(policy.weight)
    hidden = torch.tensor([[1.0, 0.5, -1.0, 2.0]] * 3)
    chosen, rejected = torch.tensor([2, 2, 4]), torch.tensor([4, 4, 2])
    optimizer = torch.optim.SGD(policy.parameters(), lr=20.0)

    def step():
        for _ in range(3):
            log_probs = policy(hidden).log_softmax(-1)  # the reference is uniform: its margin is 0
            loss = -F.logsigmoid(log_probs[range(3), chosen] - log_probs[range(3), rejected]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"loss": loss}

    return step


def dpo_loop_reference():
    """In float64 the margin m is one number: two pairs have log(1 + e^−m), one log(1 + e^m)."""
    m, length = torch.zeros(()).double(), 6.25  # |hidden|²; a step moves logit 2 up and logit 4 down
    for _ in range(3):
        loss = (2 * torch.log1p(torch.exp(-m)) + torch.log1p(torch.exp(m))) / 3
        slope = (-2 / (1 + torch.exp(m)) + 1 / (1 + torch.exp(-m))) / 3
        m = m - 20.0 * 2 * length * slope
    return {"loss": loss}


CASES.append(
    Case(
        id="llm-dojo-23",
        title="0.6931, and then never again a number",
        symptom="My own DPO loop in float16. The first loss is about log 2, as it should be; the second is inf, and "
        "then all logits are nan. Anomaly mode stops at step 1 and names the sigmoid.",
        broken=dpo_loop,
        fixed=dpo_loop_fixed,
        reference=dpo_loop_reference,
        cause="log_of_zero",
        phase="forward",
        line="loss = -torch.log(preference).mean()",
        link="https://github.com/mst272/LLM-Dojo/issues/23",
        family="half_precision_unspecified",
        story="The reporter confirmed that float32 cures it; which operation failed was never told apart. Here: below "
        "−17.3 the sigmoid is 0 in float16, and log 0 is −inf. logsigmoid is right at any margin; that the margin is "
        "so large is a matter of the learning rate.",
        difficulty=2,
        tolerance=1e-4,
    )
)


# -- chatglm2-519 ----------------------------------------------------------------------------------------------------
class LoraLinear(nn.Module):
    def __init__(self, width, classes, rank):
        super().__init__()
        self.base = nn.Linear(width, classes).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.b = nn.Parameter(torch.zeros(classes, rank))

    def forward(self, x):
        low = x @ self.a.T
        return self.base(x) + low @ self.b.T


def finetune(lr=6.0, steps=10):
    model, x, y = LoraLinear(8, 3, rank=2), torch.randn(16, 8), torch.randn(16, 3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)

    def step():
        for n in range(steps):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {n}: loss {loss:.4g}")
        return {"loss": loss}

    return step


def finetune_fixed(lr=0.1, steps=10):
    model, x, y = LoraLinear(8, 3, rank=2), torch.randn(16, 8), torch.randn(16, 3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)

    def step():
        for _ in range(steps):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"loss": loss}

    return step


def finetune_reference():
    """Ten steps by hand in float64, at the lower rate."""
    torch.manual_seed(0)
    model, x, y = LoraLinear(8, 3, rank=2), torch.randn(16, 8).double(), torch.randn(16, 3).double()
    model = model.double().requires_grad_(False)
    a, b, start = model.a, model.b, model.base(x)
    for _ in range(10):
        error = start + x @ a.T @ b.T - y
        loss, slope = error.square().mean(), 2 * error / error.numel()
        a, b = a - 0.1 * (slope @ b).T @ x, b - 0.1 * slope.T @ (x @ a.T)
    return {"loss": loss}


CASES.append(
    Case(
        id="chatglm2-519",
        title="Up, up, and away",
        symptom="LoRA in float32, nothing exotic. The loss climbs for a few steps and then is nan. Half precision it "
        "cannot be.",
        broken=finetune,
        fixed=finetune_fixed,
        reference=finetune_reference,
        parts=(LoraLinear,),
        cause="overflow",
        phase="forward",
        line="loss = (model(x) - y).square().mean()",
        link="https://github.com/zai-org/ChatGLM2-6B/issues/519",
        family="lr_exploding",
        story="The reporter found the learning rate far too high. Each step overshoots, and the next gradient is "
        "larger: a few steps to 1e38, where float32 ends too. The log tells before the nan does: a loss that climbs "
        "steadily is the time to stop.",
        difficulty=1,
        tolerance=1e-4,
    )
)


# -- mlperf-hpc-27 ---------------------------------------------------------------------------------------------------
class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x, y):
        return {"loss": (self.linear(x)[:, 0] - y).square().mean()}


def warmup_factors(warmup_steps, total_steps):
    ramp = torch.arange(total_steps) / warmup_steps
    return ramp.clamp(max=1.0).tolist()


def scheduled_training():
    rows = [{"x": x, "y": y} for x, y in zip(torch.randn(6, 4).tolist(), [1.0, 0.5, -1.0, 2.0, 0.0, 1.5], strict=True)]
    run = trainer(Regression(), rows, max_steps=3, per_device_train_batch_size=6)
    factors = warmup_factors(warmup_steps=0, total_steps=4)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: factors[n])

    def step():
        result = run.train()
        return {"log": run.state.log_history, "train_loss": result.training_loss}

    return step


def scheduled_training_fixed():
    rows = [{"x": x, "y": y} for x, y in zip(torch.randn(6, 4).tolist(), [1.0, 0.5, -1.0, 2.0, 0.0, 1.5], strict=True)]
    run = trainer(Regression(), rows, max_steps=3, per_device_train_batch_size=6)
    factors = [1.0] * 4  # no warm-up is the full rate at once
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: factors[n])

    def step():
        result = run.train()
        return {"log": run.state.log_history, "train_loss": result.training_loss}

    return step


def scheduled_training_reference():
    """Three steps of gradient descent by hand in float64, the gradient clipped to length 1 as the trainer does."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 4).double(), torch.tensor([1.0, 0.5, -1.0, 2.0, 0.0, 1.5]).double()
    model, losses = Regression().double().linear, []
    w, b = model.weight.detach()[0], model.bias.detach()[0]
    for _ in range(3):
        error = x @ w + b - y
        losses.append(error.square().mean())
        slope = torch.cat([2 * x.T @ error / 6, 2 * error.mean()[None]])
        slope = slope / slope.norm().clamp(min=1.0)
        w, b = w - 0.1 * slope[:4], b - 0.1 * slope[4]
    return {"train_loss": torch.stack(losses).mean()}


CASES.append(
    Case(
        id="mlperf-hpc-27",
        title="Without a warm-up",
        symptom="I switched the warm-up off, nothing else: warmup_steps=0. The first loss and the first gradient are "
        "as before, then the run is dead.",
        broken=scheduled_training,
        fixed=scheduled_training_fixed,
        reference=scheduled_training_reference,
        parts=(Regression, warmup_factors),
        cause="zero_over_zero",
        phase="state",
        line="ramp = torch.arange(total_steps) / warmup_steps",
        also=(
            ("bad_state", "state", "ramp = torch.arange(total_steps) / warmup_steps"),
            (
                "bad_state",
                "state",
                "run.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: factors[n])",
            ),
        ),
        link="https://github.com/mlcommons/hpc/pull/27",
        family="bad_learning_rate",
        tool="autopsy",
        finding="bad_learning_rate",
        lesson="07_learning_rate_and_dirty_data",
        story="The first factor is 0/0, all later ones are inf and cut down to 1: only the very first step has a rate "
        "of nan, and it is enough for every weight. A schedule is arithmetic too; print its first numbers. The log "
        "shows the rate, and few look.",
        difficulty=1,
    )
)


# -- unet-468 --------------------------------------------------------------------------------------------------------
def clipped_training():
    model, x = nn.Linear(5, 1), torch.randn(20, 5)
    y = x.sum(-1, keepdim=True)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**15)

    def step():
        for n in range(30):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if n % 10 == 0:
                print(f"step {n}: loss {loss:.4f}")
        return {"loss": loss}

    return step


def clipped_training_fixed():
    model, x = nn.Linear(5, 1), torch.randn(20, 5)
    y = x.sum(-1, keepdim=True)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**15)

    def step():
        for _ in range(30):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # the bound is one for gradients, not for scaled ones
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return {"loss": loss}

    return step


def clipped_training_reference():
    """By hand in float64, without a scaler."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 1), torch.randn(20, 5).double()
    w, b, y = model.weight.detach().double()[0], model.bias.detach().double()[0], x.sum(-1)
    for _ in range(30):
        error = x @ w + b - y
        slope = torch.cat([2 * x.T @ error / 20, 2 * error.mean()[None]])
        slope = slope / slope.norm().clamp(min=1.0)
        loss, w, b = error.square().mean(), w - 0.1 * slope[:5], b - 0.1 * slope[5]
    return {"loss": loss}


CASES.append(
    Case(
        id="unet-468",
        title="It learns, a little",
        symptom="With mixed precision the loss hardly moves, in float32 it falls within seconds. No nan, no skipped "
        "step, the gradients are clipped to 1 in both.",
        broken=clipped_training,
        fixed=clipped_training_fixed,
        reference=clipped_training_reference,
        phase="backward",
        line="nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        link="https://github.com/milesial/Pytorch-UNet/issues/468",
        family="guard_hides_fault",
        trap="finite and wrong",
        tool="none: compare with a reference",
        lesson="06_fp16_overflow",
        story="The gradients still carry the loss scale, 32768: clipped to length 1, then divided by the scale, a "
        "length of 0.00003 is left. unscale_ comes before anything that looks at a gradient.",
        difficulty=2,
        tolerance=1e-4,
    )
)


# -- pt-46849 --------------------------------------------------------------------------------------------------------
def duration_model():
    model = nn.Linear(2, 1)
    start = torch.tensor([1.7e12, 1.71e12, 1.72e12])  # milliseconds since 1970
    x, y = torch.stack([start, torch.ones(3)], dim=-1), torch.tensor([[3.0], [5.0], [4.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step():
        before = model.weight.detach().clone()
        log = []
        for n in range(5):
            loss = F.mse_loss(model(x), y) * 1e6  # seconds² to milliseconds²
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            log.append({"loss": loss.item(), "grad_norm": norm.item(), "step": n + 1})
        return {"log": log, "weights moved by": (model.weight - before).norm()}

    return step


def duration_model_fixed():
    model = nn.Linear(2, 1)
    start = torch.tensor([1.7e12, 1.71e12, 1.72e12])
    x, y = torch.stack([start, torch.ones(3)], dim=-1), torch.tensor([[3.0], [5.0], [4.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step():
        before = model.weight.detach().clone()
        log = []
        for n in range(5):
            loss = F.mse_loss(model(x), y) * 1e6
            optimizer.zero_grad()
            loss.backward()
            norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()  # float64 holds the square
            for p in model.parameters():
                p.grad.mul_((1.0 / norm).clamp(max=1.0).float())
            optimizer.step()
            log.append({"loss": loss.item(), "grad_norm": norm.item(), "step": n + 1})
        return {"log": log, "weights moved by": (model.weight - before).norm()}

    return step


CASES.append(
    Case(
        id="pt-46849",
        title="Clipped, so nothing can happen",
        symptom="Raw timestamps as a feature: the loss is huge, I know, but gradients are clipped to 1, so it should "
        "get better step by step. It does not: the loss is the same at every step.",
        broken=duration_model,
        fixed=duration_model_fixed,
        # Five steps of length 1e-4 in one direction; the slope for the timestamps is the only one that counts.
        reference=lambda: {"weights moved by": 5 * 1e-4},
        cause="overflow",
        phase="backward",
        line="norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        also=(("overflow", "optimizer", "norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),),
        link="https://github.com/pytorch/pytorch/issues/46849",
        family="guard_hides_fault",
        tool="autopsy",
        finding="gradient_not_finite",
        lesson="09_guard",
        story="Each gradient is finite; their squares are not. The norm is inf, 1/inf is 0, and clipping sets every "
        "gradient to 0, without a word. error_if_nonfinite=True would have spoken. Better still: scale the features.",
        difficulty=3,
        tolerance=1e-4,
    )
)


# -- ml-by-hand-85 ---------------------------------------------------------------------------------------------------
def train_gain(dtype=torch.bfloat16):
    gain = nn.Parameter(torch.ones(8, dtype=dtype))
    x = torch.randn(32, 8).to(dtype)
    y = 0.8 * x
    optimizer = torch.optim.Adam([gain], lr=1e-3)

    def step():
        for n in range(60):
            loss = F.mse_loss(gain * x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if n % 20 == 0:
                print(f"step {n}: loss {loss:.4f}, grad_norm {gain.grad.norm():.4f}")
        return {"mean gain": gain.float().mean()}

    return step


def train_gain_fixed():
    master = nn.Parameter(torch.ones(8))  # float32 for the optimizer, bfloat16 for the arithmetic
    x = torch.randn(32, 8).to(torch.bfloat16)
    y = 0.8 * x
    optimizer = torch.optim.Adam([master], lr=1e-3)

    def step():
        for _ in range(60):
            loss = F.mse_loss(master.to(torch.bfloat16) * x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"mean gain": master.mean()}

    return step


def train_gain_reference():
    """Adam written out in float64."""
    torch.manual_seed(0)
    x = torch.randn(32, 8).to(torch.bfloat16).double()
    gain, m, v = torch.ones(8).double(), 0.0, 0.0
    for t in range(1, 61):
        slope = 2 * ((gain - 0.8) * x * x).mean(0) / 8
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
        gain = gain - 1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return {"mean gain": gain.mean()}


CASES.append(
    Case(
        id="ml-by-hand-85",
        title="Gradients, and no progress",
        symptom="Everything in bfloat16 to save memory. The gradients are there, the optimizer steps, and the loss is "
        "the same number to the last digit. With a higher learning rate it does move.",
        broken=train_gain,
        fixed=train_gain_fixed,
        reference=train_gain_reference,
        phase="optimizer",
        line="optimizer.step()",
        also=(("", "optimizer", "gain = nn.Parameter(torch.ones(8, dtype=dtype))"),),
        link="https://github.com/workofart/ml-by-hand/pull/85",
        family="half_optimizer_underflow",
        trap="finite and wrong",
        tool="none: compare with a reference",
        lesson="06_fp16_overflow",
        story="Below 1 the next bfloat16 number is 0.996: a step of 0.001 is rounded back to 1, sixty times over. Keep "
        "a float32 copy of what is trained, and see whether weights move, not only whether gradients exist.",
        difficulty=3,
        tolerance=2e-3,
    )
)
