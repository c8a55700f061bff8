"""autopsy: real runs of transformers and TRL, planted footprints, damaged files, and silence on healthy runs."""

import contextlib
import csv
import itertools
import json
import math
import os
import random
import threading
import time
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from nanlab import autopsy
from nanlab.errors import InputError
from nanlab.findings import amount
from nanlab.history import CHECKS, _onset

NAN, INF = math.nan, math.inf


# ------------------------------------------------------------------------------------------------------------ real runs


def make_tokenizer():
    letters = {letter: number for number, letter in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bpe = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<end>", eos_token="<end>", pad_token="<end>")


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=257, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return GPTNeoXForCausalLM(config).to(dtype)


def options(folder, **changes):
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "max_steps": 4,
        "optim": "adamw_torch",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        **changes,
    }


def history(trainer):
    trainer.train()
    return trainer.state.log_history


PAIRS = [{"prompt": f"item {n} is", "chosen": " good", "rejected": " bad", "reference": " fine"} for n in range(8)]
EVALUATE = {"eval_strategy": "steps", "eval_steps": 2}


def dpo_run(folder, dtype, **changes):
    args = DPOConfig(**options(folder, **EVALUATE, **changes))
    data = Dataset.from_list(PAIRS).remove_columns("reference")
    return history(
        DPOTrainer(
            make_model(dtype), make_model(dtype), args, train_dataset=data, eval_dataset=data.select([0, 1]),
            processing_class=make_tokenizer(),
        )
    )  # fmt: skip


def tpo_run(folder, bad_rows):
    long = {**PAIRS[0], "prompt": "long " * 10}
    good, bad = PAIRS[: 4 - bad_rows], [long] * bad_rows
    args = TPOConfig(**options(folder, max_length=24, **EVALUATE))
    return history(
        TPOTrainer(
            make_model(), args, train_dataset=Dataset.from_list(PAIRS), eval_dataset=Dataset.from_list(good + bad),
            processing_class=make_tokenizer(),
        )
    )  # fmt: skip


class Poisoned(Trainer):
    """The loss of one step is NaN."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * NAN if self.state.global_step == 5 else loss


def lm_run(folder, kind=Trainer, masked=False, evaluate=False, **changes):
    rows = torch.randint(1, 257, (32, 8), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": row, "labels": [-100] * 8 if masked else row, "attention_mask": [1] * 8} for row in rows]
    args = TrainingArguments(**options(folder, **changes))
    rows = Dataset.from_list(data)
    return history(
        kind(make_model(), args, train_dataset=rows, eval_dataset=rows.select(range(4)) if evaluate else None)
    )


# What was run → the codes that an honest reader would expect, and the step of the first of them.
RUNS = {
    "DPO, fp16 weights, unfused Adam": (
        lambda folder: dpo_run(folder, torch.float16),
        {"filter_footprint", "sudden_divergence", "eval_of_dead_model", "lying_accuracy"},
        2,
    ),
    "DPO, fp32": (lambda folder: dpo_run(folder, torch.float32), set(), None),
    # Before transformers 5.23 nothing hides the batch from eval_loss.
    "TPO, one evaluation batch empty": (
        lambda folder: tpo_run(folder, 2),
        {"nan_metrics" if Version(transformers.__version__) >= Version("5.23") else "nan_eval_loss"},
        2,
    ),
    "TPO, all evaluation batches empty": (lambda folder: tpo_run(folder, 4), {"nan_eval_loss"}, 2),
    "all labels masked": (lambda folder: lm_run(folder, masked=True), {"no_gradient"}, 1),
    "one NaN step": (
        lambda folder: lm_run(folder, Poisoned, max_steps=12),
        {"filter_footprint", "sudden_divergence"},
        6,
    ),
    "one NaN step, logged every fourth": (
        lambda folder: lm_run(folder, Poisoned, max_steps=12, logging_steps=4),
        {"filter_footprint", "gradient_not_finite", "sudden_divergence"},
        12,
    ),
    "one NaN step, filter off": (
        lambda folder: lm_run(folder, Poisoned, max_steps=12, logging_nan_inf_filter=False),
        {"nan_loss", "sudden_divergence"},
        6,
    ),
    # At rate 1 the loss dips below its start on some processors; at 3 it is ten times as high on all steps.
    "Adam at rate 3": (lambda folder: lm_run(folder, learning_rate=3.0, max_steps=20), {"gradual_divergence"}, 2),
    "warm-up and cosine": (
        lambda folder: lm_run(folder, learning_rate=1e-3, warmup_steps=5, lr_scheduler_type="cosine", max_steps=20),
        set(),
        None,
    ),
    "learning rate 0": (
        lambda folder: dpo_run(folder, torch.float32, learning_rate=0.0, max_steps=6),
        {"no_progress"},
        2,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_real_run_shows_its_cause_and_nothing_else(name, tmp_path):
    run, codes, step = RUNS[name]
    findings = autopsy(run(tmp_path))
    assert set(findings.codes) == codes
    if step is not None:
        assert findings[0].rows[0] == step
    assert all("{" not in finding.message + finding.fix for finding in findings)


def test_what_a_trainer_prints_is_read_with_its_steps(tmp_path):
    console = tmp_path / "train.log"
    with open(console, "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        logged = lm_run(tmp_path, Poisoned, max_steps=24, logging_steps=3, disable_tqdm=False)
    assert "%|" in console.read_text()
    assert "{'loss'" in console.read_text()
    printed, whole = autopsy(console), autopsy(logged)
    assert [entry["step"] for entry in printed.log.entries] == [entry["step"] for entry in logged]
    assert [(f.code, list(f.rows)) for f in printed] == [(f.code, list(f.rows)) for f in whole] != []


def test_a_run_folder_is_read_from_its_newest_checkpoint(tmp_path):
    lm_run(tmp_path, Poisoned, max_steps=12, save_strategy="steps", save_steps=4)
    assert autopsy(tmp_path).codes == ["filter_footprint", "sudden_divergence"]
    assert autopsy(tmp_path).log.source.endswith("trainer_state.json")
    assert autopsy(tmp_path / "checkpoint-12").log.entries[-1]["step"] == 12
    assert autopsy(tmp_path / "checkpoint-4").codes == []


def test_a_rate_that_explodes_at_once_is_a_climb_whatever_the_processor_makes_of_it(tmp_path):
    """SGD at rate 30: on some the norm is inf from step 5 on, on others the loss is NaN at step 19."""
    findings = autopsy(lm_run(tmp_path, learning_rate=30.0, optim="sgd", max_grad_norm=1e9, max_steps=20))
    assert findings[findings.codes.index("gradual_divergence")].rows[0] == 2
    assert set(findings.codes) <= {"gradual_divergence", "gradient_not_finite", "filter_footprint"}


@pytest.mark.parametrize(
    ("losses", "norms", "footprint"),
    [
        ([5.6, 16, 1.9e3, 1.3e5, *[7e8] * 8], [2.1, 36, 7.4e2, 6e7, *[INF] * 8], "gradient_not_finite"),
        ([5.6, 16, 1.9e3, 1.3e5, *[7e9] * 8, 0, 0], [2.1, 36, 7.4e2, 4e5, *[8e10] * 8, NAN, NAN], "filter_footprint"),
    ],
)
def test_the_logs_of_such_a_run(losses, norms, footprint):
    losses = [loss * (1 + n / 99) for n, loss in enumerate(losses)]
    assert where(train(losses, norms)) == {footprint: 5 if footprint[0] == "g" else 13, "gradual_divergence": 2}


# --------------------------------------------------------------------------------------------------- planted footprints


def train(losses, norms=None, rates=None, **more):
    """Training entries, one a step."""
    columns = {"loss": losses, "grad_norm": norms, "learning_rate": rates, **more}
    columns = {name: values for name, values in columns.items() if values is not None}
    return [{"step": n + 1, **{k: v[n] for k, v in columns.items()}} for n in range(len(losses))]


def falling(count, start=3.0):
    return [start * 0.97**n + 0.013 * math.sin(n) for n in range(count)]


def steady(count):
    return [1.0 + 0.1 * math.sin(3 * n) for n in range(count)]


def evals(*losses, **metrics):
    return [{"step": 10 * n, "eval_loss": v, **metrics} for n, v in enumerate(losses, start=1)]


def explode(count, start):
    return [norm * max(1.0, 1.8 ** (n - start)) for n, norm in enumerate(steady(count))]


PLANTED = {
    "filter_footprint": (train([*falling(12), 0.0, 0.0], [*steady(12), NAN, NAN]), 13, {"sudden_divergence"}),
    "nan_loss": (train([*falling(12), NAN, NAN], [*steady(12), NAN, NAN]), 13, {"sudden_divergence"}),
    "nan_train_loss": (
        [*train(falling(9), steady(9)), {"step": 14, "train_loss": NAN, "train_runtime": 1.0}],
        14,
        set(),
    ),
    "gradient_not_finite": (train(falling(14), [*steady(12), NAN, NAN]), 13, {"sudden_divergence"}),
    "steps_skipped": (
        train(
            falling(20), [*steady(10), *[INF] * 8, 1.0, 1.0], [*[1e-3 - 1e-5 * n for n in range(10)], *[9e-4] * 9, 8e-4]
        ),
        12,
        set(),
    ),
    "loss_scale_falls": (train(falling(20), loss_scale=[2.0 ** (16 - n) for n in range(20)]), 2, set()),
    "no_gradient": (train([0.0] * 5, [0.0] * 5), 1, set()),
    "gradual_divergence": (
        train([*falling(20), *[2 * 1.3**n for n in range(20)]], explode(40, 20)),
        22,
        set(),
    ),
    "sudden_divergence": (train([*falling(20), NAN], [*steady(20), NAN]), 21, {"nan_loss"}),
    "repeated_loss": (train([*falling(9), *[1.23456789] * 4, 1.1], steady(14)), 10, set()),
    "steps_guarded": (
        train([*falling(9), *[1.23456789] * 4], steady(13), guard_skipped=[0] * 10 + [1, 2, 2]),
        11,
        set(),
    ),
    "no_progress": (evals(1.5, 1.4, 1.2512345, 1.2512345, 1.2512345, eval_runtime=3.0), 30, set()),
    "bad_learning_rate": (train(falling(4), steady(4), [1e-5, 1e-5, NAN, NAN]), 3, set()),
    "nan_eval_loss": (train(falling(12), steady(12)) + evals(1.5, NAN), 20, set()),
    "eval_of_dead_model": (
        train([*falling(8), 0.0, 0.0], [*steady(8), NAN, NAN]) + evals(NAN),
        10,
        {"filter_footprint", "sudden_divergence"},
    ),
    "nan_metrics": (evals(1.5, 1.4, eval_entropy=NAN), 10, set()),
    "zero_eval_loss": ([*evals(1.5), {"step": 20, "eval_loss": 0.0, "eval_entropy": NAN}], 20, set()),
    "zeros_for_nan": (train([*falling(9), 0.0, 0.0]), 10, {"sudden_divergence"}),
    "zero_gradient": (train(falling(9), [*steady(6), 0.0, 0.0, 0.0]), 7, set()),
    "never_finite": (train([NAN] * 4, [NAN] * 4), 1, {"nan_loss"}),
    "no_reward": (train([0.0, 0.1, 0.2], [0.0, 1.0, 1.0], reward=[0.5, NAN, NAN]), 2, set()),
    "lying_accuracy": (
        [{"step": 5, "eval_loss": 0.5, "eval_rewards/accuracies": 0.0, "eval_rewards/margins": NAN}],
        5,
        {"nan_metrics"},
    ),
    "excluded_rows": (evals(1.5, eval_excluded_rows=3), 10, set()),
}


@pytest.mark.parametrize("code", [check.code for check in CHECKS if check.code != "damaged_file"])
def test_a_planted_footprint_is_found_with_its_step(code):
    entries, step, others = PLANTED[code]
    findings = autopsy(entries)
    assert set(findings.codes) == {code} | others
    found = findings[findings.codes.index(code)]
    assert found.rows[0] == step
    assert found.confidence in ("certain", "likely", "possible")
    assert found.count == len(found.rows)


@pytest.mark.parametrize("seed", range(20))
def test_the_onset_of_a_divergence_is_found(seed):
    rng = np.random.default_rng(seed)
    calm, length = int(rng.integers(30, 200)), 40
    norms = 10 ** rng.normal(0, 0.1, calm + length)
    losses = 2 + rng.normal(0, 0.1, calm + length)
    growth = float(rng.uniform(1.15, 2.0))
    norms[calm:] *= growth ** np.arange(length)
    losses[calm:] *= np.sqrt(growth) ** np.arange(length)
    (finding,) = autopsy(train(list(losses), list(norms)))
    assert finding.code == "gradual_divergence"
    hidden = math.log(10**0.25) / math.log(growth)  # entries that still lie within the scatter of the calm part
    assert -3 <= finding.rows[0] - (calm + 1) <= hidden + 3


def test_one_entry_alone_may_be_the_last_of_many():
    found = {count: autopsy(train([NAN] * count, [NAN] * count)) for count in (1, 3)}
    sure = {count: finding.confidence for count, f in found.items() for finding in f if finding.code == "never_finite"}
    assert sure == {1: "likely", 3: "certain"}


def test_a_log_without_a_loss_names_what_it_holds():
    with pytest.raises(InputError, match=r"no log entry with a loss.*; found 'step', 'train_nll'$"):
        autopsy([{"step": 1, "train_nll": 2.0}])


def test_one_entry_is_told_in_the_singular():
    told = {finding.code: finding.message for finding in autopsy([{"step": 1, "loss": NAN, "learning_rate": NAN}])}
    assert told["nan_loss"] == "The loss is NaN or inf in 1 entry, first at step 1."
    assert told["bad_learning_rate"] == "The learning rate is NaN or inf in 1 entry, first at step 1."
    (dead,) = autopsy([{"step": 1, "eval_loss": 0.0}])
    assert "first at step 1 (1 evaluation):" in dead.message
    assert str(autopsy([{"step": 1, "loss": 1.0}])) == "Nothing found in 1 log entry of the log history."
    assert autopsy(train(falling(2), steady(2))).subject == "2 log entries of the log history"


@pytest.mark.parametrize("huge", [1e308, -1.7e308, INF])
def test_numbers_near_the_largest_float_give_no_warning(huge):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autopsy(train([*falling(9), huge, huge, 1.0], [*steady(9), 1.0, huge, huge]))
        autopsy(train([huge] * 12, explode(12, 4), loss_scale=[huge, -huge] * 6))


def test_a_grad_scaler_at_work_is_not_a_dead_run():
    norms = [INF, INF, NAN, *steady(20), INF, *steady(10), INF]
    assert autopsy(train(falling(len(norms)), norms)).codes == []


@pytest.mark.parametrize(
    "halvings", [[min(n, 10) for n in range(40)], [*range(12), 10, *range(11, 20)], [0, 8, 12, 16]], ids=str
)
def test_a_loss_scale_that_settles_or_grows_again_is_calibration(halvings):
    assert autopsy(train(falling(len(halvings)), loss_scale=[2.0 ** (16 - n) for n in halvings])).codes == []


def test_a_loss_of_zero_says_nothing_in_policy_gradients():
    assert autopsy(train([0.0] * 4, steady(4), reward=[0.5] * 4)).codes == []


def test_an_evaluation_loss_of_zero_says_nothing_in_policy_gradients():
    assert autopsy(train([0.0] * 4, steady(4), reward=[0.5] * 4) + evals(0.0, 0.0)).codes == []
    assert autopsy(evals(0.0, eval_reward=0.5)).codes == []


@pytest.mark.parametrize("missing", [None, NAN])
def test_a_reward_that_no_function_gave_is_told_as_that(missing):
    trained = train([0.0] * 4, [0.0] * 4, reward=[missing] * 4, reward_std=[None] * 4)
    (finding,) = autopsy(trained + evals(0.0, eval_reward=missing))
    assert (finding.code, list(finding.rows)) == ("no_reward", [1, 2, 3, 4, 10])


def test_a_loss_that_rises_with_the_kl_is_no_divergence():
    kl = [1e-9 * 2.0**n for n in range(40)]
    assert autopsy(train(kl, reward=[0.5] * 40)).codes == []
    assert where(train([*kl, NAN], reward=[0.5] * 41)) == {"nan_loss": 41, "sudden_divergence": 41}


def test_an_accuracy_above_zero_was_measured_on_something():
    learned = {"rewards/accuracies": [1.0] * 3, "rewards/margins": [900.0] * 3}
    assert autopsy(train([0.0] * 3, [0.0] * 3, **learned)).codes == []
    assert autopsy(train([0.0] * 3, **learned)).codes == []
    assert autopsy(train([0.0] * 3, [0.0] * 3, **{"rewards/accuracies": [0.0] * 3})).codes == ["no_gradient"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_in_half_precision_repeats_by_itself(dtype):
    losses = torch.tensor([0.69123] * 9 + [0.6871] * 7).to(dtype).tolist()
    assert autopsy(train(losses, steady(16))).codes == []
    assert autopsy(train([loss * (1 + 1e-6) for loss in losses], steady(16))).codes == ["repeated_loss"]


def test_a_loss_that_repeats_without_a_gradient_is_no_accident():
    assert autopsy(train([2.0] * 5, steady(5))).codes == []
    assert where(train([2.0] * 5, [0.0] * 5)) == {"repeated_loss": 1, "zero_gradient": 1}


def test_a_short_run_has_only_its_summary():
    def summary(loss):
        return autopsy([{"step": 4, "train_loss": loss, "train_runtime": 0.1, "total_flos": 1.0, "epoch": 0.2}])

    assert summary(2.0).codes == []
    assert [(f.code, list(f.rows), f.confidence) for f in summary(NAN)] == [("nan_train_loss", [4], "certain")]
    assert [(f.code, f.confidence) for f in summary(0.0)] == [("no_gradient", "possible")]
    assert summary(0.0)[0].message.startswith("train_loss is exactly 0 from step 4 on (1 entry)")
    summary(NAN).plot().canvas.draw()


def test_the_summary_repeats_no_nan_that_an_entry_tells():
    assert "nan_train_loss" not in autopsy([*train([2.0, NAN]), {"step": 2, "train_loss": NAN}]).codes


@pytest.mark.parametrize("skipped", [NAN, INF])
def test_a_run_that_ends_while_the_loss_scale_is_sought_did_not_break(skipped):
    found = {f.code: f.confidence for f in autopsy(train(falling(3), [skipped] * 3))}
    assert found == {"gradient_not_finite": "possible"}
    assert autopsy(train(falling(40), [skipped] * 40))[0].confidence == "likely"
    assert "sudden_divergence" in autopsy(train([2.0, 0.0, 0.0], [skipped] * 3)).codes


def test_a_model_that_collapses_has_small_gradients():
    log = train([*falling(30, 1.2), *[10.8 + 0.01 * n for n in range(30)]], [*steady(30), *[0.05] * 30])
    ((code, step, sure),) = [(f.code, f.rows[0], f.confidence) for f in autopsy(log)]
    assert (code, step, sure) == ("sudden_divergence", 31, "possible")


def test_a_few_noisy_entries_are_no_trend():
    assert autopsy(train([0.7, 6.65, 2.32, 1.69, 0.65], [0.24, 3.12, 1.06, 7.57, 10.84])).codes == []


@pytest.mark.parametrize("seed", range(20))
def test_a_death_without_a_climb_is_sudden_however_noisy_the_run(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(20, 200))
    norms, losses = 10 ** rng.normal(0, 0.3, count), 2 + rng.normal(0, 0.3, count)
    norms[-1] *= 3
    findings = autopsy(train([*losses, 0.0, 0.0], [*norms, NAN, NAN]))
    assert findings.codes == ["filter_footprint", "sudden_divergence"]
    assert findings[1].rows[0] == count + 1


def test_what_is_missing_lowers_the_confidence():
    with_norms, without = autopsy(train([0.0] * 3, [0.0] * 3)), autopsy(train([0.0] * 3))
    assert [with_norms[0].confidence, without[0].confidence] == ["likely", "possible"]
    assert autopsy(evals(NAN))[0].confidence == "possible"


def where(entries):
    """Code → the step it starts at."""
    return {finding.code: finding.rows[0] for finding in autopsy(entries)}


def test_a_death_that_only_the_loss_shows_is_found_beside_earlier_norms():
    log = [*train(falling(10), steady(10)), {"step": 11, "loss": NAN}, {"step": 12, "loss": NAN}]
    assert where(log) == {"nan_loss": 11, "sudden_divergence": 11}


@pytest.mark.parametrize("skipped", [NAN, INF])
def test_steps_that_a_grad_scaler_skipped_are_no_calm_stretch(skipped):
    log = train([*falling(23), 0.0, 0.0], [*[skipped] * 3, *steady(20), NAN, NAN])
    assert where(log) == {"filter_footprint": 24, "sudden_divergence": 24}


def test_a_run_that_starts_again_in_the_same_log_is_told_by_its_own_steps():
    climbs = train([*[2.0] * 10, *[2 + 0.3 * n for n in range(1, 11)], *[NAN] * 5], [*explode(20, 10), *[NAN] * 5])
    tests = [{"step": 10, "eval_loss": NAN}, {"step": 24, "eval_loss": NAN}]
    alone, after_another = autopsy(climbs), autopsy(train(falling(50), steady(50)) + climbs)
    assert alone.codes == ["nan_loss", "gradual_divergence"]
    assert [(f.code, f.rows[0], f.rows[-1]) for f in after_another] == [(f.code, f.rows[0], f.rows[-1]) for f in alone]
    later = [{"step": 40, "eval_loss": NAN}]  # of the first run, which was alive
    found = {f.code: list(f.rows) for f in autopsy(train(falling(50), steady(50)) + later + climbs + tests)}
    assert found["nan_eval_loss"] == [40, 10]
    assert found["eval_of_dead_model"] == [24]


def sets(**losses):
    """Evaluations of several sets, one entry a set as the Trainer writes them, every tenth step."""
    return [
        {"step": 10 * n, f"eval_{name}_loss": loss, f"eval_{name}_runtime": 1.0, f"eval_{name}_nll_loss": 0.0}
        for n, row in enumerate(zip(*losses.values(), strict=True), start=1)
        for name, loss in zip(losses, row, strict=True)
    ]


def test_the_order_of_training_and_evaluation_does_not_matter():
    trained, tests = train([*falling(12), NAN, NAN]), [{"step": 14, "eval_loss": NAN}, {"step": 6, "eval_loss": 1.5}]
    assert where(trained + tests) == where(tests + trained)
    assert where(tests + trained)["eval_of_dead_model"] == 14


@pytest.mark.parametrize("timed", [True, False])
def test_every_evaluation_set_is_read(timed):
    def read(*entries):
        kept = (
            entries
            if timed
            else [{k: v for k, v in e.items() if "runtime" not in k and "nll" not in k} for e in entries]
        )
        return [(f.code, list(f.rows), f.message) for f in autopsy([*train(falling(40), steady(40)), *kept])]

    ((code, steps, message),) = read(*sets(a=[1.5, NAN, 1.3], a_b=[1.5, 1.4, NAN], c=[1.5, 1.4, 1.3]))
    assert (code, steps) == ("nan_eval_loss", [20, 30])
    assert message.startswith("eval_a_loss or eval_a_b_loss is not finite from step 20 on (2 evaluations)")
    ((code, steps, message),) = read(*sets(a=[1.5, 0.0], b=[1.5, 1.4]))
    assert (code, steps) == ("zero_eval_loss", [20])
    assert message.startswith("eval_a_loss is exactly 0.0")
    ((code, steps, _),) = read(*sets(a=[1.5, 1.4, 1.3], b=[1.2512345] * 3))
    assert (code, steps) == ("no_progress", [10, 20, 30])
    bad = [{**entry, "eval_b_entropy": NAN} for entry in sets(b=[1.5])]
    ((code, _, message),) = read(*sets(a=[1.5]), *bad)
    assert (code, message.split(":")[0]) == ("nan_metrics", "eval_b_entropy")
    assert read(*sets(a=[1.5, 1.4], b=[1.25, 1.2])) == []


@pytest.mark.parametrize("metrics", [{"eval_accuracy": 0.5}, {"eval_entropy": 0.0}], ids=str)
def test_margins_of_nan_make_no_other_metric_a_lie(metrics):
    assert autopsy([{"step": 5, "eval_loss": 0.5, "eval_rewards/margins": NAN, **metrics}]).codes == ["nan_metrics"]
    assert autopsy([{"step": 5, "eval_loss": 0.5, "eval_rewards/margins": 0.1, "eval_accuracy": 0.0}]).codes == []


@pytest.mark.parametrize("loss", [NAN, INF, 0.0])
def test_evaluations_that_say_nothing_are_no_standstill(loss):
    assert "no_progress" not in autopsy(evals(loss, loss, loss, eval_entropy=1.2345678)).codes


ALIVE, DEAD = train(falling(12), steady(12)), train([NAN] * 4, [NAN] * 4)


@pytest.mark.parametrize(
    ("training", "metrics", "confidence", "told"),
    [
        (ALIVE, {}, "likely", " while training is:"),
        (ALIVE, {"eval_entropy": 0.5}, "likely", " while training is:"),
        (ALIVE, {"eval_entropy": 0.0}, "likely", " while training is; every other metric is exactly 0:"),
        ([], {}, "possible", ":"),
        (DEAD, {}, "possible", ":"),  # it was evaluated before
    ],
)
def test_what_an_empty_evaluation_stands_beside_is_told(training, metrics, confidence, told):
    findings = autopsy([{"step": 0, "eval_loss": NAN, **metrics}, *training])
    found = findings[findings.codes.index("nan_eval_loss")]
    assert found.confidence == confidence
    assert found.message.startswith(f"eval_loss is not finite from step 0 on (1 evaluation){told} some")


def test_one_of_several_losses_is_no_evaluation_set():
    assert autopsy(evals(1.5, 1.4, eval_runtime=1.0, eval_nll_loss=0.0)).codes == []
    assert autopsy(evals(1.5, 1.4, eval_nll_loss=0.0)).codes == []


def test_a_row_that_holds_training_and_evaluation_is_read_as_both():
    rows = [{"step": 1, "loss": 2.0, "eval_loss": 1.9}, {"step": 2, "loss": 1.8, "eval_loss": NAN}]
    assert where(rows) == {"nan_eval_loss": 2}
    assert where([{**row, "loss": row["eval_loss"], "eval_loss": 2.0} for row in rows]) == {
        "nan_loss": 2,
        "sudden_divergence": 2,
    }


def as_table(entries, missing=NAN):
    """As a data frame has them: every name in every row."""
    names = dict.fromkeys(name for entry in entries for name in entry)
    return [{name: entry.get(name, missing) for name in names} for entry in entries]


@pytest.mark.parametrize("missing", [NAN, None])
def test_what_a_data_frame_lacks_is_not_measured(missing):
    rates = [1e-5] * 14
    ends = [{"step": 14, "train_loss": 2.0, "train_runtime": 1.0, "total_flos": 1e9}]
    for tests in (sets(a=[1.5], b=[1.6]), evals(1.5, eval_runtime=1.0, eval_excluded_rows=0)):
        log = [
            {"_timestamp": 1.0, "epoch": 0.1, **entry}
            for entry in [*train(falling(14), steady(14), rates), *tests, *ends]
        ]
        assert autopsy(as_table(log, missing)).codes == autopsy(log).codes == []
    dead = train([*falling(12), 0.0, NAN], [*steady(12), NAN, NAN], rates) + evals(1.5, eval_runtime=1.0)
    dead += [{"step": 14, "eval_loss": NAN, "eval_runtime": 1.0}]
    assert (
        where(as_table(dead, missing))
        == where(dead)
        == {
            "filter_footprint": 13,
            "nan_loss": 14,
            "sudden_divergence": 13,
            "eval_of_dead_model": 14,
        }
    )


@pytest.mark.parametrize("name", ["loss", "eval_loss", "eval_a_loss"])
def test_a_loss_of_null_is_the_nan_of_a_strict_writer(name, tmp_path):
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1, "{name}": 2.0}}\n{{"step": 2, "{name}": null}}\n')
    assert autopsy(tmp_path / "log.jsonl")[0].rows == [2]


# --------------------------------------------------------------------------------------------------------- healthy runs


def healthy(seed):
    """A run of a random shape: every one of these has been seen in a run that went well."""
    rng = random.Random(seed)
    count = rng.choice([1, 2, 3, 5, 8, 20, 60, 300])
    noise = rng.choice([0.0, 0.02, 0.3, 0.8])
    shape = rng.choice(["falls", "flat", "DPO", "GRPO", "stairs"])
    curve = {
        "falls": lambda n: 1.0 + 5 * math.exp(-6 * n / count),
        "flat": lambda n: 2.0,
        "DPO": lambda n: math.log(2) * (1 if n < count / 10 else 0.3 + 0.7 * math.exp(-3 * n / count)),
        "GRPO": lambda n: 0.0,
        "stairs": lambda n: 4.0 - (3 * n // count),
    }[shape]
    losses = [curve(n) * math.exp(noise * rng.gauss(0, 1)) for n in range(count)]
    if shape == "GRPO":
        losses = [rng.choice([0.0, abs(rng.gauss(0, 0.01))]) for _ in range(count)]
    start, end = rng.choice([(10, 1), (1, 1), (1, 4)])
    norms = [start * (end / start) ** (n / count) * math.exp(noise * rng.gauss(0, 1)) for n in range(count)]
    for _ in range(rng.choice([0, 0, count // 30])):  # spikes that the clipping takes
        norms[rng.randrange(count)] *= 50
    if rng.random() < 0.3:
        losses, norms = [round(v, 4) for v in losses], [round(v, 4) for v in norms]
    warm = rng.choice([0, count // 10])
    rates = [1e-5 * min(1.0, (n + 1) / (warm + 1)) * rng.choice([1, 1]) for n in range(count)]
    if rng.random() < 0.5:
        rates = [rate * (1 + math.cos(math.pi * n / count)) / 2 for n, rate in enumerate(rates)]
    more = {"reward": [0.5] * count} if shape == "GRPO" else {}
    entries = train(losses, norms if rng.random() < 0.9 or shape == "GRPO" else None, rates, **more)
    tests = [
        {"step": step, "eval_loss": 2 - step / count + rng.random() / 10} for step in range(1, count, 1 + count // 5)
    ]
    scale = {"loss_scale": [65536.0 / 2 ** min(n, 4) for n in range(count)]} if rng.random() < 0.2 else {}
    for name, values in scale.items():
        for entry, value in zip(entries, values, strict=True):
            entry[name] = value
    return sorted(entries + tests, key=lambda entry: entry["step"])


def test_nothing_is_found_in_healthy_runs_of_many_shapes():
    wrong = {seed: codes for seed in range(600) if (codes := autopsy(healthy(seed)).codes)}
    assert wrong == {}


# -------------------------------------------------------------------------------------------------------------- files


ENTRIES = train([*falling(12), 0.0, 0.0], [*steady(12), NAN, NAN]) + evals(NAN)
CODES = autopsy(ENTRIES).codes


def write_state(path):
    path.write_text(json.dumps({"best_metric": None, "log_history": ENTRIES, "max_steps": 14}, indent=2))


def write_list(path):
    path.write_text(json.dumps(ENTRIES))


def write_lines(path):
    path.write_text("\n".join(map(json.dumps, ENTRIES)) + "\n")


def write_csv(path):
    names = list(dict.fromkeys(name for entry in ENTRIES for name in entry))
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, names)
        table.writeheader()
        table.writerows(ENTRIES)


def write_tracker_csv(path):
    """Names as trackers write them."""
    names = {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "eval_loss": "eval/loss",
        "step": "train/global_step",
    }
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, names.values())
        table.writeheader()
        table.writerows({names[k]: "NaN" if v != v else v for k, v in entry.items()} for entry in ENTRIES)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("trainer_state.json", write_state),
        ("log.json", write_list),
        ("log.jsonl", write_lines),
        ("log.csv", write_csv),
        ("wandb.csv", write_tracker_csv),
    ],
)
def test_every_kind_of_file_reads_alike(name, write, tmp_path):
    write(tmp_path / name)
    findings = autopsy(tmp_path / name)
    assert findings.codes == CODES
    assert [list(finding.rows) for finding in findings] == [list(finding.rows) for finding in autopsy(ENTRIES)]


@pytest.mark.parametrize("write", [write_state, write_lines])
def test_a_file_cut_anywhere_gives_its_complete_entries_or_one_line(write, tmp_path):
    file = tmp_path / "trainer_state.json"
    write(file)
    whole = file.read_bytes()
    ends = [m for m in range(len(whole)) if whole[m : m + 1] == b"}"]
    for cut in range(0, len(whole) - 3, 7):
        file.write_bytes(whole[:cut])
        complete = min(sum(end < cut for end in ends), len(ENTRIES))
        if complete == 0:
            with pytest.raises(InputError) as caught:
                autopsy(file)
            assert "\n" not in str(caught.value)
        else:
            findings = autopsy(file)
            assert len(findings.log.entries) == complete
            damaged = findings.codes[:1] == ["damaged_file"]
            assert damaged != (write is write_lines and whole[cut - 1 : cut + 1] in (b"}\n", b"\n{"))
            told = amount(complete, "complete entry", "complete entries")
            assert not damaged or f"{told} could be recovered" in findings[0].message


def test_damage_inside_costs_only_the_entry_it_hits(tmp_path):
    file = tmp_path / "trainer_state.json"
    write_state(file)
    text = file.read_text()
    hit = text.index('"step": 4,')
    file.write_bytes(text[:hit].encode() + b"\x00\xff\xfe" + text[hit + 3 :].encode())
    findings = autopsy(file)
    assert [entry["step"] for entry in findings.log.entries] == [
        entry["step"] for entry in ENTRIES if entry["step"] != 4
    ]
    assert findings.codes == ["damaged_file", *CODES]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.json", b"", "empty"),
        ("zeros.json", b"\0" * 99, "empty"),
        ("junk.json", bytes(range(256)) * 40, "no complete log entry"),
        ("junk.csv", bytes(range(256)) * 40, "no log entry with a loss"),
        ("other.json", b'{"a": 1}', "no log entry with a loss"),
        ("number.json", b"3", "no complete log entry"),
        ("braces.json", b'{"a":' * 5000, "no complete log entry"),
        ("none.json", b'{"log_history": []}', "no log entry with a loss"),
        ("other.csv", b"a,b\n1,2\n", "no log entry with a loss"),
    ],
)
def test_what_is_no_log_is_one_line(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        autopsy(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_wrong_types_are_one_line(tmp_path):
    for source, words in [
        (tmp_path / "no", "no such"),
        (tmp_path, "no trainer_state"),
        (3, "a path or"),
        ([1], "a path or"),
    ]:
        with pytest.raises(InputError, match=words):
            autopsy(source)


def states(folder, **contents):
    """A run folder with the given trainer_state.json in each checkpoint."""
    for name, content in contents.items():
        (folder / name.replace("_", "-")).mkdir()
        (folder / name.replace("_", "-") / "trainer_state.json").write_text(content)


def test_an_older_checkpoint_is_read_where_the_newest_says_nothing(tmp_path):
    whole = json.dumps({"log_history": ENTRIES})
    states(tmp_path, checkpoint_5=json.dumps({"log_history": ENTRIES[:5]}), checkpoint_10=whole, checkpoint_20="")
    findings = autopsy(tmp_path)
    assert findings.codes == ["damaged_file", *CODES]
    message = findings[0].message
    assert message.index("checkpoint-20") < message.index("the file is empty") < message.index("checkpoint-10")
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text(whole)
    assert autopsy(tmp_path).codes == CODES


def test_a_run_without_any_readable_log_names_the_newest(tmp_path):
    states(tmp_path, checkpoint_5="[]", checkpoint_10="\0")
    with pytest.raises(InputError, match=r"checkpoint-10.*the file is empty"):
        autopsy(tmp_path)


@pytest.mark.parametrize(("finished", "codes"), [(10, CODES), (14, []), (15, [])])
def test_the_state_of_a_finished_run_gives_way_to_a_later_checkpoint(finished, codes, tmp_path):
    states(tmp_path, checkpoint_5="", checkpoint_14=json.dumps({"log_history": ENTRIES}))
    good = {"log_history": train(falling(finished), steady(finished))}
    (tmp_path / "trainer_state.json").write_text(json.dumps(good))
    assert autopsy(tmp_path).codes == codes
    (tmp_path / "trainer_state.json").write_text("")
    assert autopsy(tmp_path).codes == ["damaged_file", *CODES]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_line_of_jsonl_may_hold_what_python_calls_a_line_end(end, tmp_path):
    rows = [{**entry, "text": "a\u2028b\x85c\x0b"} for entry in train(falling(9), steady(9))]
    text = end.join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "log.jsonl").write_bytes(text.encode())
    assert autopsy(tmp_path / "log.jsonl").codes == []


def test_a_step_of_training_is_better_than_a_count_of_log_calls():
    row = {"train/loss": NAN, "train/global_step": 800, "_step": 8}
    for names in itertools.permutations(row):
        assert list(autopsy([{name: row[name] for name in names}])[0].rows) == [800]
    assert list(autopsy([{**row, "step": 801}])[0].rows) == [801]


@pytest.mark.parametrize(
    "content", ['{"log_history": [1, {"step": 1, "loss": 1}]}', '1\n{"step": 1, "loss": 1}', '["a", {"loss": 1}]']
)
def test_what_is_no_entry_is_left_out_and_counted(content, tmp_path):
    (tmp_path / "log.json").write_text(content)
    findings = autopsy(tmp_path / "log.json")
    assert findings.codes == ["damaged_file"]
    assert "1 of 2 entries" in findings[0].message
    assert findings.log.entries == [{"step": findings.log.entries[0]["step"], "loss": 1.0}]


def test_a_cell_may_be_longer_than_the_csv_module_wants(tmp_path):
    (tmp_path / "log.csv").write_text(f'step,loss,note\n1,2.0,"{"x" * 200_000}"\n2,nan,"a\nb"\n3,1.9,c\n')
    findings = autopsy(tmp_path / "log.csv")
    assert [entry["step"] for entry in findings.log.entries] == [1, 2, 3]
    assert list(findings[0].rows) == [2]


@pytest.mark.parametrize(("number", "value"), [(10**400, INF), (-(10**400), -INF), (True, 1.0)])
def test_an_integer_beyond_all_floats_is_inf(number, value):
    findings = autopsy([{"step": 10**400, "loss": number}, {"step": 2, "loss": 1.0}])
    assert findings.log.entries[0] == {"step": 1.0, "loss": value}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_read_like_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=write_state, args=[tmp_path / "pipe"])
    writer.start()
    assert autopsy(tmp_path / "pipe").codes == CODES
    writer.join()


def test_a_name_that_no_system_takes_is_one_line():
    with pytest.raises(InputError, match="no such file"):
        autopsy("x" * 300)


# --------------------------------------------------------------------------------------------------------- long runs


def onset_in_square_memory(heights):
    """The formula of `_onset`, with every window written out."""
    width = max(1, len(heights) // 4)
    if len(heights) <= width:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(heights, width)
    medians = np.median(windows, axis=1)
    calm = int(medians.argmin())
    normal = float(medians[calm])
    scatter = max(1.4826 * float(np.median(np.abs(windows[calm] - normal))), 0.1)
    if heights[-1] <= normal + 5 * scatter:
        return None
    usual = np.flatnonzero(heights <= normal + 2 * scatter)
    start = int(usual[-1]) + 1 if len(usual) else 0
    tenfold = np.flatnonzero(heights[start:] >= normal + 1)
    return start, normal, bool(len(tenfold) and tenfold[0] <= 1)


@pytest.mark.parametrize("seed", range(40))
def test_the_onset_is_the_same_as_with_every_window_in_memory(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 400))
    heights = rng.normal(0, rng.choice([0.01, 0.3]), count).round(rng.choice([1, 6]))  # rounded: with ties
    heights[count * 2 // 3 :] += rng.choice([0.0, 1.0, 3.0]) * np.linspace(
        rng.choice([0, 1]), 1, count - count * 2 // 3
    )
    assert _onset(heights) == onset_in_square_memory(heights)


def test_many_bad_evaluations_cost_no_more_than_good_ones():
    log = train([2 + math.sin(n) / 2 for n in range(20_000)], [1.0] * 20_000)

    def seconds(loss):
        start = time.process_time()
        autopsy(log + [{"step": 10 * n, "eval_loss": loss + n} for n in range(1, 2001)])
        return time.process_time() - start

    assert seconds(NAN) < 3 * seconds(1.0) + 0.2  # every step asked for every evaluation: 8 s


def test_many_repeated_losses_cost_no_more_than_others():
    def seconds(length):
        log = train([2 + math.sin(n // length) / 2 for n in range(10_000)], [1.0] * 10_000)
        start = time.process_time()
        assert ("repeated_loss" in autopsy(log).codes) is (length > 1)
        return time.process_time() - start

    assert seconds(4) < 3 * seconds(1) + 0.2  # each repetition asked which steps were guarded: 20 s


def test_a_long_run_takes_memory_of_its_own_size():
    count = 20_000
    heights = np.random.default_rng(0).normal(0, 0.1, count)
    tracemalloc.start()
    _onset(heights)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * count  # every window written out: count²/4 numbers of 8 bytes


# --------------------------------------------------------------------------------------------------------------- plot


def test_the_plot_shows_the_run_and_marks_the_findings(tmp_path):
    figure = autopsy(ENTRIES).plot()
    loss, norm = figure.axes
    assert loss.get_ylabel() == "loss"
    assert norm.get_ylabel() == "gradient norm"
    assert norm.get_xlabel() == "step"
    drawn = {line.get_label(): line for line in loss.lines}
    assert list(drawn["training loss"].get_ydata()) == [entry["loss"] for entry in ENTRIES if "loss" in entry]
    assert list(norm.lines[1].get_xdata()) == [13, 14]  # the crosses: grad_norm is NaN there
    assert 13 in {line.get_xdata()[0] for line in loss.lines if line.get_linestyle() == ":"}
    assert all(code in loss.get_title(loc="left") for code in CODES)
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_the_plot_draws_every_evaluation_set():
    loss, _ = autopsy(train([2.0, 1.9]) + sets(a=[1.5, 1.4], b=[1.6, NAN])).plot().axes
    assert {"eval_a_loss", "eval_b_loss", "eval_b_loss: NaN or inf"} <= {line.get_label() for line in loss.lines}


@pytest.mark.parametrize("entries", [evals(1.5, 1.4), train([NAN], [NAN]), train([1.0])])
def test_the_plot_needs_neither_norms_nor_finite_numbers(entries):
    figure = autopsy(entries).plot()
    figure.canvas.draw()
    assert len(figure.axes) == 2


def test_the_plot_has_only_greys():
    for axis in autopsy(ENTRIES).plot().axes:
        for line in axis.lines:
            assert str(line.get_color()) == "black" or float(line.get_color()) < 0.7


# ------------------------------------------------------------------------------------------- what other programs write


def lines(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def llama_factory(loss, step, **more):
    """An entry of trainer_log.jsonl, which once gave all names to each."""
    names = {"current_steps": step, "total_steps": 400, "loss": loss, "eval_loss": None, "predict_loss": None}
    return {**names, "reward": None, "learning_rate": 1e-5, "epoch": 0.1, "percentage": step / 4, **more}


def test_null_beside_another_measurement_was_not_measured(tmp_path):
    entries = [llama_factory(loss, 10 * n + 10) for n, loss in enumerate(falling(9))]
    entries.append(llama_factory(None, 90, eval_loss=1.9, learning_rate=None))
    entries.append(llama_factory(None, 90, learning_rate=None))
    healthy = autopsy(lines(tmp_path / "trainer_log.jsonl", entries))
    assert healthy.codes == []
    assert healthy.log.entries[-1]["step"] == 90
    assert autopsy(tmp_path).codes == []  # the folder, where no trainer_state.json stands
    entries[4]["loss"] = None  # a rate was written, so a step was made
    assert where(entries) == {"nan_loss": 50}


def test_a_loss_that_jumps_to_zero_for_good_was_nan():
    seen = autopsy([llama_factory(loss, 10 * n + 10) for n, loss in enumerate([*falling(9), 0.0, 0.0, 0.0])])
    assert [(f.code, f.rows[0], f.confidence) for f in seen] == [
        ("zeros_for_nan", 100, "likely"),
        ("sudden_divergence", 100, "likely"),
    ]
    assert autopsy(train([2.0 * 0.3**n for n in range(12)] + [0.0] * 5)).codes == ["no_gradient"]  # it fell there
    learned = {"rewards/accuracies": [1.0] * 12}
    assert autopsy(train([*falling(9), 0.0, 0.0, 0.0], **learned)).codes == []
    late = autopsy(train([*falling(8), 0.0, 0.0]) + evals(NAN))
    assert late.codes == ["zeros_for_nan", "sudden_divergence", "eval_of_dead_model"]


@pytest.mark.parametrize("norm", [-1.0, 1.0, 2**0.5])
def test_a_norm_that_never_moves_beside_a_zero_loss_is_none(norm):
    seen = autopsy(train([1.1, 1.05, 0.0, 0.0, 0.0], [1.5, 1.003, norm, norm, norm]))
    assert where(seen.log.entries) == {"zeros_for_nan": 3, "sudden_divergence": 3}
    assert f"{norm:.6g} each time" in seen[0].message
    assert autopsy(train([0.0] * 4, [norm] * 4, reward=[0.5] * 4)).codes == []
    assert autopsy(train([1.1, 1.05, 0.0, 0.0], [1.5, 1.0, 0.9, 1.1])).codes == []


def test_a_rate_that_stands_still_tells_skipped_steps_without_a_norm():
    rates = [*[1e-3 - 1e-5 * n for n in range(10)], *[9e-4] * 8]
    assert where(train([*falling(10), *[0.0] * 8], rates=rates))["steps_skipped"] == 12


def test_without_a_gradient_the_reason_is_told():
    still = train([0.35] * 2 + [0.34] * 3, [0.0] * 5)
    assert "nothing reaches the weights" in autopsy(still)[0].message
    alike = autopsy(train([0.0] * 4, [0.0] * 4, reward=[3.0] * 4, reward_std=[0.0] * 4))
    assert alike.codes == ["zero_gradient"]
    assert "rewards of each group are alike" in alike[0].message
    assert autopsy(train(falling(4), [1.0, 0.0, 0.0, 1.0])).codes == []


def test_what_else_was_finite_stands_beside_the_loss():
    beside = {"logps/rejected": [1.0, NAN], "logits/chosen": [1.0, 1.0], "rewards/accuracies": [1.0, 0.0]}
    (finding,) = autopsy(train([0.7, NAN], [1.0, 1.0], **beside))
    assert "first at step 2 (NaN or inf too: logps/rejected; finite: grad_norm, logits/chosen)." in finding.message


def test_an_evaluation_alone_says_nothing_of_the_training():
    assert "while training" not in autopsy(evals(NAN))[0].message
    assert "while training" not in autopsy(train([0.0] * 4) + evals(NAN))[-1].message
    assert "while training is" in autopsy(train(falling(4), steady(4)) + evals(NAN))[0].message


def test_where_no_step_is_told_entries_are_counted(tmp_path):
    printed = "".join(f"{{'loss': {loss}, 'grad_norm': 1.0}}\n" for loss in (1.1, 1.0, "nan"))
    (tmp_path / "train.log").write_text("12:00 INFO start {not a dict}\n" + printed)
    seen = autopsy(tmp_path / "train.log")
    assert (seen.unit, list(seen[0].rows)) == ("entry", [3])
    assert "first at entry 3" in seen[0].message
    assert "entry 3" in seen[0].fix
    assert "damaged_file" not in seen.codes
    assert seen.plot().axes[1].get_xlabel() == "number of the log entry"


def test_an_entry_that_is_printed_twice_counts_once(tmp_path):
    twice = ["{'loss': 0.0000, 'epoch': 0.01}", "{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.01}"]
    (tmp_path / "log.txt").write_text("\n".join(twice * 3))
    assert len(autopsy(tmp_path / "log.txt").log.entries) == 3


@pytest.mark.parametrize(
    ("names", "row"),
    [
        ({"loss": "loss", "step": "global_step/max_steps"}, {"step": "{}/438"}),
        ({"loss": "train_loss", "step": "step"}, {}),
        ({"loss": "Training Loss", "step": "Step"}, {}),
        ({"loss": "my-run - train/loss", "step": "Step"}, {"my-run - train/loss__MIN": "0.1"}),
        ({"loss": "loss", "step": "iteration"}, {}),
    ],
)
def test_other_programs_have_other_names(names, row, tmp_path):
    entries = []
    for n, loss in enumerate([*falling(9), NAN]):
        step = str(10 * n + 10)
        entries.append({names["loss"]: str(loss), names["step"]: row.get("step", "{}").format(step), **row})
        entries[-1].pop("step", None) if names["step"] != "step" else None
    with open(tmp_path / "log.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, entries[0])
        writer.writeheader()
        writer.writerows(entries)
    assert where(tmp_path / "log.csv") == {"nan_loss": 100, "sudden_divergence": 100}


def test_what_powershell_writes_is_read(tmp_path):
    (tmp_path / "log.jsonl").write_bytes('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": NaN}\n'.encode("utf-16"))
    assert where(tmp_path / "log.jsonl") == {"nan_loss": 2, "sudden_divergence": 2}


def console(*pieces):
    """What is printed for each loss: a dict, and a bar if there is one."""
    entry = "{{'loss': {}, 'grad_norm': {}, 'learning_rate': 1e-05, 'epoch': {}}}\n"
    return "".join(piece if isinstance(piece, str) else entry.format(*piece) for piece in pieces)


BAR = " {0}%|###  | {0}/60 [00:01<00:02, 9.9it/s]\n".format
DEAD = [(1.5, 1.0, 0.1), (1.4, 1.1, 0.2), (1.3, 0.9, 0.3), (0.0, "nan", 0.4), (0.0, "nan", 0.5), (0.0, "nan", 0.6)]


@pytest.mark.parametrize(
    ("text", "unit", "first"),
    [
        (console(*itertools.chain(*((entry, BAR(10 * n)) for n, entry in enumerate(DEAD, 1)))), "step", 40),
        # A file is buffered, and the bars are not: they come first.
        (console(*map(BAR, range(10, 70, 10)), *DEAD), "entry", 4),
        (console(*DEAD, BAR(60)), "entry", 4),
        (console(*itertools.chain(*((entry, BAR(8)) for entry in DEAD))), "entry", 4),  # somebody else's
        (console('{"step": 5, "seed": 1}\n', "{'use_loss': True, 'max_steps': 60}\n", *DEAD), "entry", 4),
        (console(*DEAD).replace("'loss'", "\x1b[32m'loss'\x1b[0m"), "entry", 4),
        (console(*DEAD).replace("\n", "\r\n"), "entry", 4),
    ],
)
def test_a_bar_gives_a_step_only_where_it_stands_right_after_its_entry(text, unit, first, tmp_path):
    (tmp_path / "train.log").write_text(text)
    seen = autopsy(tmp_path / "train.log")
    assert (seen.unit, seen.codes[0], seen[0].rows[0]) == (unit, "filter_footprint", first)
    assert len(seen.log.entries) == 6


def test_two_trainings_of_different_length_keep_their_steps(tmp_path):
    first = itertools.chain(*((entry, BAR(10 * n)) for n, entry in enumerate(DEAD[:3], 1)))
    second = itertools.chain(*((entry, BAR(20 * n).replace("/60", "/120")) for n, entry in enumerate(DEAD[:3], 1)))
    (tmp_path / "train.log").write_text(console(*first, *second))
    assert [e["step"] for e in autopsy(tmp_path / "train.log").log.entries] == [10, 20, 30, 20, 40, 60]


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("form", ["records", "csv", "csv with an index", "csv with NaN", "json"])
def test_a_table_of_a_real_run_says_what_its_log_says(form, poisoned, tmp_path):
    import pandas

    more = {"include_num_input_tokens_seen": "all", "eval_strategy": "steps", "eval_steps": 4, "logging_steps": 2}
    kind = Poisoned if poisoned else Trainer
    logged = lm_run(tmp_path, kind, evaluate=True, max_steps=12, logging_nan_inf_filter=False, **more)
    frame, file = pandas.DataFrame(logged), tmp_path / "log.csv"
    write = {
        "records": lambda: frame.to_dict("records"),
        "csv": lambda: frame.to_csv(file, index=False),
        "csv with an index": lambda: frame.to_csv(file),
        "csv with NaN": lambda: frame.to_csv(file, index=False, na_rep="NaN"),
        "json": lambda: file.with_suffix(".json").write_text(frame.to_json(orient="records")),
    }
    written = write[form]()
    source = written if form == "records" else file.with_suffix(".json") if form == "json" else file
    assert where(source) == where(logged)
    assert bool(where(logged)) == poisoned


def test_numbers_rounded_for_the_console_are_alike_by_themselves():
    assert autopsy(evals(1.5, 1.4, 1.251, 1.251, 1.251, eval_runtime=3.0)).codes == []
    assert autopsy(train([0.05, 0.04, 0.01234, 0.01234, 0.01234, 0.01], steady(6))).codes == []


def test_a_gradient_norm_of_null_is_the_nan_of_a_strict_writer():
    log = train(falling(10), [*steady(8), None, None], [1e-5] * 10)
    assert where(log) == {"gradient_not_finite": 9, "sudden_divergence": 9}


def test_a_loss_that_is_saturated_was_measured():
    assert autopsy(evals(0.0, **{"eval_rewards/accuracies": 1.0, "eval_rewards/margins": 900.0})).codes == []
    learned = {"logps/chosen": [-9.0] * 3}  # KTO logs no accuracies
    assert autopsy(train([0.0] * 3, [0.0] * 3, **learned)).codes == []
    assert autopsy(train([0.0] * 3, [0.0] * 3, **{"logps/chosen": [0.0] * 3})).codes == ["no_gradient"]


def test_noise_around_zero_repeats_where_rewards_are_the_goal():
    assert autopsy(train([-4.967053e-09] * 9, steady(9), reward=[0.5] * 9)).codes == []
    assert "zeros_for_nan" not in autopsy(train([0.02, -0.01, 0.0, 0.03, 0.0, 0.0])).codes


def test_a_table_of_lightning_has_a_loss_for_each_step(tmp_path):
    rows = [f"{n},,{loss}," for n, loss in enumerate([*falling(9), NAN])]
    (tmp_path / "metrics.csv").write_text("\n".join(["step,train_loss_epoch,train_loss_step,val_loss", *rows]))
    assert where(tmp_path / "metrics.csv") == {"nan_loss": 9, "sudden_divergence": 9}


def test_a_row_that_measures_two_things_and_proves_both_leaves_the_others_alone():
    log = [{**entry, "learning_rate": 1e-5} for entry in train(falling(6), steady(6))]
    both = {"step": 6, "eval_loss": 1.5, "eval_runtime": 1.0, "train_loss": 2.0, "train_samples_per_second": 3.0}
    assert autopsy(as_table([*log, both])).codes == []
    assert where(as_table([*log, {**both, "eval_loss": NAN}])) == {"nan_eval_loss": 6}
