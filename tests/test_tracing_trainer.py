"""locate(trainer): the failing batch is found, replayed and read out; the trainer is then what it was, bit for bit."""

import copy
import random
from typing import ClassVar

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from marks import lines_of
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

line = lines_of(__file__)
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]


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
    settings["save_strategy"] = "no"
    return kind(str(folder), report_to=[], use_cpu=True, disable_tqdm=True, **{**settings, **more})


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
    assert report.headline.endswith(f", at {report.source}")


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
    assert report.headline.endswith(f", at {report.library}")  # the user's line is that of locate() itself
    assert report.source not in str(report)
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
    assert "rows 0, 1, 2, 3, 4, 5 (from 0, of 6), which are rows 4, 5 of the dataset" in str(report)


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
    mask[1] = -torch.inf  # made by the collator
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def test_a_mask_of_the_collator_has_its_line(tmp_path):
    model = make_model()
    model.set_attn_implementation("eager")
    options = arguments(tmp_path, remove_unused_columns=False)
    report = located(Trainer(model, options, train_dataset=rows(), data_collator=own_mask))
    assert (report.cause, report.rows, len(report.examples)) == ("masked_row", [1], 1)
    assert "was already inf" in report.story[0]
    assert line("made by the collator") in report.story[0]


class FromInputs(Trainer):
    """The loss as the model gives it, from what is left of the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(input_ids=inputs["input_ids"], labels=inputs["labels"])
        loss = self.change(outputs, inputs, model)
        return (loss, outputs) if return_outputs else loss


def changed(folder, change, data=None, model=None, **more):
    """A trainer whose loss is ``change(outputs, batch, model)``, and that keeps the columns of its data."""
    options = arguments(folder, **{"remove_unused_columns": False, **more.pop("options", {})})
    trainer = FromInputs(model or make_model(), options, train_dataset=data or rows(), **more)
    trainer.change = change
    return trainer


@pytest.mark.parametrize("steps", [1, 3])
def test_it_ends_where_training_would_end(tmp_path, steps):
    drawn = []

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for i in range(200):
                drawn.append(i)
                yield {"input_ids": torch.tensor([3 + i % 50] * 6), "labels": torch.tensor([3 + i % 50] * 6)}

    assert not located(Trainer(make_model(), arguments(tmp_path, max_steps=steps), train_dataset=Stream())).found
    assert 2 * steps <= len(drawn) < 2 * steps + 8  # a loader reads ahead


def test_a_batch_that_is_changed_in_place_is_replayed_as_it_came(tmp_path):
    def standardised(outputs, inputs, model):
        x = inputs.pop("feature")
        x -= x.mean()
        x /= x.std()  # standardised in place
        inputs["input_ids"].data.fill_(3)
        return outputs.loss + x.mean() * outputs.logits.mean()

    data = rows().add_column("feature", [3.0] * 8)
    report = located(changed(tmp_path, standardised, data, processing_class=make_tokenizer()))
    assert (report.cause, report.source, report.batch) == ("zero_over_zero", line("standardised in place"), 0)
    assert list(report.texts.values()) == [" ".join([f"w{i}"] * 6) for i in report.examples]


def test_a_fault_that_depends_on_the_trainers_own_generator_comes_again(tmp_path):
    def dropped(outputs, inputs, model):
        keep = torch.rand(1, generator=trainer.generator) < 0.5
        return outputs.loss * keep.float().sum() / keep.sum()  # dropped at random

    draws = torch.rand(8, generator=torch.Generator().manual_seed(1)) < 0.5
    trainer = changed(tmp_path, dropped)
    trainer.generator = torch.Generator().manual_seed(1)
    report = located(trainer)
    assert (report.source, report.batch) == (line("dropped at random"), draws.tolist().index(False))


def test_a_batch_that_fails_only_once_is_not_passed_over_in_silence(tmp_path):
    values = iter([1.0, float("nan"), *[1.0] * 20])
    report = located(changed(tmp_path, lambda outputs, inputs, model: outputs.loss * next(values)))
    assert not report.found
    assert "Batches [1] failed, but not when they ran again" in str(report)


class Critic(Trainer):
    """Steps an optimizer of its own inside the step, and catches what goes wrong there."""

    caught: ClassVar[list] = []

    def training_step(self, model, inputs, num_items_in_batch=None):
        try:
            self.critics.zero_grad()
            (0 * self.critic(torch.ones(2)).sum()).backward()
            self.critics.step()  # step of the critic
        except Exception as error:
            self.caught.append(error)
        return super().training_step(model, inputs, num_items_in_batch)


def test_an_optimizer_inside_the_step(tmp_path):
    trainer = Critic(make_model(), arguments(tmp_path), train_dataset=rows())
    trainer.critic = torch.nn.Linear(2, 1)
    trainer.critics = torch.optim.Adam(trainer.critic.parameters(), lr=1e-2, eps=0.0)
    before = copy.deepcopy(trainer.critic.state_dict())
    report = located(trainer)
    assert (report.cause, report.source, report.batch) == ("optimizer_underflow", line("step of the critic"), 0)
    assert "critic.weight" in str(report)
    assert not trainer.caught  # what stops the run is no Exception
    assert same(before, dict(trainer.critic.state_dict()))
    assert not trainer.critics.state


class Around(torch.optim.Optimizer):
    """Steps another one, then scales."""

    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        p = self.param_groups[0]["params"][0]
        p.div_(p.new_zeros(()))  # scaled by the outer one


def test_an_optimizer_around_another(tmp_path):
    model = make_model()
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=1e-3))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    report = located(Trainer(model, arguments(tmp_path), train_dataset=rows(), optimizers=(optimizer, schedule)))
    assert (report.phase, report.source, report.batch) == ("optimizer", line("scaled by the outer one"), 0)


def test_an_optimizer_inside_the_step_goes_back_for_the_replay(tmp_path):
    def product(outputs, inputs, model):
        loss = outputs.loss + 0 * (1 / trainer.critic.weight.detach()).sum()  # at a weight of 0
        trainer.critics.zero_grad()
        trainer.critic.weight.sum().backward()
        trainer.critics.step()
        return loss

    trainer = changed(tmp_path, product)
    trainer.critic = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(trainer.critic.weight)
    trainer.critics = torch.optim.SGD(trainer.critic.parameters(), lr=0.5)  # 1, 0.5, 0, −0.5
    report = located(trainer)
    assert (report.cause, report.source, report.batch) == ("division_by_zero", line("at a weight of 0"), 2)


@pytest.mark.parametrize("place", ["teacher", "teacher['a']", "teacher[1]"])
def test_other_models_of_the_trainer_have_names_of_their_own(tmp_path, place):
    teacher = make_model()
    with torch.no_grad():
        teacher.gpt_neox.layers[1].mlp.dense_h_to_4h.weight[0, 0] = float("nan")
    trainer = changed(
        tmp_path, lambda outputs, inputs, model: outputs.loss + teacher(inputs["input_ids"]).logits.mean()
    )
    trainer.teacher = {"teacher": teacher, "teacher['a']": {"a": teacher}, "teacher[1]": [0, teacher]}[place]
    report = locate(trainer)
    assert (report.cause, report.op) == ("bad_state", f"parameter {place}.gpt_neox.layers.1.mlp.dense_h_to_4h.weight")
    assert "The batch is made of" not in report.explanation  # no row has made it


def test_rows_of_the_dataset_under_accumulation(tmp_path):
    data = rows(32).add_column("weight", [float("nan") if i == 7 else 1.0 for i in range(32)])
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "max_steps": 2}
    weighted = lambda outputs, inputs, model: (outputs.loss * inputs["weight"]).mean()
    report = located(changed(tmp_path, weighted, data, options=options))
    assert (report.cause, report.op, report.examples) == ("bad_input", "batch weight", [7])


def test_of_several_evaluation_sets_it_says_which(tmp_path):
    sets = {"clean": rows(), "dirty": rows(empty=(2, 3))}
    trainer = Trainer(make_model(), arguments(tmp_path), eval_dataset=sets, processing_class=make_tokenizer())
    report = located(trainer, "eval")
    assert (report.cause, report.batch, report.examples) == ("empty_mean", 5, [2, 3])
    assert "batch 1 of eval_dataset['dirty']" in report.explanation


def test_a_loader_of_ones_own_needs_no_dataset(tmp_path):
    class Own(Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(rows(empty=tuple(range(8))).with_format("torch"), batch_size=2)

    report = located(Own(make_model(), arguments(tmp_path)))
    assert (report.cause, report.batch) == ("empty_mean", 0)


def test_what_train_or_evaluate_raise_outside_of_a_batch_is_in_the_report(tmp_path):
    def refuse(predictions):
        raise ValueError("Input contains NaN.")

    trainer = Trainer(
        make_model(), arguments(tmp_path), train_dataset=rows().select([]), eval_dataset=rows(), compute_metrics=refuse
    )
    report = locate(trainer, mode="eval")
    assert (report.found, str(report.exception)) == (False, "Input contains NaN.")
    assert "eval raised outside of its batches, after 4 had begun" in str(report)
    assert isinstance(locate(trainer).exception, ValueError)  # a sampler refuses the empty data set


def evaluated(folder, metric, **more):
    return Trainer(make_model(), arguments(folder), eval_dataset=rows(), compute_metrics=metric, **more)


def test_a_metric_that_is_nan_after_healthy_batches_has_its_name(tmp_path):
    report = located(evaluated(tmp_path, lambda p: {"pearson": float("nan"), "good": 1.0}), "eval")
    assert not report.found
    assert "Not finite, although no batch was to blame: eval_pearson. " in str(report)


def test_a_metric_that_torch_made_nan_has_its_line(tmp_path):
    def scaled(logits, labels):
        return logits / (logits - logits)  # scaled for the metrics

    for mean, found in ((np.mean, True), (np.size, False)):  # only if it reaches a metric
        metric = lambda p, mean=mean: {"mean": float(mean(p.predictions))}
        report = located(evaluated(tmp_path, metric, preprocess_logits_for_metrics=scaled), "eval")
        assert (report.found, report.source) == (found, line("scaled for the metrics") if found else "")

    def ratio(p):
        zero = torch.zeros(())
        return {"ratio": (zero / zero).item()}  # ratio of the metrics

    assert located(evaluated(tmp_path, ratio), "eval").source == line("ratio of the metrics")


def test_missing_labels_and_outputs_blanked_on_purpose_are_healthy_in_an_evaluation(tmp_path):
    class Blanked(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(input_ids=inputs["input_ids"])
            seen = ~inputs["labels"].isnan()
            loss = (outputs.logits[..., 0][seen] - inputs["labels"][seen]).square().mean()
            score = self.blank(outputs.logits.mean(-1), inputs["input_ids"] == 5)
            return (loss, {"loss": loss, "logits": score}) if return_outputs else loss

    data = Dataset.from_list([{"input_ids": [i + 3] * 2, "labels": [1.0, float("nan")]} for i in range(8)])
    trainer = Blanked(make_model(), arguments(tmp_path), eval_dataset=data, compute_metrics=lambda p: {})
    trainer.blank = lambda score, where: score.masked_fill(where, float("nan"))
    assert not located(trainer, "eval").found

    trainer.blank = lambda score, where: (  # the accident comes in a later batch than what was meant
        score / (~where).float().mul(0) if where.any() else score.masked_fill(~where, float("nan"))  # an accident
    )
    report = located(trainer, "eval")
    assert (report.found, report.source, report.batch) == (True, line("an accident"), 1)


class UnitGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(p.grad.norm())  # gradients of the callback


class UnitWeights(TrainerCallback):
    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.spare.div_(model.spare.norm())  # weights of the callback


@pytest.mark.parametrize("callback", [UnitGradients, UnitWeights])
def test_a_callback_that_makes_nan(tmp_path, callback):
    model = make_model()
    model.spare = torch.nn.Parameter(torch.zeros(3))
    trainer = changed(
        tmp_path, lambda outputs, inputs, model: outputs.loss + 0 * model.spare.sum(), model=model,
        callbacks=[callback()], options={"optim": "sgd"},
    )  # fmt: skip
    report = located(trainer)
    marker = "gradients of the callback" if callback is UnitGradients else "weights of the callback"
    assert (report.cause, report.source, report.batch) == ("zero_over_zero", line(marker), 0)
