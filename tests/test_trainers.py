"""The trainers against TRL's own loss, and their evaluate() against a plain float64 loop over the rows."""

import copy
import itertools
import math
import re
import statistics

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import trl
from datasets import Dataset, DatasetDict
from torch.testing import assert_close
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TrainingArguments,
)
from trl.experimental import tpo

from nanlab import trainers
from nanlab.course.materials import load_preferences, tiny_tokenizer, to_scored
from nanlab.errors import InputError
from nanlab.trainers import DPOConfig, DPOTrainer, TokenTPOConfig, TokenTPOTrainer, TPOConfig, TPOTrainer

MAX_LENGTH = 48
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
KINDS = {
    "tpo": (TPOTrainer, TPOConfig, {"beta": 0.2, "tpo_alpha": 0.7, "label_smoothing": 0.1}),
    "tpo without gold": (TPOTrainer, TPOConfig, {"beta": 0.2, "tpo_alpha": 0.0}),
    "tpo-l": (TPOTrainer, TPOConfig, {"loss_type": "tpo-l", "beta": 2.0, "tpo_l_gamma": 0.5}),
    "dpo": (DPOTrainer, DPOConfig, {"beta": 0.3}),
    "dpo with sft": (
        DPOTrainer,
        DPOConfig,
        {"beta": 0.3, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "token-tpo": (TokenTPOTrainer, TokenTPOConfig, {}),
}
METHODS = ("tpo", "dpo", "token-tpo")


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<|padding|>"
    return tokenizer


@pytest.fixture(scope="module")
def preferences():
    return load_preferences()


@pytest.fixture(scope="module")
def rows(preferences):
    """A dozen held-out rows."""
    return [{c: row[c] for c in ("prompt", "chosen", "rejected", "reference")} for row in preferences["held_out"]][:12]


def make_model(seed=0):
    config = GPTNeoXConfig(
        vocab_size=1536, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=256, bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPTNeoXForCausalLM(config).eval()
        for parameter in model.parameters():  # at the default scale all log-probs would be alike
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def make_args(config, folder, **options):
    quiet = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no"}
    options = {"max_length": MAX_LENGTH, "per_device_train_batch_size": 4, "max_steps": 1, **quiet, **options}
    return config(output_dir=str(folder), **options)


def data_for(kind, rows):
    data = Dataset.from_list(rows)
    return to_scored(data) if kind == "token-tpo" else data


def make_trainer(kind, folder, tokenizer, rows, eval_rows=None, model=None, keywords=None, **options):
    trainer, config, own = KINDS[kind]
    keywords = dict(keywords or {})
    if kind.startswith("dpo") and "ref_model" not in keywords and "peft_config" not in keywords:
        keywords["ref_model"] = make_model(seed=1)
    return trainer(
        model or make_model(), args=make_args(config, folder, **{**own, **options}), processing_class=tokenizer,
        train_dataset=data_for(kind, rows), eval_dataset=data_for(kind, eval_rows or rows), **keywords,
    )  # fmt: skip


# --- the plain loop -------------------------------------------------------------------------------------------------


def in_float64(model):
    twin = GPTNeoXForCausalLM(copy.deepcopy(model.config))
    twin.load_state_dict(model.state_dict())
    return twin.double().eval()


@torch.no_grad()
def token_log_probs(model, prompt, completion):
    """One row, no padding, no batch: the log-probs of the completion tokens that are left and have a predecessor."""
    ids = torch.tensor([(prompt + completion)[:MAX_LENGTH]])
    log_probs = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    log_probs = log_probs.gather(1, ids[0, 1:, None])[:, 0]
    return log_probs[max(len(prompt), 1) - 1 :]


def split_ids(tokenizer, row, columns):
    """Prompt and completions as TRL makes them: tokenised together, split where the prompt alone goes another way."""
    end = tokenizer.eos_token  # TRL adds none to a text that ends with one
    whole = [tokenizer(row["prompt"] + row[c].removesuffix(end) + end)["input_ids"] for c in columns]
    alone, start = tokenizer(row["prompt"])["input_ids"], 0
    while start < len(alone) and all(start < len(ids) and ids[start] == alone[start] for ids in whole):
        start += 1
    return alone[:start], [ids[start:] for ids in whole]


def mean(values):
    return statistics.fmean(values) if values else math.nan


def plain_preference_metrics(kind, tokenizer, rows, model, reference=None):
    """What evaluate() shall report, from the formulas of the papers. One row at a time, in float64."""
    options = {"loss_type": "sigmoid", "label_smoothing": 0.0, "tpo_alpha": 1.0, **KINDS[kind][2]}
    is_dpo, beta = kind.startswith("dpo"), options["beta"]
    columns = ("chosen", "rejected") if is_dpo else ("chosen", "rejected", "reference")
    out = {name: [] for name in ("preference", "chosen", "rejected", "rewards/chosen", "rewards/rejected")}
    gold, dropped, excluded = [], 0, 0
    for row in rows:
        if any(not (row[c] or "").strip() for c in columns):
            dropped += 1
            continue
        prompt, completions = split_ids(tokenizer, row, columns)
        log_probs = [token_log_probs(model, prompt, ids) for ids in completions]
        if min(len(x) for x in log_probs) == 0:
            dropped += 1
            continue
        if not all(x.isfinite().all() for x in log_probs):
            excluded += 1
            continue
        by_length = options["loss_type"] == "tpo-l"
        chosen, rejected = ((x.mean() if by_length else x.sum()) for x in log_probs[:2])
        base = [token_log_probs(reference, prompt, ids).sum() for ids in completions] if is_dpo else [0.0, 0.0]
        z = beta * ((chosen - base[0]) - (rejected - base[1])) - (options.get("tpo_l_gamma", 0.0) if by_length else 0.0)
        e = options["label_smoothing"]
        out["preference"].append(float(-(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z)))
        out["chosen"].append(float(chosen))
        out["rejected"].append(float(rejected))
        out["rewards/chosen"].append(float(beta * (chosen - base[0])))
        out["rewards/rejected"].append(float(beta * (rejected - base[1])))
        gold += (-log_probs[0 if is_dpo else 2]).tolist()
    margins = [c - r for c, r in zip(out["rewards/chosen"], out["rewards/rejected"], strict=True)]
    weight = 0.5 if kind == "dpo with sft" else 0.0 if is_dpo else options["tpo_alpha"]
    metrics = {
        "loss": mean(out["preference"]) + (weight * mean(gold) if weight else 0.0),
        "preference_loss": mean(out["preference"]), "logps/chosen": mean(out["chosen"]),
        "logps/rejected": mean(out["rejected"]), "rewards/chosen": mean(out["rewards/chosen"]),
        "rewards/rejected": mean(out["rewards/rejected"]), "rewards/margins": mean(margins),
        "rewards/accuracies": mean([float(m > 0) for m in margins]), "dropped_rows": dropped, "excluded_rows": excluded,
    }  # fmt: skip
    return metrics | ({"nll": mean(gold)} if weight else {})


def plain_policy_metrics(tokenizer, rows, model):
    kept, dropped, excluded = [], 0, 0
    for row in rows:
        reward = row["reward"]
        has_reward = reward is not None and math.isfinite(reward)
        if not (row["completion"] or "").strip() or not has_reward:
            dropped += 1
            continue
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        log_probs = token_log_probs(model, prompt, completion)
        if len(log_probs):
            kept.append((row["group"], reward, log_probs))
        dropped += len(log_probs) == 0
    losses, tokens, advantages = [], [], []
    for group, reward, log_probs in kept:
        peers = [r for g, r, _ in kept if g == group]
        flat = len(peers) == 1 or len(set(peers)) == 1
        advantage = 0.0 if flat else (reward - mean(peers)) / statistics.stdev(peers)
        if not log_probs.isfinite().all():
            excluded += 1
            continue
        losses += (-advantage * log_probs).tolist()
        tokens += log_probs.tolist()
        advantages.append(advantage)
    return {
        "loss": mean(losses), "policy_loss": mean(losses), "logps": mean(tokens), "advantages": mean(advantages),
        "dropped_rows": dropped, "excluded_rows": excluded,
    }  # fmt: skip


def plain_metrics(kind, tokenizer, rows, model, reference=None):
    model = in_float64(model)
    if kind == "token-tpo":
        return plain_policy_metrics(tokenizer, list(data_for(kind, rows)), model)
    return plain_preference_metrics(kind, tokenizer, rows, model, reference and in_float64(reference))


def assert_metrics(found, expected, tolerance=1e-4):
    for name, value in expected.items():
        assert found[f"eval_{name}"] == pytest.approx(value, abs=tolerance, rel=tolerance, nan_ok=True), name
    extra = {"runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch"}
    assert {name.removeprefix("eval_") for name in found} - extra == set(expected)  # nothing else is reported


# --- the loss is TRL's ----------------------------------------------------------------------------------------------

THEIRS = {"tpo": tpo.TPOTrainer, "dpo": trl.DPOTrainer}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "token-tpo"])
def test_loss_and_gradients_are_those_of_trl(kind, tmp_path, tokenizer, rows):
    ours = make_trainer(kind, tmp_path, tokenizer, rows)
    reference = {"ref_model": make_model(seed=1)} if kind.startswith("dpo") else {}
    theirs = THEIRS[kind[:3]](
        make_model(), args=make_args(KINDS[kind][1], tmp_path, **KINDS[kind][2]), processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows), **reference,
    )  # fmt: skip
    batch = theirs._prepare_inputs(theirs.data_collator(list(theirs.train_dataset)))
    results = []
    for trainer in (ours, theirs):
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, copy.copy(batch))
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in trainer.model.named_parameters()}))
    (our_loss, our_gradients), (their_loss, their_gradients) = results
    assert_close(our_loss, their_loss, **TOLERANCE)
    assert max(g.abs().max() for g in their_gradients.values()) > 1e-2  # there is something to compare
    for name, gradient in their_gradients.items():
        assert_close(our_gradients[name], gradient, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


# --- evaluate() -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_is_the_plain_loop_whatever_the_batch_size_and_the_order(kind, tmp_path, tokenizer, preferences, rows):
    """Trap rows included: what has a completion token counts, what has none is dropped and counted."""
    traps = [dict(row) for row in preferences["traps"]]
    mixed = [*({**row, "reward": 0.8, "trap": ""} for row in rows), *traps]
    trainer = make_trainer(kind, tmp_path, tokenizer, rows, mixed)
    reference = make_model(seed=1) if kind.startswith("dpo") else None
    expected = plain_metrics(kind, tokenizer, mixed, make_model(), reference)
    assert 0 < expected["dropped_rows"] < len(mixed)
    order = torch.randperm(len(trainer.eval_dataset), generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = trainer.eval_dataset.select(order)
    for size in (1, 2, 4, 8, 16):
        trainer.args.per_device_eval_batch_size = size
        assert_metrics(trainer.evaluate(), expected)
    assert_metrics(trainer.evaluate(shuffled), expected)


@pytest.mark.parametrize("kind", METHODS)
def test_without_a_max_length_nothing_is_cut(kind, tmp_path, tokenizer, rows, monkeypatch):
    monkeypatch.setattr(f"{__name__}.MAX_LENGTH", 1_000)
    long = [{**row, "reference": row["reference"] * 6, "chosen": row["chosen"] * 6} for row in rows]
    assert max(len(tokenizer(row["reference"])["input_ids"]) for row in long) > 48
    reference = make_model(seed=1) if kind == "dpo" else None
    metrics = make_trainer(kind, tmp_path, tokenizer, rows, long, max_length=None).evaluate()
    assert_metrics(metrics, plain_metrics(kind, tokenizer, long, make_model(), reference))


def test_tokens_left_after_truncation_are_counted_as_the_collator_cuts():
    cuts = {"keep_start": lambda mask, n: mask[:n], "keep_end": lambda mask, n: mask[-n:]}
    for prompt, completion, mode in itertools.product(range(5), range(5), cuts):
        mask = [0] * prompt + [1] * completion
        for limit in (None, *range(1, 10)):
            left = sum((mask if limit is None else cuts[mode](mask, limit))[1:])  # the first token has no predecessor
            counted = trainers._predicted_tokens(prompt, completion, limit, mode)
            assert max(counted, 0) == left, (prompt, completion, limit, mode)


@pytest.mark.parametrize(("mode", "dropped"), [("keep_start", 1), ("keep_end", 0)])
def test_a_prompt_that_is_too_long_leaves_tokens_where_the_end_is_kept(mode, dropped, tmp_path, tokenizer, rows):
    data = [{**rows[0], "prompt": "word " * 200}, *rows]
    metrics = make_trainer("dpo", tmp_path, tokenizer, rows, data, truncation_mode=mode).evaluate()
    assert (metrics["eval_dropped_rows"], metrics["eval_excluded_rows"]) == (dropped, 0)


@pytest.mark.parametrize("kind", METHODS)
def test_a_row_with_nan_is_left_out_and_counted(kind, tmp_path, tokenizer, rows):
    """One token has a NaN embedding; it stands in one row. TRL's accuracy would count that row as 0."""
    others = {i for row in rows for text in row.values() for i in tokenizer(text)["input_ids"]}
    text = next(c for c in map(chr, range(33, 126)) if not set(tokenizer(c)["input_ids"]) & others)
    token = tokenizer(text)["input_ids"][0]
    model = make_model()
    model.gpt_neox.embed_in.weight.data[token] = torch.nan
    dirty = [*rows, {**rows[0], "rejected": text + rows[0]["rejected"]}]
    trainer = make_trainer(kind, tmp_path, tokenizer, rows, dirty, model, per_device_eval_batch_size=4)
    reference = make_model(seed=1) if kind == "dpo" else None
    expected = plain_metrics(kind, tokenizer, dirty, model, reference)
    assert expected["excluded_rows"] == 1
    assert math.isfinite(expected["loss"])
    assert_metrics(trainer.evaluate(), expected)


@pytest.mark.parametrize("kind", METHODS)
def test_a_dead_model_has_no_loss_and_no_accuracy(kind, tmp_path, tokenizer, rows):
    model = make_model()
    model.gpt_neox.embed_in.weight.data.fill_(torch.nan)
    metrics = make_trainer(kind, tmp_path, tokenizer, rows, model=model).evaluate()
    assert math.isnan(metrics["eval_loss"])
    assert math.isnan(metrics.get("eval_rewards/accuracies", math.nan))
    assert metrics["eval_excluded_rows"] == len(data_for(kind, rows))


@pytest.mark.parametrize("kind", METHODS)
def test_each_data_set_has_its_own_count_of_dropped_rows(kind, tmp_path, tokenizer, rows):
    empty = {"prompt": "?", "chosen": "", "rejected": " ", "reference": None}
    trainer = make_trainer(kind, tmp_path, tokenizer, rows, [*rows, empty])
    count = len(data_for(kind, [empty]))
    other = data_for(kind, [*rows, empty, empty])
    assert trainer.evaluate()["eval_dropped_rows"] == count
    assert trainer.evaluate(other)["eval_dropped_rows"] == 2 * count
    assert trainer.evaluate()["eval_dropped_rows"] == count
    assert trainer.dropped_rows == {"train": 0, "eval": count}  # of what it was given at first
    both = trainer.evaluate({"good": data_for(kind, rows), "bad": other})
    assert both["eval_good_dropped_rows"] == 0
    assert both["eval_bad_dropped_rows"] == 2 * count
    assert both["eval_good_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("kind", METHODS)
def test_the_count_of_dropped_rows_goes_with_the_set_and_not_with_a_name(kind, tmp_path, tokenizer, rows):
    empty = {"prompt": "?", "chosen": "", "rejected": " ", "reference": None}
    trainer = make_trainer(kind, tmp_path, tokenizer, [*rows, empty])
    trainer.eval_dataset = {
        name: make_trainer(kind, tmp_path, tokenizer, rows, [*rows, *[empty] * n]).eval_dataset
        for name, n in {"good": 0, "bad": 2}.items()
    }
    one = len(data_for(kind, [empty]))
    counts = {
        "eval_bad_dropped_rows": trainer.evaluate(),
        "test_bad_dropped_rows": trainer.evaluate(metric_key_prefix="test"),
        "eval_dropped_rows": trainer.evaluate("bad"),
        "test_dropped_rows": trainer.predict(trainer.eval_dataset["bad"].shuffle(seed=0)).metrics,
    }
    for name, metrics in counts.items():
        assert metrics[name] == 2 * one, name
    assert trainer.evaluate()["eval_good_dropped_rows"] == 0
    assert trainer.evaluate(trainer.train_dataset)["eval_dropped_rows"] == one


@pytest.mark.parametrize("kind", METHODS)
def test_evaluate_sees_the_last_short_batch(kind, tmp_path, tokenizer, rows):
    trainer = make_trainer(kind, tmp_path, tokenizer, rows, dataloader_drop_last=True, per_device_train_batch_size=5)
    expected = plain_metrics(kind, tokenizer, rows, make_model(), make_model(seed=1) if kind == "dpo" else None)
    for size in (5, 64):
        trainer.args.per_device_eval_batch_size = size
        assert_metrics(trainer.evaluate(), expected)
    assert len(trainer.get_train_dataloader()) == len(trainer.train_dataset) // 5  # training leaves it out as asked


@pytest.mark.parametrize("kind", METHODS)
def test_the_training_log_is_the_same_loss(kind, tmp_path, tokenizer, rows):
    """At learning rate 0 the loss of one step over all rows is the evaluation loss, and so are its parts."""
    size = len(data_for(kind, rows))
    trainer = make_trainer(
        kind, tmp_path, tokenizer, rows, learning_rate=0.0, per_device_train_batch_size=size, logging_steps=1
    )
    trainer.train()
    evaluated = trainer.evaluate()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    shared = [name for name in logged if f"eval_{name}" in evaluated and name != "epoch"]
    assert len(shared) >= 4
    for name in shared:
        assert logged[name] == pytest.approx(evaluated[f"eval_{name}"], abs=1e-4), name


def test_a_log_entry_is_the_mean_over_any_number_of_micro_batches(tmp_path, tokenizer, rows):
    """And the rows do not pile up where nobody logs."""
    trainer = make_trainer("token-tpo", tmp_path, tokenizer, rows)
    trainer.model.train()
    for i in range(12_000):
        loss = torch.tensor([1.0 if i < 1_000 else 0.0, torch.nan])
        trainer._record({"policy_loss": trainers.RowSum(loss, torch.ones(2))})
    assert len(trainer._seen["train"]._tables) < 2_000
    logs = {"eval_loss": 0.0}
    trainer.log(logs)
    assert "policy_loss" not in logs  # an evaluation between two entries takes none of them
    logs = {"loss": 0.0}
    trainer.log(logs)
    assert logs["loss"] == 0.0  # is the Trainer's own
    assert logs["policy_loss"] == pytest.approx(1 / 12, rel=1e-12)
    assert logs["excluded_rows"] == 12_000
    logs = {"loss": 0.0}
    trainer.log(logs)
    assert logs.keys() <= {"loss", "epoch"}  # they were taken


def test_a_second_training_logs_its_own_rows_only(tmp_path, tokenizer, rows):
    """The first one ends between two log entries. Then the head is 0, and a token costs ln 1536."""
    trainer = make_trainer("tpo", tmp_path, tokenizer, rows, max_steps=5, logging_steps=3, learning_rate=0.0)
    trainer.train()
    trainer.model.get_output_embeddings().weight.data.zero_()
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert first["nll"] == pytest.approx(math.log(1536), rel=1e-6)
    assert first["rewards/accuracies"] < 1  # of several rows, not all alike


@pytest.mark.parametrize("kind", ["tpo without gold", "dpo"])
def test_every_mean_is_over_the_same_rows(kind, tmp_path, tokenizer, rows):
    """A token that is ruled out in a rejected answer: log-prob −inf, and the loss of the pair is a perfect 0."""
    others = {i for row in rows for text in row.values() for i in tokenizer(text)["input_ids"]}
    text = next(c for c in map(chr, range(33, 126)) if not set(tokenizer(c)["input_ids"]) & others)
    token, model = torch.tensor(tokenizer(text)["input_ids"]), make_model()
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, token, -math.inf))
    dirty = [*rows, {**rows[0], "rejected": text + rows[0]["rejected"]}]
    trainer = make_trainer(kind, tmp_path, tokenizer, rows, dirty, model)
    metrics, clean = trainer.evaluate(), trainer.evaluate(Dataset.from_list(rows))
    assert metrics["eval_excluded_rows"] == 1
    for name in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert metrics[f"eval_{name}"] == pytest.approx(clean[f"eval_{name}"], rel=1e-5), name


def test_without_any_weight_a_mean_is_nan_and_its_gradient_zero(tmp_path, tokenizer, rows):
    trainer, sums = make_trainer("token-tpo", tmp_path, tokenizer, rows), torch.zeros(2, requires_grad=True)
    loss = trainer._mean(trainers.RowSum(sums, torch.zeros(2)), None)
    loss.backward()
    assert math.isnan(loss)
    assert sums.grad.tolist() == [0.0, 0.0]


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tpo", "tpo-l", "dpo with sft", "token-tpo"])
def test_training_lowers_the_loss_and_leaves_the_reference_alone(kind, tmp_path, tokenizer, rows):
    trainer = make_trainer(kind, tmp_path, tokenizer, rows, learning_rate=3e-3, max_steps=8)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.05
    assert not any(p.equal(weights[name]) for name, p in trainer.model.named_parameters())
    if kind.startswith("dpo"):
        assert_close(trainer.ref_model.state_dict(), make_model(seed=1).state_dict(), atol=0, rtol=0)


def test_dpo_without_a_reference_starts_from_a_frozen_copy(tmp_path, tokenizer, rows):
    model = make_model()
    trainer = make_trainer("dpo", tmp_path, tokenizer, rows, model=model, keywords={"ref_model": None}, max_steps=3,
                           learning_rate=1e-2)  # fmt: skip
    before = trainer.evaluate()
    assert before["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert before["eval_rewards/margins"] == 0
    trainer.train()
    assert_close(trainer.ref_model.state_dict(), make_model().state_dict(), atol=0, rtol=0)
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    assert_metrics(trainer.evaluate(), plain_metrics("dpo", tokenizer, rows, model, make_model()))


def test_a_forward_that_a_model_has_of_its_own_is_left_to_it(tmp_path, tokenizer, rows):
    model, calls = make_model(), []
    forward = model.forward
    model.forward = own = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    trainer = make_trainer("dpo", tmp_path, tokenizer, rows, model=model)
    assert model.forward is own
    trainer.evaluate()
    assert calls


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_deep_copy_of_the_model_runs_its_own_weights(kind, bf16, tmp_path, tokenizer, rows):
    """After training and evaluation: the trap is a `forward` that remembers the original model."""
    model = make_model()
    trainer = make_trainer(kind, tmp_path, tokenizer, rows, model=model, bf16=bf16)
    trainer.train()
    trainer.evaluate()
    ids = torch.tensor([[5, 6, 7]])
    for original in {id(m): m for m in (model, trainer.model, getattr(trainer, "ref_model", None)) if m}.values():
        twin = copy.deepcopy(original)
        assert original(input_ids=ids).logits.abs().sum() > 0
        for parameter in twin.parameters():
            parameter.data.zero_()
        assert twin(input_ids=ids).logits.abs().sum() == 0
        assert type(twin).forward.__qualname__.startswith("GPTNeoX")


@pytest.mark.parametrize("kind", METHODS)
def test_bf16_autocast_stays_near_the_plain_loop(kind, tmp_path, tokenizer, rows):
    trainer = make_trainer(kind, tmp_path, tokenizer, rows, bf16=True)
    expected = plain_metrics(kind, tokenizer, rows, make_model(), make_model(seed=1) if kind == "dpo" else None)
    found = trainer.evaluate()
    assert found["eval_loss"] != pytest.approx(expected["loss"], rel=1e-6)  # autocast did something
    assert found["eval_loss"] == pytest.approx(expected["loss"], abs=0.05)


def one_sgd_step(kind, folder, tokenizer, rows, batch, accumulate):
    trainer = make_trainer(
        kind, folder, tokenizer, rows, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate,
        optim="sgd", learning_rate=1.0, max_grad_norm=0.0, lr_scheduler_type="constant", logging_steps=1,
    )  # fmt: skip
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name: start[name] - p.detach() for name, p in trainer.model.named_parameters()}
    return moved, next(entry for entry in trainer.state.log_history if "loss" in entry), trainer.objective


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_move_with_its_micro_batches(kind, tmp_path, tokenizer, rows):
    """Every token and every row weighs the same, in a short micro-batch at the end too."""
    rows = rows[:8]
    size = len(data_for(kind, rows))
    whole, logged, _ = one_sgd_step(kind, tmp_path, tokenizer, rows, size, 1)
    assert max(g.abs().max() for g in whole.values()) > 1e-2
    for batch in (size // 2, 2, size // 2 - 1):
        accumulated, parts, objective = one_sgd_step(kind, tmp_path, tokenizer, rows, batch, math.ceil(size / batch))
        for name, gradient in whole.items():
            assert_close(accumulated[name], gradient, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
        for name, value in logged.items():
            assert parts[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        added_up = sum(coefficient * parts[name] for name, coefficient in objective.items())
        assert parts["loss"] == pytest.approx(added_up, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_row_weights_are_those_of_the_loss(kind, tmp_path, tokenizer, rows):
    """They are counted before the model runs, and what they count must be what the loss is then divided by."""
    trainer = make_trainer(kind, tmp_path, tokenizer, rows)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    weights, terms = trainer.row_weights(batch), trainer.row_terms(trainer.model, batch)
    for name in trainer.objective:
        assert weights[name].tolist() == terms[name].weights.tolist(), name


def test_lora_uses_the_model_without_adapter_as_reference(tmp_path, tokenizer, rows):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["query_key_value"], task_type="CAUSAL_LM", init_lora_weights=True)
    trainer = make_trainer("dpo", tmp_path, tokenizer, rows, keywords={"peft_config": config}, max_steps=6,
                           learning_rate=3e-2)  # fmt: skip
    assert trainer.ref_model is None
    before = trainer.evaluate()
    assert before["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"] - 0.01
    base = {n.replace(".base_layer", ""): p for n, p in trainer.model.get_base_model().named_parameters()}
    for name, parameter in make_model().named_parameters():
        assert_close(base[name], parameter, atol=0, rtol=0)
    merged = copy.deepcopy(trainer.model).merge_and_unload()
    assert_metrics(after, plain_metrics("dpo", tokenizer, rows, merged, make_model()))


def adapted(seed=0):
    """The model with an adapter that has learned something already."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["query_key_value"], task_type="CAUSAL_LM", init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(make_model(), config)


def test_a_model_that_comes_with_an_adapter_has_a_copy_of_it_as_reference(tmp_path, tokenizer, rows):
    start = adapted().merge_and_unload()
    trainer = make_trainer("dpo", tmp_path, tokenizer, rows, model=adapted(), keywords={"ref_model": None}, max_steps=4,
                           learning_rate=3e-2)  # fmt: skip
    assert "ref" in trainer.model.peft_config
    trainer.train()
    metrics, twin = trainer.evaluate(), copy.deepcopy(trainer.model)
    twin.delete_adapter("ref")
    assert metrics["eval_loss"] < math.log(2) - 0.01
    assert_metrics(metrics, plain_metrics("dpo", tokenizer, rows, twin.merge_and_unload(), start))


@pytest.mark.parametrize("seed", [1, None])  # None: no reference is given
def test_a_compiled_model_is_scored_the_same(seed, tmp_path, tokenizer, rows):
    options = {"torch_compile": True, "torch_compile_backend": "eager", "per_device_eval_batch_size": 4}
    reference = None if seed is None else make_model(seed)
    trainer = make_trainer("dpo", tmp_path, tokenizer, rows, keywords={"ref_model": reference}, **options)
    assert_metrics(trainer.evaluate(), plain_metrics("dpo", tokenizer, rows, make_model(), make_model(seed or 0)))


@pytest.mark.parametrize("kind", ["dpo", "dpo with sft"])
def test_precomputed_reference_gives_the_same_metrics(kind, tmp_path, tokenizer, rows):
    trainer = make_trainer(kind, tmp_path, tokenizer, rows, precompute_ref_log_probs=True)
    assert "ref_chosen_logps" in trainer.eval_dataset.column_names
    assert_metrics(trainer.evaluate(), plain_metrics(kind, tokenizer, rows, make_model(), make_model(seed=1)))
    assert copy.deepcopy(trainer.model).forward.__self__ is not trainer.model


def test_precomputing_needs_no_reference_in_memory(tmp_path, tokenizer, rows):
    options = {"keywords": {"ref_model": None}, "precompute_ref_log_probs": True}
    trainer = make_trainer("dpo", tmp_path, tokenizer, rows, **options)
    assert trainer.ref_model is None
    assert_metrics(trainer.evaluate(), plain_metrics("dpo", tokenizer, rows, make_model(), make_model()))


def test_several_gpus_in_one_process_do_not_split_the_batch(tmp_path, tokenizer, rows, monkeypatch):
    """Without a launcher the Trainer would take DataParallel on a machine with two cards."""
    args = make_args(TPOConfig, tmp_path)
    assert args.device.type == "cpu"  # sets the number of GPUs
    args._n_gpu = 2
    trainer = TPOTrainer(make_model(), args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    assert trainer.args.n_gpu == 1
    assert trainer.get_train_dataloader().total_batch_size == args.per_device_train_batch_size == 4


@pytest.mark.parametrize("kind", METHODS)
def test_all_weights_come_back_from_a_checkpoint(kind, tmp_path, tokenizer, rows):
    """The Trainer alone loses GPT-NeoX's head, which it saves under another name than it looks for."""
    whole = make_trainer(kind, tmp_path, tokenizer, rows, max_steps=4, save_strategy="steps", save_steps=2)
    whole.train()
    resumed = make_trainer(kind, tmp_path / "again", tokenizer, rows, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_close(resumed.model.state_dict(), whole.model.state_dict(), atol=0, rtol=0)
    assert not resumed.model.get_output_embeddings().weight.equal(make_model().get_output_embeddings().weight)


@pytest.mark.parametrize("trained", ["norm", "head"])  # the head has another name in the file
def test_weights_of_two_types_come_back_from_a_checkpoint_unrounded(trained, tmp_path, tokenizer, rows):
    """A frozen model in bf16 with one layer in fp32, the one that is trained."""

    def train(folder, checkpoint=None):
        model = make_model().bfloat16().requires_grad_(False)
        layer = model.get_output_embeddings() if trained == "head" else model.gpt_neox.final_layer_norm
        layer.float().requires_grad_(True)
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-4, "bf16": True}
        trainer = make_trainer("token-tpo", folder, tokenizer, rows, model=model, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert layer.weight.dtype == torch.float32
        assert not layer.weight.bfloat16().float().equal(layer.weight)  # rounding would show
        return layer.weight

    whole = train(tmp_path)
    assert_close(train(tmp_path / "again", str(tmp_path / "checkpoint-2")), whole, atol=0, rtol=0)


@pytest.mark.parametrize("make", [make_model, adapted], ids=["model", "adapter"])
def test_the_best_model_comes_back_whole(make, tmp_path, tokenizer, rows):
    every_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    given = {"model": make(), "keywords": {"ref_model": make_model(seed=1) if make is make_model else None}}
    options = {"max_steps": 4, "learning_rate": 1e-2, **every_step, **best}
    trainer = make_trainer("dpo", tmp_path, tokenizer, rows, **given, **options)
    trainer.train()
    # As "best" counts the highest loss: that of an early step.
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert max(losses) > losses[-1] + 1e-3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(max(losses), abs=1e-5)
    trainer.state.best_model_checkpoint = str(tmp_path / "deleted")
    trainer._load_best_model()  # the Trainer says so, and goes on


def test_a_checkpoint_that_lacks_nothing_is_loaded_by_the_trainer_alone(tmp_path, tokenizer, rows):
    options = {"vocab_size": 1536, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    make = lambda: LlamaForCausalLM(LlamaConfig(**options, num_attention_heads=2, eos_token_id=0, pad_token_id=1))
    trainer = make_trainer("tpo", tmp_path, tokenizer, rows, model=make(), save_strategy="steps", save_steps=1)
    trainer.train()
    other = make_trainer("tpo", tmp_path, tokenizer, rows, model=make())
    other._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert_close(other.model.state_dict(), trainer.model.state_dict(), atol=0, rtol=0)


def test_a_weight_that_a_checkpoint_lacks_stays_as_it_is(tmp_path, tokenizer, rows):
    make_trainer("tpo", tmp_path, tokenizer, rows, save_strategy="steps", save_steps=1).train()
    file, lost = tmp_path / "checkpoint-1" / "model.safetensors", "gpt_neox.final_layer_norm.bias"
    weights = safetensors.torch.load_file(file)
    safetensors.torch.save_file({n: w for n, w in weights.items() if n != lost}, file, metadata={"format": "pt"})
    trainer = make_trainer("tpo", tmp_path, tokenizer, rows, model=make_model(seed=5))
    trainer._load_from_checkpoint(str(file.parent))
    assert trainer.model.gpt_neox.final_layer_norm.bias.equal(make_model(seed=5).gpt_neox.final_layer_norm.bias)
    assert trainer.model.get_output_embeddings().weight.equal(weights["embed_out.weight"])


# --- bad input ------------------------------------------------------------------------------------------------------


def without(rows, column):
    return [{name: value for name, value in row.items() if name != column} for row in rows]


@pytest.mark.parametrize(("kind", "column"), [("tpo", "reference"), ("dpo", "rejected"), ("token-tpo", "reward")])
def test_a_missing_column_is_named(kind, column, tmp_path, tokenizer, rows):
    trainer, config, _ = KINDS[kind]
    data = data_for(kind, rows).remove_columns(column)
    with pytest.raises(InputError, match=f"^train dataset: no column '{column}'; it has prompt"):
        trainer(make_model(), args=make_args(config, tmp_path), train_dataset=data, processing_class=tokenizer)


def refuses(kind, folder, tokenizer, data, match, **options):
    trainer, config, _ = KINDS[kind]
    args = make_args(config, folder, **options)
    with pytest.raises(InputError, match=match) as caught:
        trainer(make_model(), args=args, train_dataset=data, processing_class=tokenizer)
    assert "\n" not in str(caught.value)


def texts_of(kind):
    return {"token-tpo": ("completion",), "dpo": ("chosen", "rejected")}.get(kind, ("chosen", "rejected", "reference"))


def with_value(data, row, column, value):
    """The rows, with another value in one row; None, which fits every type, in that column of the others."""
    return Dataset.from_list([{**r, column: value if i == row else None} for i, r in enumerate(data)])


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("empty", [None, "  "])
def test_a_data_set_without_text_is_refused(kind, empty, tmp_path, tokenizer, rows):
    data = [{**row, **dict.fromkeys(texts_of(kind), empty)} for row in data_for(kind, rows)]
    text = ", ".join(texts_of(kind))
    match = f"^train dataset: no row of {len(data)} has a prompt and text in {text}; fill these columns$"
    refuses(kind, tmp_path, tokenizer, Dataset.from_list(data), match)


@pytest.mark.parametrize("kind", METHODS)
def test_a_row_without_a_prompt_is_dropped(kind, tmp_path, tokenizer, rows):
    data = [{**rows[0], "prompt": None}, *rows]
    dropped = sum(row["prompt"] is None for row in data_for(kind, data))
    assert make_trainer(kind, tmp_path, tokenizer, rows, data).evaluate()["eval_dropped_rows"] == dropped > 0


@pytest.mark.parametrize("kind", ["tpo", "dpo"])
def test_a_data_set_of_tokens_alone_is_refused(kind, tmp_path, tokenizer, rows):
    """TRL keeps the texts beside the tokens, and asks for them."""
    trainer = make_trainer(kind, tmp_path, tokenizer, rows)
    tokens = trainer.train_dataset.remove_columns(["chosen", "rejected"])
    with pytest.raises(InputError, match=r"^eval dataset: no column 'chosen'; it has"):
        trainer.evaluate(tokens)
    refuses(kind, tmp_path, tokenizer, tokens, "^train dataset: no column 'chosen'; it has")


@pytest.mark.parametrize("kind", METHODS)
def test_a_data_set_without_a_token_in_max_length_is_refused(kind, tmp_path, tokenizer, rows):
    data = data_for(kind, rows)
    match = f"^train dataset: no row of {len(data)} with text has .* max_length=4; raise max_length or shorten"
    refuses(kind, tmp_path, tokenizer, data, match, max_length=4)


def test_a_data_set_without_a_reward_is_refused(tmp_path, tokenizer, rows):
    for missing in (None, math.nan, math.inf):
        data = [{**row, "reward": missing} for row in data_for("token-tpo", rows)]
        match = f"^train dataset: no row of {len(data)} with text has a finite reward; "
        refuses("token-tpo", tmp_path, tokenizer, Dataset.from_list(data), match)


@pytest.mark.parametrize("kind", METHODS)
def test_an_empty_data_set_is_refused(kind, tmp_path, tokenizer, rows):
    for empty in (data_for(kind, rows).select([]), Dataset.from_list([])):
        refuses(kind, tmp_path, tokenizer, empty, "^train dataset: has no rows; give it one at least$")
    trainer = make_trainer(kind, tmp_path, tokenizer, rows)
    with pytest.raises(InputError, match=r"^eval dataset: has no rows; give it one"):
        trainer.evaluate(data_for(kind, rows).select([]))


OTHER_DATA = {
    "list": list, "IterableDataset": lambda data: data.to_iterable_dataset(),
    "DatasetDict": lambda data: DatasetDict({"a": data}),
}  # fmt: skip


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("other", OTHER_DATA)
def test_what_is_no_data_set_is_refused(kind, other, tmp_path, tokenizer, rows):
    data = OTHER_DATA[other](data_for(kind, rows))
    refuses(kind, tmp_path, tokenizer, data, rf"^train dataset: is a {other}; give a datasets\.Dataset")
    if other != "DatasetDict":  # several sets to evaluate on may come in a dict
        with pytest.raises(InputError, match=rf"^eval dataset: is a {other}; give a datasets\.Dataset"):
            make_trainer(kind, tmp_path, tokenizer, rows).evaluate(data)


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("value", [5, [1, 2], {"role": "user"}])
def test_a_text_that_is_none_is_named_with_its_row(kind, value, tmp_path, tokenizer, rows):
    for column in ("prompt", *texts_of(kind)):
        data = with_value(data_for(kind, rows), 2, column, value)
        match = rf"^train dataset, row 2: {column} is {re.escape(repr(value)[:6])}.*; give text"
        refuses(kind, tmp_path, tokenizer, data, match)


@pytest.mark.parametrize(
    ("column", "value", "wish"),
    [("reward", "1.0", "a number"), ("reward", [1.0], "a number"), ("group", [1], "an int or a str"),
     ("group", {"a": 1}, "an int or a str")],
)  # fmt: skip
def test_a_reward_or_group_of_another_type_is_named_with_its_row(column, value, wish, tmp_path, tokenizer, rows):
    data = with_value(data_for("token-tpo", rows), 3, column, value)
    row = 0 if column == "group" else 3  # without a group there are no advantages; without a reward the row is dropped
    match = rf"^train dataset, row {row}: {column} is {re.escape(repr(data[row][column]))}; give {wish}"
    refuses("token-tpo", tmp_path, tokenizer, data, match)


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_row_without_a_group_is_named(value, tmp_path, tokenizer, rows):
    """All such rows would make one group, or one each."""
    data = [{**row, "group": value if i == 5 else 0.0} for i, row in enumerate(data_for("token-tpo", rows))]
    match = f"^train dataset, row 5: group is {value}; give an int or a str$"
    refuses("token-tpo", tmp_path, tokenizer, Dataset.from_list(data), match)


REFUSED = {
    "tpo": [{"loss_type": "ipo"}, {"loss_type": "hinge"}, {"loss_type": None}],
    "dpo": [
        {"loss_type": "ipo"}, {"loss_type": ["sft"]}, {"f_divergence_type": "forward_kl"}, {"ld_alpha": 0.5},
        {"use_weighting": True}, {"loss_type": None}, {"loss_type": []},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "option"), [(kind, option) for kind in REFUSED for option in REFUSED[kind]])
def test_an_option_that_our_loss_does_not_cover_is_refused(kind, option, tmp_path, tokenizer, rows):
    trainer, config, _ = KINDS[kind]
    args = make_args(config, tmp_path, **option)
    with pytest.raises(InputError, match=next(iter(option))):
        trainer(make_model(), args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


@pytest.mark.parametrize(
    ("kinds", "weights", "factors"),
    [(["sigmoid"] * 2, [1.0, 1.0], (2.0, 0.0)), (["sft", "sigmoid"], None, (1.0, 1.0)),
     (["sigmoid", "sft"] * 2, [0.5, 1.0, 0.25, 2.0], (0.75, 3.0))],
)  # fmt: skip
def test_a_loss_named_twice_counts_twice(kinds, weights, factors, tmp_path, tokenizer, rows):
    options = {"loss_type": kinds, "loss_weights": weights}
    trainer = make_trainer("dpo", tmp_path, tokenizer, rows, **options)
    metrics = trainer.evaluate()
    expected = plain_metrics("dpo with sft", tokenizer, rows, make_model(), make_model(seed=1))
    preference, nll = expected["preference_loss"], expected["nll"]
    assert metrics["eval_loss"] == pytest.approx(factors[0] * preference + factors[1] * nll, rel=1e-5)
    assert metrics["eval_preference_loss"] == pytest.approx(preference, rel=1e-5)


@pytest.mark.parametrize("kind", METHODS)
def test_a_router_loss_is_refused_and_not_forgotten(kind, tmp_path, tokenizer, rows):
    """A mixture of experts asks for it in its config alone; with coefficient 0 there is none."""

    def trainer(coefficient, **options):
        config = MixtralConfig(
            vocab_size=1536, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
            pad_token_id=1, output_router_logits=True, router_aux_loss_coef=coefficient,
        )  # fmt: skip
        return make_trainer(kind, tmp_path, tokenizer, rows, model=MixtralForCausalLM(config).eval(), **options)

    with pytest.raises(InputError, match=r"^router_aux_loss_coef: \w+ computes no router loss .* set it to 0\.0 in"):
        trainer(0.5)
    off = {"router_aux_loss_coef": 0.0} if kind == "dpo" else {}  # older releases of TRL ask for it by default
    assert math.isfinite(trainer(0.0, **off).evaluate()["eval_loss"])


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("name", ["compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func"])
def test_a_function_that_would_never_be_called_is_refused(kind, name, tmp_path, tokenizer, rows):
    with pytest.raises(InputError, match=f"^{name}: {KINDS[kind][0].__name__} never calls it; leave it out"):
        make_trainer(kind, tmp_path, tokenizer, rows, keywords={name: lambda *args: {}})


def test_token_tpo_needs_no_token_to_pad_with(tmp_path, tokenizer, rows):
    expected = make_trainer("token-tpo", tmp_path, tokenizer, rows).evaluate()
    found = make_trainer("token-tpo", tmp_path, tiny_tokenizer(), rows).evaluate()
    assert tiny_tokenizer().pad_token is None
    assert found["eval_loss"] == expected["eval_loss"]


def test_token_tpo_takes_arguments_that_know_no_max_length(tmp_path, tokenizer, rows):
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    data = data_for("token-tpo", rows)
    metrics = TokenTPOTrainer(make_model(), args, data, data, tokenizer).evaluate()
    assert_metrics(metrics, plain_metrics("token-tpo", tokenizer, rows, make_model()))


def test_token_tpo_asks_for_the_tokenizer(tmp_path, rows):
    with pytest.raises(InputError, match="processing_class is missing: give"):
        TokenTPOTrainer(make_model(), make_args(TokenTPOConfig, tmp_path), data_for("token-tpo", rows))
    endless = tiny_tokenizer()
    endless.eos_token = None
    refuses("token-tpo", tmp_path, endless, data_for("token-tpo", rows), "^processing_class has no eos_token: set it")
