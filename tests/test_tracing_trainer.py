"""locate(trainer): the failing batch is found, replayed and read out; the trainer is then what it was, bit for bit."""

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from packaging.version import Version
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from nanlab import locate
from nanlab.errors import InputError

HERE = Path(__file__).name
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]


def line(marker: str) -> str:
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{HERE}:{next(i for i, t in enumerate(text, 1) if t.endswith('# ' + marker))}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    specials = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **specials)
    tokenizer.add_tokens([w for w in WORDS if w.startswith("w")])
    return tokenizer


def make_model(dtype=torch.float32, dropout: float = 0.1) -> GPTNeoXForCausalLM:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64,
        max_position_embeddings=64, hidden_dropout=dropout, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).to(dtype)


def rows(count: int = 8, empty: tuple[int, ...] = ()) -> Dataset:
    """Row i is token i + 3, six times; an 'empty' row has no label."""
    data = [{"input_ids": [i + 3] * 6, "labels": [-100] * 6 if i in empty else [i + 3] * 6} for i in range(count)]
    return Dataset.from_list(data)


def arguments(folder, kind=TrainingArguments, **more):
    settings = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 8, "logging_steps": 1}
    return kind(str(folder), report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **{**settings, **more})


def fingerprint(trainer) -> dict:
    """Everything that must not change."""
    copies = lambda ts: [None if t is None else t.detach().clone() for t in ts]
    simple = (int, float, str, bool, type(None), list, dict)
    return {
        "parameters": copies(trainer.model.parameters()),
        "gradients": copies(p.grad for p in trainer.model.parameters()),
        "buffers": copies(trainer.model.buffers()),
        "optimizer": copy.deepcopy(trainer.optimizer.state_dict()) if trainer.optimizer else None,
        "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()],
        "state": copy.deepcopy(vars(trainer.state)),
        "control": copy.deepcopy(vars(trainer.control)),
        "attributes": {
            k: copy.deepcopy(v) for k, v in vars(trainer).items() if isinstance(v, simple) and "dataset" not in k
        },
        "callbacks": [type(c).__name__ for c in trainer.callback_handler.callbacks],
        "modes": [m.training for m in trainer.model.modules()],
        "model": sorted(vars(trainer.model)),
        "names": sorted(vars(trainer)),
    }


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def located(trainer, mode: str = "train", **more):
    """The report, after checking that nothing has changed."""
    before = fingerprint(trainer)
    report = locate(trainer, mode=mode, **more)
    after = fingerprint(trainer)
    changed = [name for name in before if not same(before[name], after[name])]
    assert not changed, changed
    assert report.exception is None, report.exception
    return report


def test_a_train_batch_without_labels(tmp_path):
    trainer = Trainer(
        make_model(), arguments(tmp_path, per_device_train_batch_size=1), train_dataset=rows(empty=(5,)),
        processing_class=make_tokenizer(),
    )  # fmt: skip
    report = located(trainer)
    assert (report.found, report.cause, report.phase) == (True, "empty_mean", "forward")
    assert report.library.startswith("transformers/loss/")
    assert report.rows == [0]
    assert report.texts == {0: "w5 w5 w5 w5 w5 w5"}
    assert f"batch {report.batch}" in str(report)


def test_an_eval_batch_without_labels_is_named_by_its_number(tmp_path):
    trainer = Trainer(
        make_model(), arguments(tmp_path), eval_dataset=rows(empty=(4, 5)), processing_class=make_tokenizer()
    )
    report = located(trainer, "eval")
    assert (report.cause, report.batch, report.rows) == ("empty_mean", 2, [0, 1])
    assert report.texts[1] == "w5 w5 w5 w5 w5 w5"


def test_healthy_trainers_are_not_blamed_and_can_go_on(tmp_path):
    make = lambda: Trainer(make_model(), arguments(tmp_path, max_steps=4), train_dataset=rows(), eval_dataset=rows())
    plain, watched = make(), make()
    assert not located(watched).found
    assert not located(watched, "eval").found
    torch.manual_seed(1)
    plain.train()
    torch.manual_seed(1)
    watched.train()
    assert same(fingerprint(plain)["parameters"], fingerprint(watched)["parameters"])
    assert not located(watched).found  # the optimizer now has a state, which must come back too
    assert not located(watched, "eval", max_batches=1).found


def test_an_empty_dataset_is_not_called_healthy(tmp_path):
    empty = rows().select([])
    trainer = Trainer(make_model(), arguments(tmp_path), eval_dataset=empty, processing_class=make_tokenizer())
    report = locate(trainer, mode="eval")
    assert not report.found
    # Older releases of transformers raise here instead.
    assert report.exception is not None or "Not one batch was run: the eval_dataset is empty" in str(report)


def test_the_optimizer_step_that_kills_half_precision_weights(tmp_path):
    options = arguments(tmp_path, optim="adamw_torch", learning_rate=1e-3)
    report = located(Trainer(make_model(torch.float16), options, train_dataset=rows()))
    assert (report.cause, report.phase, report.batch) == ("optimizer_underflow", "optimizer", 0)
    assert "float16 holds as 0" in report.explanation


def test_a_learning_rate_that_explodes_shows_the_growth(tmp_path):
    options = arguments(tmp_path, optim="sgd", learning_rate=1e30, lr_scheduler_type="constant", max_grad_norm=0)
    report = located(Trainer(make_model(), options, train_dataset=rows()))
    assert (report.cause, report.phase, report.batch) == ("overflow", "forward", 1)
    assert report.growth[-1] > 1e20 * report.growth[0]


class BadSchedule(TrainerCallback):
    """A user's callback that breaks the learning rate before the third step."""

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == 2:
            optimizer.param_groups[0]["lr"] = float("nan")


def test_a_callback_that_makes_the_learning_rate_nan(tmp_path):
    trainer = Trainer(make_model(), arguments(tmp_path), train_dataset=rows(), callbacks=[BadSchedule()])
    report = located(trainer)
    assert (report.cause, report.op, report.batch) == ("bad_state", "lr of the optimizer", 2)


class LogTrainer(Trainer):
    """A user's loss: the mean of log(1 − p), which is −inf for a sure answer."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(input_ids=inputs["input_ids"])
        sure = (inputs["input_ids"][:, :1] == 8).float()
        loss = -torch.log(1 - sure).mean() + outputs.logits.mean()  # loss of the user
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_line_in_a_users_own_trainer(tmp_path, accumulation):
    options = arguments(tmp_path, gradient_accumulation_steps=accumulation, per_device_train_batch_size=1, max_steps=8)
    trainer = LogTrainer(make_model(), options, train_dataset=rows(), processing_class=make_tokenizer())
    report = located(trainer)
    assert (report.cause, report.source, report.rows) == ("log_of_zero", line("loss of the user"), [0])
    assert report.texts == {0: "w5 w5 w5 w5 w5 w5"}
    assert report.library == ""


def test_a_trainer_that_raises_gives_its_exception(tmp_path):
    data = rows()
    data = data.map(lambda row, i: {"input_ids": [99] * 6 if i == 3 else row["input_ids"]}, with_indices=True)
    trainer = Trainer(make_model(), arguments(tmp_path), eval_dataset=data)
    report = locate(trainer, mode="eval")
    assert isinstance(report.exception, IndexError)
    assert report.batch == 1


def test_bad_use_is_refused_in_one_line(tmp_path):
    trainer = Trainer(make_model(), arguments(tmp_path), train_dataset=rows())
    with pytest.raises(InputError, match="'train' or 'eval'"):
        locate(trainer, mode="test")
    with pytest.raises(InputError, match="no eval_dataset"):
        locate(trainer, mode="eval")


def preferences(long: tuple[int, ...] = ()) -> Dataset:
    prompt = lambda i: " ".join([f"w{i}"] * (40 if i in long else 4))
    row = lambda i: {
        "prompt": prompt(i),
        "chosen": f" w{i + 20} w1",
        "rejected": f" w{i + 30} w2",
        "reference": f" w{i + 40} w3",
    }
    return Dataset.from_list([row(i) for i in range(8)])


def test_trl_tpo_evaluation_of_a_prompt_that_fills_max_length(tmp_path):
    tpo = pytest.importorskip("trl.experimental.tpo")
    options = arguments(tmp_path, tpo.TPOConfig, max_length=16)
    trainer = tpo.TPOTrainer(
        make_model(), args=options, train_dataset=preferences(), eval_dataset=preferences(long=(4, 5)),
        processing_class=make_tokenizer(),
    )  # fmt: skip
    assert not located(trainer).found
    report = located(trainer, "eval")
    assert (report.cause, report.phase, report.kind, report.batch) == ("empty_mean", "forward", "nan", 2)
    assert report.library.startswith("trl/experimental/tpo/tpo_trainer.py:")
    assert "w4 w4" in str(report.texts)


def test_trl_dpo_in_half_precision(tmp_path):
    from trl import DPOConfig, DPOTrainer

    options = arguments(tmp_path, DPOConfig, max_length=16, optim="adamw_torch", bf16=False)
    data = preferences().remove_columns("reference")
    trainer = DPOTrainer(
        make_model(torch.float16),
        make_model(torch.float16),
        args=options,
        train_dataset=data,
        processing_class=make_tokenizer(),
    )
    report = located(trainer)
    assert (report.cause, report.phase, report.batch) == ("optimizer_underflow", "optimizer", 0)


def test_trl_dpo_healthy(tmp_path):
    from trl import DPOConfig, DPOTrainer

    options = arguments(tmp_path, DPOConfig, max_length=16, bf16=False, max_steps=3)
    data = preferences().remove_columns("reference")
    trainer = DPOTrainer(
        make_model(),
        make_model(),
        args=options,
        train_dataset=data,
        eval_dataset=data,
        processing_class=make_tokenizer(),
    )
    assert not located(trainer).found
    assert not located(trainer, "eval").found


def test_trl_grpo_with_generation_in_the_step(tmp_path):
    from trl import GRPOConfig, GRPOTrainer

    class GroupStd(GRPOTrainer):
        """A user's own scaling, which divides by the spread of equal advantages."""

        def compute_loss(self, model, inputs, *args, **kwargs):
            advantages = inputs["advantages"] * 0
            scaled = advantages / advantages.std()  # spread of the user
            return super().compute_loss(model, inputs, *args, **kwargs) + scaled.sum()

    def length(completions, **kwargs):
        return [float(i) for i, _ in enumerate(completions)]

    options = arguments(tmp_path, GRPOConfig, num_generations=2, max_completion_length=4, bf16=False, max_steps=2)
    data = preferences().select_columns(["prompt"])
    make = lambda kind: kind(make_model(), length, args=options, train_dataset=data, processing_class=make_tokenizer())
    assert not located(make(GRPOTrainer)).found
    report = located(make(GroupStd))
    assert (report.cause, report.source, report.batch) == ("zero_over_zero", line("spread of the user"), 0)


def test_rows_of_a_concatenated_batch_are_rows_of_the_dataset_too(tmp_path):
    tpo = pytest.importorskip("trl.experimental.tpo")
    options = arguments(tmp_path, tpo.TPOConfig, max_length=16)
    trainer = tpo.TPOTrainer(
        make_model(), args=options, train_dataset=preferences(), eval_dataset=preferences(long=(4, 5)),
        processing_class=make_tokenizer(),
    )  # fmt: skip
    report = located(trainer, "eval")
    assert (report.batch, report.rows, report.length, report.examples) == (2, [0, 1, 2, 3, 4, 5], 6, [4, 5])
    assert [text.split(": ")[0] for text in report.texts.values()] == ["chosen", "chosen", "rejected", "rejected"]
    assert "rows 0, 1, 2, 3, 4, 5 (from 0; there are 6), which are rows 4, 5 of the dataset" in str(report)


def test_shuffled_rows_are_found_again_in_the_dataset(tmp_path):
    options = arguments(tmp_path, per_device_train_batch_size=4, seed=3)
    trainer = LogTrainer(make_model(), options, train_dataset=rows(), processing_class=make_tokenizer())
    report = located(trainer)
    assert report.examples == [5]  # token 8 is that of row 5
    assert [trainer.train_dataset[i]["input_ids"][0] for i in report.examples] == [8]


def test_a_bad_entry_of_a_trainers_batch_has_its_name_and_its_row(tmp_path):
    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            weight = inputs.pop("weight")
            outputs = model(**inputs)
            return (outputs.loss * weight).mean()

    weights = [1.0, 1.0, 1.0, float("nan"), 1.0, 1.0, 1.0, 1.0]
    data, options = rows().add_column("weight", weights), arguments(tmp_path, remove_unused_columns=False)
    report = located(Weighted(make_model(), options, train_dataset=data, processing_class=make_tokenizer()))
    assert (report.cause, report.op, report.examples) == ("bad_input", "batch weight", [3])


@pytest.mark.skipif(Version(trl.__version__) < Version("1.16"), reason="ORPO of an older TRL masks other labels")
def test_orpo_texts_are_one_part_each_with_its_name(tmp_path):
    orpo = pytest.importorskip("trl.experimental.orpo")
    options = arguments(tmp_path, orpo.ORPOConfig, max_length=16, bf16=False, remove_unused_columns=False)
    data = preferences(long=(4, 5)).remove_columns("reference")
    trainer = orpo.ORPOTrainer(
        make_model(), args=options, train_dataset=data, eval_dataset=data, processing_class=make_tokenizer()
    )
    report = located(trainer, "eval")
    assert (report.cause, report.rows, report.examples) == ("empty_mean", [0, 1, 2, 3], [4, 5])
    assert report.texts[0].startswith("chosen: w4 w4")
    assert report.texts[3].startswith("rejected: w5 w5")
    assert all(" | " not in text and len(text) < 110 for text in report.texts.values())


def own_mask(rows_of_data: list) -> dict[str, torch.Tensor]:
    """A collator that makes the additive mask itself, of −inf, and lets row 1 see nothing."""
    ids = torch.tensor([row["input_ids"] for row in rows_of_data])
    mask = torch.full((len(ids), 1, 6, 6), -torch.inf).triu(1)
    mask[1] = -torch.inf
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def test_a_mask_of_the_trainers_batch_goes_by_its_name(tmp_path):
    model = make_model()
    model.set_attn_implementation("eager")
    options = arguments(tmp_path, remove_unused_columns=False)
    report = located(Trainer(model, options, train_dataset=rows(), data_collator=own_mask))
    assert (report.cause, report.rows, len(report.examples)) == ("masked_row", [1], 1)
    assert report.story[0].startswith("batch attention_mask was already inf")
