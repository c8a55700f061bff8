"""Models and data of the course: a tiny model made on the spot, a real one from a package, and preference pairs.

Nothing is downloaded unless a hub id was given. What cannot be used raises ``InputError`` with one line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from nanlab.course import facts
from nanlab.errors import InputError
from nanlab.models import clone

SCALES = ("tiny", "small", "full")
COLUMNS = ("prompt", "chosen", "rejected", "reference")
END, PADDING = "<|endoftext|>", "<|padding|>"  # Pythia's ids 0 and 1

# Pythia-14m's shape (Biderman et al. 2023, arXiv:2304.01373) on a small vocabulary and a shorter context.
TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
}
TINY_VOCABULARY = 1536


def scale() -> str:
    """The size of everything: ``NANLAB_SCALE``, or ``"full"`` with a CUDA device and ``"tiny"`` without.

    Raises InputError for an unknown value.
    """
    value = os.environ.get("NANLAB_SCALE") or ("full" if torch.cuda.is_available() else "tiny")
    if value not in SCALES:
        raise InputError(f"NANLAB_SCALE={value!r}: not a scale; set it to {', '.join(SCALES[:-1])} or {SCALES[-1]}")
    return value


# --- models ---------------------------------------------------------------------------------------------------------


def load_model(name_or_path: str | os.PathLike = "tiny", dtype: torch.dtype = torch.float32, seed: int = 0):
    """Load or make a causal language model and its tokenizer, on the CPU, in ``dtype``, in evaluation mode.

    ``"tiny"``: GPT-NeoX of Pythia-14m's shape with random weights, bit-identical for a seed.
    """
    if name_or_path == "tiny":
        return _tiny_model(dtype, seed), tiny_tokenizer()
    raise InputError(f"model {str(name_or_path)!r}: unknown name")


def tiny_tokenizer():
    """A byte-level BPE tokenizer like Pythia's, trained on the course's own text: the same on every machine.

    Pythia's special tokens are kept: unk = bos = eos = ``<|endoftext|>`` (id 0), and ``pad_token`` is not set, because
    Pythia's is not. TRL then pads with eos (lesson 05 shows what that does). ``<|padding|>`` (id 1) is in the
    vocabulary, as in Pythia's, for who wants a pad token of its own: ``tokenizer.pad_token = "<|padding|>"``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY,
        special_tokens=[END, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(facts.corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token=END, bos_token=END, eos_token=END)


def _tiny_model(dtype: torch.dtype, seed: int):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        **TINY,
        vocab_size=TINY_VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )
    with _own_randomness(seed):
        model = GPTNeoXForCausalLM(config).eval()
    return model if dtype == torch.float32 else clone(model, dtype)


@contextmanager
def _own_randomness(seed: int):
    """Seed the CPU's generator for a while; the caller's random state, on every device, stays as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
        yield


def warm_up(
    model,
    tokenizer,
    rows: Iterable[dict],
    *,
    columns: Sequence[str] = ("reference", "chosen"),
    steps: int = 80,
    batch_size: int = 16,
    lr: float = 2e-3,
    seed: int = 0,
) -> list[float]:
    """Teach a model how ``rows`` look, in place: plain next-token training on prompts with right answers.

    A batch holds ``batch_size`` texts: a prompt, its ``reference`` or its ``chosen`` answer, and eos; the loss is the
    mean cross-entropy over their tokens. A random model has nothing to lose; after the warm-up preference tuning has
    something that it could wreck. A plain loop on purpose:
    trl's SFTTrainer leaves a model behind whose forward is patched, see ``nanlab.models.clone``.

    Returns the loss of each step, in nats per token. Same seed, same weights; the global random state is not touched.
    """
    texts = [row["prompt"] + row[column] + tokenizer.eos_token for row in rows for column in columns]
    examples = [torch.tensor(ids) for ids in tokenizer(texts)["input_ids"]]
    batches = _batches(len(examples), batch_size, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    was_training, losses = model.training, []
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 10, 2 * (1 - step / steps))
        batch = _pad([examples[i] for i in next(batches)])
        loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.train(was_training)
    return losses


def _batches(rows: int, batch_size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Endless batches of row numbers; every row once before any row twice."""
    queue: list[int] = []
    while True:
        while len(queue) < batch_size:
            queue += torch.randperm(rows, generator=generator).tolist()
        yield queue[:batch_size]
        queue = queue[batch_size:]


def _pad(examples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A right-padded batch; padding has no label (-100), so that pad = eos takes no eos label away."""
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(examples, batch_first=True),
        "labels": pad(examples, batch_first=True, padding_value=-100),
        "attention_mask": pad([torch.ones_like(ids) for ids in examples], batch_first=True),
    }


# --- data -----------------------------------------------------------------------------------------------------------


def load_preferences(source=None, split: str | None = None, columns: dict | None = None):
    """The preference pairs: a DatasetDict with splits train and held_out (and traps, for the course's own set)."""
    from datasets import Dataset, DatasetDict

    if source is not None:
        raise InputError(f"data {str(source)!r}: unknown")
    splits = {
        "train": facts.preference_rows(held_out=False),
        "held_out": facts.preference_rows(held_out=True),
        "traps": facts.trap_rows(),
    }
    data = DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
    return data[split] if split else data


REWARDS = {"reference": 1.0, "chosen": facts.CHOSEN_REWARD, "rejected": 0.0}


def to_scored(dataset):
    """Preference rows as scored completions, for token-policy training: columns prompt, completion, reward, group.

    Each row becomes a group of three completions: reference 1.0, chosen 0.8 (or the row's own ``reward``), rejected
    0.0. An answer that stands twice in a row is taken once. ``trap`` is carried over.
    """
    from datasets import Dataset

    scored = []
    for group, row in enumerate(dataset):
        rewards = {**REWARDS, "chosen": row.get("reward", REWARDS["chosen"])}
        answers = {row[column]: rewards[column] for column in reversed(REWARDS)}
        extra = {"trap": row["trap"]} if "trap" in row else {}
        scored += [
            {"prompt": row["prompt"], "completion": answer, "reward": reward, "group": group, **extra}
            for answer, reward in reversed(answers.items())
        ]
    return Dataset.from_list(scored)
