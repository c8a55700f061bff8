"""Cases: logarithms, exponentials and roots at the edge of their domain."""

from __future__ import annotations

import math

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
        also=(("log_of_zero", "forward", "log_odds = chosen - torch.log1p(-torch.exp(chosen))"),),
        link="https://github.com/huggingface/trl/issues/2564",
        family="log0_or_inf_times_0",
        story="A log-prob of exactly 0 means p = 1: log(1 − p) is −inf and its slope infinite. The sigmoid swallows "
        "the inf in the loss, the gradient keeps 0 · inf. A finite loss says nothing about its gradient.",
        difficulty=2,
    )
)


# -- trl-3015 --------------------------------------------------------------------------------------------------------
def kl_penalty():
    policy = torch.tensor([-1.25, -13.5, -0.5], dtype=torch.float16, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -0.25], dtype=torch.float16)

    def step():
        difference = reference - policy
        penalty = torch.exp(difference) - difference - 1
        kl = penalty.mean()
        kl.backward()
        return {"kl": kl, "gradient": policy.grad}

    return step


def kl_penalty_fixed():
    policy = torch.tensor([-1.25, -13.5, -0.5], dtype=torch.float16).float().requires_grad_()
    reference = torch.tensor([-1.5, -1.0, -0.25], dtype=torch.float16).float()

    def step():
        difference = reference - policy  # float32 holds exp(88)
        kl = (torch.expm1(difference) - difference).mean()
        kl.backward()
        return {"kl": kl, "gradient": policy.grad}

    return step


def kl_penalty_reference():
    d = torch.tensor([-0.25, 12.5, 0.25]).double()
    return {"kl": (torch.expm1(d) - d).mean(), "gradient": -torch.expm1(d) / 3}


CASES.append(
    Case(
        id="trl-3015",
        title="The KL term of GRPO becomes inf",
        symptom="GRPO with a KL penalty: fine for some hundred steps. Then the policy has drifted on one token, kl and "
        "loss are inf, and the next step is nan. Lower learning rates only delay it.",
        broken=kl_penalty,
        fixed=kl_penalty_fixed,
        reference=kl_penalty_reference,
        cause="overflow",
        phase="forward",
        line="penalty = torch.exp(difference) - difference - 1",
        link="https://github.com/huggingface/trl/issues/3015",
        family="kl_ratio_exp",
        story="The estimator exponentiates a difference of log-probs, and e^12.5 is beyond float16; in float32 the "
        "same happens at 88.8. Exponentiate in float32, and bound the argument if tokens can drift that far.",
        difficulty=1,
    )
)


# -- pt-2421 ---------------------------------------------------------------------------------------------------------
def pull_to_centre():
    offsets = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]], requires_grad=True)
    optimizer = torch.optim.SGD([offsets], lr=0.1)

    def step():
        distances = torch.sqrt((offsets**2).sum(1))
        loss = distances.mean()
        loss.backward()
        print(f"loss {loss:.4f}")
        optimizer.step()
        return {"loss": loss, "offsets": offsets}

    return step


def pull_to_centre_fixed():
    offsets = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]], requires_grad=True)
    optimizer = torch.optim.SGD([offsets], lr=0.1)

    def step():
        distances = torch.linalg.vector_norm(offsets, dim=1)  # its slope at 0 is defined as 0
        loss = distances.mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "offsets": offsets}

    return step


def pull_to_centre_reference():
    """Each point moves by 0.1/3 towards the centre; the one that is there stays."""
    directions = torch.tensor([[0.6, 0.8], [0.0, 0.0], [1.0, 0.0]]).double()
    return {"loss": 2.0, "offsets": torch.tensor([[3.0, 4], [0, 0], [1, 0]]).double() - directions / 30}


CASES.append(
    Case(
        id="pt-2421",
        title="The point that was already there",
        symptom="I pull points towards a centre with a distance loss. The loss is right; after one step one of my "
        "points is nan, and it is the one that needed no pull.",
        broken=pull_to_centre,
        fixed=pull_to_centre_fixed,
        reference=pull_to_centre_reference,
        cause="gradient_at_edge",
        phase="backward",
        line="distances = torch.sqrt((offsets**2).sum(1))",
        link="https://github.com/pytorch/pytorch/issues/2421",
        family="nan_times_zero_mask",
        story="The slope of the root at 0 is infinite, and it meets the 0 of the square: inf · 0. vector_norm knows "
        "the edge. An eps under the root also is finite, but changes every distance a little.",
        difficulty=1,
    )
)


# -- pt-68425 --------------------------------------------------------------------------------------------------------
def log1mexp(x):
    near = torch.log(-torch.expm1(x))
    far = torch.log1p(-torch.exp(x))
    return torch.where(x > -math.log(2), near, far)


def stable_odds():
    chosen = torch.tensor([-0.5, -2.0, -1e-8], requires_grad=True)

    def step():
        log_odds = chosen - log1mexp(chosen)
        loss = -F.logsigmoid(log_odds).mean()
        loss.backward()
        return {"loss": loss, "gradient": chosen.grad}

    return step


def stable_odds_fixed():
    chosen = torch.tensor([-0.5, -2.0, -1e-8], requires_grad=True)

    def safe_log1mexp(x):
        is_near = x > -math.log(2)
        near = torch.log(-torch.expm1(torch.where(is_near, x, -1.0)))  # neither branch sees what is not its own
        far = torch.log1p(-torch.exp(torch.where(is_near, -1.0, x)))
        return torch.where(is_near, near, far)

    def step():
        log_odds = chosen - safe_log1mexp(chosen)
        loss = -F.logsigmoid(log_odds).mean()
        loss.backward()
        return {"loss": loss, "gradient": chosen.grad}

    return step


def stable_odds_reference():
    """sigmoid of the log-odds is p itself: the loss is the mean of −log p, and its slope −1/3 everywhere."""
    chosen = torch.tensor([-0.5, -2.0, -1e-8]).double()
    return {"loss": -chosen.mean(), "gradient": torch.full((3,), -1 / 3)}


CASES.append(
    Case(
        id="pt-68425",
        title="After the stable version",
        symptom="I replaced log(1 - exp(x)) by the well-known stable version with two branches. The loss agrees with "
        "float64 to the last digit. The gradient of very sure answers is nan as before.",
        broken=stable_odds,
        fixed=stable_odds_fixed,
        reference=stable_odds_reference,
        parts=(log1mexp,),
        cause="gradient_at_edge",
        phase="backward",
        line="far = torch.log1p(-torch.exp(x))",
        also=(("log_of_zero", "forward", "far = torch.log1p(-torch.exp(x))"),),
        link="https://github.com/pytorch/pytorch/issues/68425",
        family="log0_or_inf_times_0",
        story="where() chooses between results. The branch not chosen still gets a gradient, 0, and its slope is "
        "infinite: nan. TRL's log1mexp has this form. Choose the input of each branch, not only the output.",
        difficulty=3,
    )
)


# -- miles-1363 ------------------------------------------------------------------------------------------------------
def ppo_loss():
    old = torch.tensor([-0.75, -14.0, -2.0], dtype=torch.float16)
    new = torch.tensor([-0.5, -1.5, -2.25], dtype=torch.float16, requires_grad=True)
    advantages = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float16)

    def step():
        ratio = torch.exp(new - old)
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        loss.backward()
        return {"loss": loss, "gradient": new.grad}

    return step


def ppo_loss_fixed():
    old = torch.tensor([-0.75, -14.0, -2.0])
    new = torch.tensor([-0.5, -1.5, -2.25], requires_grad=True)
    advantages = torch.tensor([0.5, 0.0, -1.0])

    def step():
        ratio = torch.exp((new - old).clamp(max=20))  # in float32, and far outside of the clip range in any case
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        loss.backward()
        return {"loss": loss, "gradient": new.grad}

    return step


def ppo_loss_reference():
    """By hand: 1.2 · 0.5 and no slope above the clip; 0; and −0.8 below it, where minimum takes the clipped one."""
    return {"loss": -(1.2 * 0.5 + 0 - 0.8) / 3, "gradient": torch.zeros(3)}


CASES.append(
    Case(
        id="miles-1363",
        title="PPO clips its ratio, does it not?",
        symptom="PPO on long conversations. The ratio is clipped to [0.8, 1.2] and that token's advantage is 0, so "
        "nothing should come of it. The loss is nan.",
        broken=ppo_loss,
        fixed=ppo_loss_fixed,
        reference=ppo_loss_reference,
        cause="overflow",
        phase="forward",
        line="ratio = torch.exp(new - old)",
        link="https://github.com/radixark/miles/pull/1363",
        family="kl_ratio_exp",
        story="The ratio is inf in half precision before anything is clipped, and inf · 0 is nan. The clipped branch "
        "does not help, as the other one is computed too. Bound the exponent, not the exponential.",
        difficulty=2,
    )
)


# -- trl-7252 --------------------------------------------------------------------------------------------------------
def entropy_bonus():
    logits = torch.tensor([[1.0, 0.5, -1.0], [0.0, 2.0, 1.0]], requires_grad=True)
    allowed = torch.tensor([True, True, False])  # a token that must not be sampled

    def step():
        log_probs = F.log_softmax(logits.masked_fill(~allowed, -torch.inf), -1)
        products = torch.exp(log_probs) * log_probs
        entropy = -products.nan_to_num(nan=0.0).sum(-1).mean()
        entropy.backward()
        return {"entropy": entropy, "gradient": logits.grad}

    return step


def entropy_bonus_fixed():
    logits = torch.tensor([[1.0, 0.5, -1.0], [0.0, 2.0, 1.0]], requires_grad=True)
    allowed = torch.tensor([True, True, False])

    def step():
        log_probs = F.log_softmax(logits[:, allowed], -1)  # what is not there cannot be infinite
        entropy = -(torch.exp(log_probs) * log_probs).sum(-1).mean()
        entropy.backward()
        return {"entropy": entropy, "gradient": logits.grad}

    return step


def entropy_bonus_reference():
    """dH/dl = −p (log p + H), in float64, halved by the mean over two rows."""
    p = torch.softmax(torch.tensor([[1.0, 0.5], [0.0, 2.0]]).double(), -1)
    entropy = -(p * p.log()).sum(-1, keepdim=True)
    slope = -p * (p.log() + entropy) / 2
    return {"entropy": entropy.mean(), "gradient": torch.cat([slope, torch.zeros(2, 1)], 1)}


CASES.append(
    Case(
        id="trl-7252",
        title="The entropy is fine now",
        symptom="One token is forbidden, and the entropy was nan. I added nan_to_num and the entropy is exact. With "
        "the entropy bonus switched on, all weights are nan after the first step.",
        broken=entropy_bonus,
        fixed=entropy_bonus_fixed,
        reference=entropy_bonus_reference,
        cause="gradient_at_edge",
        phase="backward",
        line="products = torch.exp(log_probs) * log_probs",
        also=(("zero_times_inf", "forward", "products = torch.exp(log_probs) * log_probs"),),
        link="https://github.com/huggingface/trl/pull/7252",
        family="guard_hides_fault",
        story="nan_to_num repairs what comes out; the product 0 · -inf stays in the graph, and on the way back its "
        "slope is 0 · -inf again. A guard behind the fault hides it from the log only. Do not compute what is "
        "forbidden.",
        difficulty=3,
    )
)


# -- nemo-rl-4154 ----------------------------------------------------------------------------------------------------
def keep_top(logits, k):
    lowest = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < lowest, -torch.inf)


def sampling_mismatch():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.5, 2.5, 0.4, 0.0], [1.0, 0.0, 3.0, 2.0]])
    tokens, generated = torch.tensor([0, 2, 2]), torch.tensor([-0.3, -2.2, -0.4])  # by another engine

    def step():
        log_probs = keep_top(logits, k=2).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        mask = log_probs.isfinite().float()
        error = (log_probs - generated).abs() * mask
        return {"mean |error|": error.sum() / mask.sum()}

    return step


def sampling_mismatch_fixed():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.5, 2.5, 0.4, 0.0], [1.0, 0.0, 3.0, 2.0]])
    tokens, generated = torch.tensor([0, 2, 2]), torch.tensor([-0.3, -2.2, -0.4])

    def step():
        log_probs = keep_top(logits, k=2).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        mask = log_probs.isfinite()
        error = (log_probs[mask] - generated[mask]).abs()  # selected, not multiplied
        return {"mean |error|": error.mean()}

    return step


def sampling_mismatch_reference():
    """By hand: the two tokens that are among the best two of their row."""
    first, third = -math.log(1 + math.exp(-1)), -math.log(1 + math.exp(-1))
    return {"mean |error|": (abs(first + 0.3) + abs(third + 0.4)) / 2}


CASES.append(
    Case(
        id="nemo-rl-4154",
        title="It is masked, I swear",
        symptom="RL with top-k sampling. The sampler and the trainer sometimes disagree on which tokens are the top k. "
        "I mask those tokens out of every average, and the averages are nan.",
        broken=sampling_mismatch,
        fixed=sampling_mismatch_fixed,
        reference=sampling_mismatch_reference,
        parts=(keep_top,),
        cause="zero_times_inf",
        phase="forward",
        line="error = (log_probs - generated).abs() * mask",
        link="https://github.com/NVIDIA-NeMo/RL/pull/4154",
        family="nan_times_zero_mask",
        story="A token outside the top k has a log-prob of −inf, and inf · 0 is nan: multiplying by a mask does not "
        "remove what is not finite. Index, or use where before the value is used.",
        difficulty=2,
    )
)
