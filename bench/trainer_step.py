"""One training step of each trainer beside the TRL or transformers trainer it stands on: time and peak memory.

    python -m bench.trainer_step

A step is `training_step` (forward, loss, metrics, backward), clipping and AdamW. Both sides get the same batch and
equal weights; half of each row is prompt. Times: both sides take turns in one process, in changing order; the figure is
the median of the rounds' ratios. Memory: a fresh process each, the growth of its peak resident memory over what it
held before the step (on CUDA: of the allocator's peak). `TokenTPOTrainer` is held against a plain Trainer with
cross-entropy on the same tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MUST_REACH = {"time": 1.05, "memory": 1.0}
# rows, tokens a row, and the model
SHAPES = {
    "tiny": (8, 64, "GPTNeoXConfig", {"vocab_size": 1536, "hidden_size": 128, "num_hidden_layers": 6,
                                      "num_attention_heads": 4, "intermediate_size": 512}),
    "smollm2": (2, 128, "LlamaConfig", {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 4,
                                        "num_attention_heads": 9, "num_key_value_heads": 3,
                                        "intermediate_size": 1536, "tie_word_embeddings": True}),
}  # fmt: skip
ROW = {"prompt": "two and two is", "chosen": " four", "rejected": " five", "reference": " two and two is four"}
SCORED = {"prompt": ROW["prompt"], "completion": ROW["chosen"], "reward": 1.0, "group": 0}


class Kind(NamedTuple):
    """Both trainers, the config for each, answers in a row, what the config and the constructor get."""

    ours: str
    theirs: str
    configs: tuple[str, str]
    answers: int
    options: dict
    has_reference: bool = False


KINDS = {
    "tpo": Kind("TPOTrainer", "trl.experimental.tpo:TPOTrainer", ("TPOConfig", "TPOConfig"), 3, {}),
    "dpo": Kind("DPOTrainer", "trl:DPOTrainer", ("DPOConfig", "DPOConfig"), 2, {}, True),
    "dpo + sft": Kind(
        "DPOTrainer", "trl:DPOTrainer", ("DPOConfig", "DPOConfig"), 2, {"loss_type": ["sigmoid", "sft"]}, True
    ),
    "token-tpo": Kind("TokenTPOTrainer", "transformers:Trainer", ("TokenTPOConfig", "TrainingArguments"), 1, {}),
}
SIDES = ("ours", "theirs")


def make_model(shape: str, seed: int = 0):
    import torch
    import transformers

    *_, config, settings = SHAPES[shape]
    torch.manual_seed(seed)
    config = getattr(transformers, config)(**settings, max_position_embeddings=256)
    return transformers.AutoModelForCausalLM.from_config(config)


def make_batch(kind: str, shape: str, side: str) -> dict:
    import torch

    rows, tokens, _, settings = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    size = (rows * KINDS[kind].answers, tokens)
    ids = torch.randint(2, settings["vocab_size"], size, generator=generator)
    completion = torch.zeros_like(ids)
    completion[:, tokens // 2 :] = 1
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion}
    if kind == "token-tpo":
        batch["labels"] = ids.masked_fill(completion == 0, -100)
        batch["advantages"] = torch.randn(len(ids), generator=generator)
        if side == "theirs":
            batch = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    return batch


def make_trainer(kind: str, shape: str, side: str, device: str):
    import importlib

    from datasets import Dataset

    from nanlab.course.materials import tiny_tokenizer

    what = KINDS[kind]
    place, name = ("nanlab.trainers", what.ours) if side == "ours" else what.theirs.split(":")
    home = importlib.import_module(place)
    args = getattr(home, what.configs[SIDES.index(side)])(
        output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=device == "cpu", bf16=device == "cuda", disable_tqdm=True,
        **({"gradient_checkpointing": False} | what.options),
    )  # fmt: skip
    data = Dataset.from_list([SCORED if kind == "token-tpo" else ROW] * 2)
    given = {"ref_model": make_model(shape)} if what.has_reference else {}
    return getattr(home, name)(
        make_model(shape), args=args, train_dataset=data, processing_class=tiny_tokenizer(), **given
    )


def make_step(kind: str, shape: str, side: str, device: str) -> Callable[[], None]:
    import torch

    from nanlab.course import quiet

    quiet()
    trainer, batch = make_trainer(kind, shape, side, device), make_batch(kind, shape, side)
    trainer.current_gradient_accumulation_steps = 1  # train() sets it
    model = trainer.accelerator.prepare_model(trainer.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        trainer.training_step(model, dict(batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None], device: str) -> float:
    import torch

    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare_times(kind: str, shape: str, device: str, rounds: int) -> dict[str, float]:
    """Median milliseconds of both sides and the median of the ratios."""
    steps = {side: make_step(kind, shape, side, device) for side in SIDES}
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds + 2):
        for side in random.Random(number).sample(SIDES, 2):
            spent = seconds(steps[side], device)
            if number >= 2:  # the optimizer's state and lazy initialisation
                taken[side].append(spent)
    ratios = [a / b for a, b in zip(*taken.values(), strict=True)]
    return {side: 1e3 * statistics.median(taken[side]) for side in SIDES} | {"ratio": statistics.median(ratios)}


def peak_growth(kind: str, shape: str, side: str, device: str) -> float:
    """MiB by which the peak of this process grows in one step."""
    import torch

    step = make_step(kind, shape, side, device)
    step()  # what stays (gradients are freed, the optimizer's state is kept) is not the step's
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts over from what is held now
    before = _status("VmRSS")
    step()
    return (_status("VmHWM") - before) / 2**10


def _status(field: str) -> int:
    """A field of this process's memory status, in KiB."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def in_new_process(*arguments: str) -> str:
    # A fixed threshold makes malloc return every larger block to the system, so that the resident size is the truth.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "bench.trainer_step", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def compare_memory(kind: str, shape: str, device: str) -> dict[str, float]:
    mib = {
        side: json.loads(in_new_process("--device", device, "--peak", kind, shape, side).splitlines()[-1])
        for side in SIDES
    }
    return mib | {"ratio": mib["ours"] / mib["theirs"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)  # this process measures memory for another
    args = parser.parse_args()
    if args.peak:
        print(json.dumps(peak_growth(*args.peak, args.device)))
        return
    print(f"one training step, {args.device}, median of {args.rounds} rounds; must reach: {MUST_REACH}")
    print(f"{'':22}{'ms: nanlab':>12}{'theirs':>10}{'ratio':>8}{'MiB: nanlab':>12}{'theirs':>10}{'ratio':>8}")
    for shape, kind in itertools.product(SHAPES, KINDS):
        line = f"{shape:10}{kind:12}"
        for pair in (compare_times(kind, shape, args.device, args.rounds), compare_memory(kind, shape, args.device)):
            line += f"{pair['ours']:12.1f}{pair['theirs']:10.1f}{pair['ratio']:8.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
