"""Cases: what the rows do to a real model and a real trainer."""

from __future__ import annotations

import torch

from nanlab.course.cases.frame import Case
from nanlab.course.cases.helpers import preference_trainer
from nanlab.course.materials import load_model, load_preferences

CASES: list[Case] = []


# -- trl-5662 --------------------------------------------------------------------------------------------------------
def preference_rows():
    rows = load_preferences(split="held_out").select(range(4)).to_list()
    for row in rows[2:]:  # questions with a long context
        row["prompt"] = "Context. " * 30 + row["prompt"]
    return rows


def evaluate_tpo():
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    model, tokenizer = load_model("tiny")
    trainer = preference_trainer(TPOTrainer, TPOConfig, model, tokenizer, preference_rows(), max_length=48)

    def step():
        metrics = trainer.evaluate()
        return {"log": [metrics], "eval_loss": metrics["eval_loss"]}

    return step


def evaluate_tpo_fixed():
    from nanlab.trainers import TPOConfig, TPOTrainer

    model, tokenizer = load_model("tiny")  # this trainer drops, with a count, the rows without a completion token
    trainer = preference_trainer(TPOTrainer, TPOConfig, model, tokenizer, preference_rows(), max_length=48)

    def step():
        metrics = trainer.evaluate()
        return {"log": [metrics], "eval_loss": metrics["eval_loss"]}

    return step


def evaluate_tpo_reference():
    """TRL's trainer and a float64 model, on the rows that have a completion."""
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    model, tokenizer = load_model("tiny", dtype=torch.float64)
    rows = preference_rows()[:2]
    metrics = preference_trainer(TPOTrainer, TPOConfig, model, tokenizer, rows, max_length=48).evaluate()
    return {"eval_loss": metrics["eval_loss"]}


CASES.append(
    Case(
        id="trl-5662",
        title="evaluate() before a single step",
        symptom="TPOTrainer on a public triple-preference set. The training loss is finite throughout; evaluate() "
        "gives an eval_loss of nan, before training and after it. A small max_length is all I changed.",
        broken=evaluate_tpo,
        fixed=evaluate_tpo_fixed,
        reference=evaluate_tpo_reference,
        parts=(preference_rows,),
        cause="empty_mean",
        phase="forward",
        line="metrics = trainer.evaluate()",
        also=(
            (
                "empty_mean",
                "forward",
                "trainer = preference_trainer(TPOTrainer, TPOConfig, model, tokenizer, preference_rows(), "
                "max_length=48)",
            ),
        ),
        link="https://github.com/huggingface/trl/issues/5662",
        family="empty_selection",
        lesson="10_case_tpo_evaluate",
        story="Two prompts alone fill max_length. In a batch of such rows the gold answers have no token left, and a "
        "mean over nothing is nan; one such batch makes the average nan. Look at the prompts' lengths before "
        "you evaluate.",
        difficulty=2,
    )
)


# -- hf-16711 --------------------------------------------------------------------------------------------------------
def small_bert():
    from transformers import BertConfig, BertForMaskedLM

    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(vocab_size=64, **size)).eval()


def masked_language_model():
    model, ids, mask_id = small_bert(), torch.tensor([[2, 17, 23, 3]]), 4

    def step():
        losses = []
        for epoch in range(4):
            chosen = torch.rand(ids.shape) < 0.15
            labels = ids.masked_fill(~chosen, -100)
            output = model(input_ids=ids.masked_fill(chosen, mask_id), labels=labels)
            print(f"epoch {epoch}: loss {output.loss:.4f}")
            losses.append(output.loss)
        return {"losses": torch.stack(losses)}

    return step


def masked_language_model_fixed():
    model, ids, mask_id = small_bert(), torch.tensor([[2, 17, 23, 3]]), 4

    def step():
        losses = []
        for _ in range(4):
            dice = torch.rand(ids.shape)
            chosen = dice <= max(0.15, dice.min())  # at least one, whatever the dice say
            labels = ids.masked_fill(~chosen, -100)
            output = model(input_ids=ids.masked_fill(chosen, mask_id), labels=labels)
            losses.append(output.loss)
        return {"losses": torch.stack(losses)}

    return step


def masked_language_model_reference():
    """The same model in float64: mean of −log softmax over the places, one by one."""
    torch.manual_seed(0)
    model, ids, losses = small_bert(), torch.tensor([[2, 17, 23, 3]]), []
    for dice in [torch.rand(1, 4)[0].tolist() for _ in range(4)]:
        places = [i for i in range(4) if dice[i] < 0.15] or [dice.index(min(dice))]
        masked = ids.clone()
        masked[0, places] = 4
        with torch.no_grad():
            log_probs = torch.softmax(model.double()(input_ids=masked).logits[0], -1).log()
        losses.append(-sum(log_probs[i, ids[0, i]] for i in places) / len(places))
    return {"losses": torch.stack(losses)}


CASES.append(
    Case(
        id="hf-16711",
        title="BERT, batch size 1, short sentences",
        symptom="Pretraining a small BERT on tweets with batch size 1. Now and then a loss is nan. The same sentence "
        "is fine in the next epoch.",
        broken=masked_language_model,
        fixed=masked_language_model_fixed,
        reference=masked_language_model_reference,
        parts=(small_bert,),
        cause="empty_mean",
        phase="forward",
        line="output = model(input_ids=ids.masked_fill(chosen, mask_id), labels=labels)",
        also=(("empty_mean", "forward", "chosen = torch.rand(ids.shape) < 0.15"),),
        link="https://github.com/huggingface/transformers/issues/16711",
        family="empty_selection",
        story="Each token is masked with probability 0.15; of four tokens none is chosen in half of all cases, and "
        "then no label counts. What is random must be valid for every draw.",
        difficulty=1,
    )
)


# -- ms-swift-8123 ---------------------------------------------------------------------------------------------------
def decoupled_advantages():
    log_probs = torch.randn(2, 4, requires_grad=True)
    rewards = torch.rand(2, 4, 2)  # prompts, completions, reward functions
    rewards[1, 2, 0] = float("nan")

    def step():
        centred = rewards - rewards.mean(1, keepdim=True)
        scaled = (centred / (rewards.std(1, keepdim=True) + 1e-8)).sum(-1)
        advantages = (scaled - scaled.mean()) / (scaled.std() + 1e-8)
        loss = -(advantages * log_probs).mean()
        loss.backward()
        print(f"loss {loss.nan_to_num(0.0):.4f}, grad_norm {log_probs.grad.norm():.4f}")
        return {"loss": loss}

    return step


def decoupled_advantages_fixed():
    log_probs = torch.randn(2, 4, requires_grad=True)
    rewards = torch.rand(2, 4, 2)
    rewards[1, 2, 0] = float("nan")

    def step():
        known = ~rewards.isnan()
        counts = known.sum(1, keepdim=True)
        centred = torch.where(known, rewards - rewards.nanmean(1, keepdim=True), 0.0)
        spread = (centred.square().sum(1, keepdim=True) / (counts - 1)).sqrt()
        scaled = (centred / (spread + 1e-8)).sum(-1)
        advantages = (scaled - scaled.mean()) / (scaled.std() + 1e-8)
        loss = -(advantages * log_probs).mean()
        loss.backward()
        return {"loss": loss}

    return step


def decoupled_advantages_reference():
    """Function by function over the rewards there are, in float64; a missing one adds nothing to its completion."""
    torch.manual_seed(0)
    log_probs, rewards = torch.randn(2, 4).double(), torch.rand(2, 4, 2).double()
    rewards[1, 2, 0] = float("nan")
    scaled = torch.zeros(2, 4).double()
    for prompt in range(2):
        for function in range(2):
            there = [i for i in range(4) if rewards[prompt, i, function] == rewards[prompt, i, function]]
            values = rewards[prompt, there, function]
            scaled[prompt, there] += (values - values.mean()) / values.std()
    return {"loss": -((scaled - scaled.mean()) / scaled.std() * log_probs).mean()}


CASES.append(
    Case(
        id="ms-swift-8123",
        title="loss 0.0, grad_norm nan",
        symptom="One of my reward functions calls a service that sometimes fails and then gives None. The run "
        "completes with a loss of 0.0 in every line, grad_norm is nan, and the model has learned nothing.",
        broken=decoupled_advantages,
        fixed=decoupled_advantages_fixed,
        reference=decoupled_advantages_reference,
        cause="bad_input",
        phase="data",
        line="centred = rewards - rewards.mean(1, keepdim=True)",
        also=(("bad_input", "data", 'rewards[1, 2, 0] = float("nan")'),),
        link="https://github.com/modelscope/ms-swift/issues/8123",
        family="dirty_data",
        lesson="02_zero_std",
        story="One missing reward makes the mean and spread of its group nan, and normalising over the batch hands "
        "it to all. Treat a missing reward where it comes in: leave it out of the statistics, or drop the "
        "completion.",
        difficulty=2,
    )
)
