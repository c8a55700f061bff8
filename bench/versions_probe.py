"""What one set of versions does: each row of `bench.versions`, reproduced by the trainers that are installed here.

    python bench/versions_probe.py

Prints one JSON object: `versions` (package: version) and `seen` (row: what was seen, in words). It needs torch,
transformers and TRL, and nothing of this project, so that it runs where the project does not. On the CPU, in fp32
where nothing else is said. An answer is a word such as "nan", never a measured number: it is the same on every machine.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import logging
import math
import os
import sys
import tempfile
import warnings
from importlib.metadata import version
from types import SimpleNamespace

import datasets
import torch
import transformers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PrinterCallback

os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")  # TRL reads its own on import
import trl
from trl.experimental import orpo, tpo

PACKAGES = ("torch", "transformers", "trl")
END, PADDING = "<|endoftext|>", "<|padding|>"
LONG, ROWS = 5, 8  # row 5 of the 8 has a prompt that fills max_length
COMMON = {
    "max_length": 48, "learning_rate": 1e-4, "logging_steps": 1, "save_strategy": "no", "report_to": [], "bf16": False,
    "disable_tqdm": True, "gradient_checkpointing": False, "use_cpu": True, "seed": 0, "per_device_eval_batch_size": 1,
}  # fmt: skip


# --- a model and rows ------------------------------------------------------------------------------------------------


def make_rows() -> list[dict[str, str]]:
    """Preference rows with the columns prompt, chosen, rejected and reference."""
    rows = [
        {"prompt": f"What is {n} plus {n}?", "chosen": f" It is {2 * n}.", "rejected": " No.", "reference": f" {2 * n}"}
        for n in range(ROWS)
    ]
    rows[LONG]["prompt"] = "Think carefully. " * 40 + rows[LONG]["prompt"]
    return rows


def make_tokenizer():
    """Bytes, one token each; unk = bos = eos as Pythia has it, and pad = unk as in huggingface/trl#1789."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0, PADDING: 1, **{letter: i for i, letter in enumerate(alphabet, start=2)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PADDING])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=END, bos_token=END, eos_token=END, pad_token=END
    )


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0, **settings) -> GPTNeoXForCausalLM:
    """A GPT-NeoX (the architecture of Pythia) with 2 layers of width 32."""
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=0, **settings,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).to(dtype)


def make_trainer(cls, config, model=None, rows: list[dict] | None = None, **arguments):
    rows = datasets.Dataset.from_list(make_rows() if rows is None else rows)
    args = config(output_dir="runs", **{**COMMON, "max_steps": 3, **arguments})
    model = make_model() if model is None else model
    reference = {"ref_model": copy.deepcopy(model)} if cls is trl.DPOTrainer else {}
    trainer = cls(
        model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=make_tokenizer(), **reference
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


# --- words for what was seen -----------------------------------------------------------------------------------------


def word(value: float | None) -> str:
    """ "nan", "inf", "0.0" or "finite"; "absent" for None."""
    if value is None:
        return "absent"
    if math.isnan(value) or math.isinf(value):
        return str(value)
    return "0.0" if value == 0 else "finite"


def tensor_word(tensor: torch.Tensor) -> str:
    return "nan" if tensor.isnan().any() else "inf" if tensor.isinf().any() else "finite"


def last_logged(trainer, key: str = "grad_norm") -> dict[str, float]:
    """The log's last entry with `key`: of training, or with "eval_loss" of an evaluation."""
    return [entry for entry in trainer.state.log_history if key in entry][-1]


# --- the rows of the table -------------------------------------------------------------------------------------------


def tpo_evaluate() -> dict[str, str]:
    """huggingface/trl#5662: one row without room for its answer, in a batch of its own."""
    shown = make_trainer(tpo.TPOTrainer, tpo.TPOConfig)
    shown.evaluate()
    log = last_logged(shown, "eval_loss")
    unfiltered = make_trainer(tpo.TPOTrainer, tpo.TPOConfig, logging_nan_inf_filter=False)
    return {
        "tpo_rows": f"{len(unfiltered.eval_dataset)} of {ROWS}",
        "tpo_eval_loss_unfiltered": word(unfiltered.evaluate()["eval_loss"]),
        "tpo_eval_loss": word(log["eval_loss"]),
        "tpo_eval_entropy": word(log.get("eval_entropy")),
    }


def tpo_train() -> dict[str, str]:
    """Training on the bad row alone: what the log says, and what it would say without the filter."""
    bad = [make_rows()[LONG]] * 2
    losses = []
    for keep_nan in (False, True):
        trainer = make_trainer(tpo.TPOTrainer, tpo.TPOConfig, rows=bad, logging_nan_inf_filter=not keep_nan)
        trainer.train()
        losses.append(last_logged(trainer)["loss"])
    alive = all(weight.isfinite().all() for weight in trainer.model.parameters())
    return {
        "tpo_train_loss": " / ".join(map(word, losses)),
        "tpo_train_weights": "finite" if alive else "not finite",
    }


class Warned(logging.Handler):
    """Collects warnings."""

    def __init__(self, level: int):
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def dpo_long_row() -> dict[str, str]:
    """The same rows in DPO: are they dropped, is it said, and is the loss finite?"""
    warned = Warned(logging.WARNING)
    logging.getLogger("trl").addHandler(warned)
    sigmoid = make_trainer(trl.DPOTrainer, trl.DPOConfig, logging_nan_inf_filter=False)
    metrics = sigmoid.evaluate()
    logging.getLogger("trl").removeHandler(warned)
    kept = len(sigmoid.eval_dataset)
    told = any("drop" in text.lower() for text in [*metrics, *warned.texts])
    mixed = make_trainer(trl.DPOTrainer, trl.DPOConfig, loss_type=["sigmoid", "sft"], logging_nan_inf_filter=False)
    return {
        "dpo_rows": f"{kept} of {ROWS}" + ("" if kept == ROWS else ", and says so" if told else ", not a word"),
        "dpo_eval_loss": word(metrics["eval_loss"]),
        "dpo_sft_eval_loss": word(mixed.evaluate()["eval_loss"]),
    }


SIGNATURE = ("eval_loss", "eval_rewards/margins", "eval_rewards/accuracies")


def dpo_fp16(**optimizer) -> tuple[list[str], bool]:
    """huggingface/trl#1789: weights in fp16, pad = unk. The last step's loss and gradient norm, then the evaluation."""
    trainer = make_trainer(trl.DPOTrainer, trl.DPOConfig, make_model(torch.float16), learning_rate=1e-6, **optimizer)
    trainer.train()
    returned, step = trainer.evaluate(), last_logged(trainer)
    log = last_logged(trainer, "eval_loss")
    words = [word(value) for value in (step["loss"], step["grad_norm"], *map(log.get, SIGNATURE))]
    return words, SIGNATURE[1] in returned


def dpo_adamw() -> dict[str, str]:
    signature, returned = dpo_fp16(optim="adamw_torch")
    return {
        "dpo_fp16_adamw_torch": ", ".join(signature),
        "dpo_metrics_returned": "yes" if returned else "no, in the log only",
    }


def dpo_default() -> dict[str, str]:
    signature, _ = dpo_fp16()
    optimizer = trl.DPOConfig("runs", use_cpu=True).optim
    return {"dpo_fp16_default": f"{'nan' if 'nan' in signature else 'finite'} ({optimizer.value})"}


def dpo_script() -> dict[str, str]:
    """Arguments of the script in huggingface/trl#1789, and of an article's repair of it, that are unknown by now."""
    known = {*inspect.signature(trl.DPOConfig).parameters, *inspect.signature(trl.DPOTrainer).parameters}
    gone = [name for name in ("tokenizer", "evaluation_strategy", "max_prompt_length") if name not in known]
    return {"dpo_script_gone": ", ".join(gone) or "none"}


def orpo_sure() -> dict[str, str]:
    """huggingface/trl#2564: the odds ratio loss of an answer with the log-prob 0, which is: of probability 1."""
    stand_in = SimpleNamespace(beta=1.0, accelerator=SimpleNamespace(device="cpu"))
    chosen = torch.tensor([0.0], requires_grad=True)
    losses, *_ = orpo.ORPOTrainer.odds_ratio_loss(stand_in, chosen, torch.tensor([-3.0]))
    losses.sum().backward()
    return {"orpo_sure": f"{word(losses.item())}, gradient {tensor_word(chosen.grad)}"}


def masked_rows() -> dict[str, str]:
    """Left padding under a causal mask: the first queries may see no key. Logits of a batch of two rows."""
    keep = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    allowed = torch.ones(5, 5, dtype=torch.bool).tril() & keep.bool()[:, None, :]
    masks = {"library": keep, "own": torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf)[:, None]}
    seen = {}
    for name, mask in masks.items():
        words = []
        for attention in ("eager", "sdpa"):
            model = make_model(attn_implementation=attention).eval()
            with torch.no_grad():
                logits = model(torch.full((2, 5), 7), attention_mask=mask).logits
            words.append(f"{attention} {tensor_word(logits)}")
        seen[f"masked_row_{name}"] = ", ".join(words)
    return seen


def resume() -> dict[str, str]:
    """huggingface/transformers#43701: are all weights of a GPT-NeoX loaded when a run is resumed?"""
    rows = make_rows()[:LONG]
    first = make_trainer(tpo.TPOTrainer, tpo.TPOConfig, rows=rows, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    again = make_trainer(tpo.TPOTrainer, tpo.TPOConfig, make_model(seed=1), rows=rows, max_steps=2)
    again.train(resume_from_checkpoint="runs/checkpoint-2")
    saved, loaded = (trainer.model for trainer in (first, again))
    parts = {
        "body": torch.equal(saved.get_input_embeddings().weight, loaded.get_input_embeddings().weight),
        "head": torch.equal(saved.get_output_embeddings().weight, loaded.get_output_embeddings().weight),
    }
    return {"resume_head": ", ".join(f"{part} {'loaded' if same else 'NOT loaded'}" for part, same in parts.items())}


# Who answers which rows of the table; a group that fails says so in each of its rows.
GROUPS = {
    tpo_evaluate: ("tpo_rows", "tpo_eval_loss_unfiltered", "tpo_eval_loss", "tpo_eval_entropy"),
    tpo_train: ("tpo_train_loss", "tpo_train_weights"),
    dpo_long_row: ("dpo_rows", "dpo_eval_loss", "dpo_sft_eval_loss"),
    dpo_script: ("dpo_script_gone",),
    dpo_adamw: ("dpo_fp16_adamw_torch", "dpo_metrics_returned"),
    dpo_default: ("dpo_fp16_default",),
    orpo_sure: ("orpo_sure",),
    masked_rows: ("masked_row_library", "masked_row_own"),
    resume: ("resume_head",),
}


def answers(group, rows: tuple[str, ...]) -> dict[str, str]:
    try:
        seen = group()
    except Exception as error:  # another release may fail in any way; which one it was is the answer
        print(f"{group.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
        return dict.fromkeys(rows, f"does not run ({type(error).__name__})")
    assert tuple(seen) == rows, f"{group.__name__} answers {tuple(seen)}"
    return seen


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    seen: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # trainers print
        os.chdir(folder)
        for group, rows in GROUPS.items():
            seen |= answers(group, rows)
        os.chdir("/")  # Windows does not remove the folder it stands in
    versions = {name: version(name).split("+")[0] for name in PACKAGES}
    print(json.dumps({"versions": versions, "seen": seen}))


if __name__ == "__main__":
    main()
