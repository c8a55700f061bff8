"""Rows of a data set and their tokens, cut the way the trainers cut them: what `preflight` looks at."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Number
from typing import Any, NamedTuple

import numpy as np

from nanlab.errors import InputError

ANSWERS = ("chosen", "rejected", "reference", "completion")
NUMBERS = ("reward", "rewards", "ref_chosen_logps", "ref_rejected_logps")
_TOKENISED = ("input_ids", "labels", "completion_mask")
_USED = ("prompt", *ANSWERS, "text", "messages", *_TOKENISED, *NUMBERS, "group", "label")
_BATCH = 1000  # rows tokenised at a time: enough to keep a fast tokenizer busy, a few MB of ids
IGNORED = -100  # the label that cross-entropy leaves out


def length_limit(max_length: int | None, args) -> int | None:
    """Tokens kept of a row: the argument, else `args.max_length`, else no limit (None).

    Raises `InputError` for what is no whole number from 1.
    """
    limit = max_length if max_length is not None else getattr(args, "max_length", None)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise InputError(f"max_length is {limit!r}: give a whole number of tokens, at least 1")
    return None if limit is None else min(limit, sys.maxsize)  # numpy knows no larger number, and no row is longer


class Rows:
    """Columns of a data set, a batch at a time; the same for a `datasets.Dataset` and for a list of dicts."""

    def __init__(self, dataset) -> None:
        _check_kind(dataset)
        self._table = hasattr(dataset, "select_columns")
        names = dataset.column_names if self._table else _keys(dataset)
        self.names = [name for name in _USED if name in names]
        if not {"prompt", *ANSWERS, "text", "messages", "input_ids"} & set(self.names):
            raise InputError(
                f"no column to look at: found {', '.join(map(str, names))}; wanted e.g. prompt, chosen, rejected"
            )
        self._dataset = dataset.with_format(None).select_columns(self.names) if self._table else dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[tuple[int, dict[str, list]]]:
        for start in range(0, len(self), _BATCH):
            stop = min(start + _BATCH, len(self))
            if self._table:
                yield start, self._dataset[start:stop]
            else:
                rows = [self._dataset[row] for row in range(start, stop)]
                yield start, {name: [row.get(name) for row in rows] for name in self.names}


def _check_kind(dataset) -> None:
    if isinstance(dataset, Mapping) and {*_USED} & {*dataset}:
        raise InputError("this is a dict of columns: give datasets.Dataset.from_dict(…) of it, or a list of dicts")
    if isinstance(dataset, Mapping):
        raise InputError(f"this data set has several splits ({', '.join(map(str, dataset))}): give one of them")
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise InputError("the data set has no rows")
    if not hasattr(dataset, "__len__") or not _has_first_row(dataset):
        raise InputError(
            f"a {type(dataset).__name__} cannot be read by row: give a datasets.Dataset "
            "(from_pandas makes one of a DataFrame) or a list of dicts"
        )


def _has_first_row(dataset) -> bool:
    try:
        dataset[0]
    except (TypeError, LookupError):  # a set; a DataFrame, which looks for a column 0
        return False
    return True


def _keys(rows) -> list[str]:
    names: dict[str, None] = {}
    for number in range(len(rows)):
        row = rows[number]
        if not isinstance(row, Mapping):
            raise InputError(f"row {number} is a {type(row).__name__}, not a dict of columns")
        names.update(dict.fromkeys(row))
    return list(names)


@dataclass(frozen=True)
class Setup:
    """All that is fixed before the first row: what every check may ask."""

    tokenizer: Any
    args: Any
    model: Any
    max_length: int | None
    columns: Sequence[str]

    @cached_property
    def tokenised(self) -> bool:
        return "input_ids" in self.columns

    @cached_property
    def answers(self) -> list[str]:
        return [] if self.tokenised else [name for name in ANSWERS if name in self.columns]

    @cached_property
    def texts(self) -> list[str]:
        """The columns that must hold text."""
        if self.tokenised:
            return []
        return [name for name in ("prompt", *self.answers) if name in self.columns] if self.answers else [self.plain]

    @cached_property
    def plain(self) -> str:
        """The one column that is read where there are no answers."""
        return next(name for name in ("text", "messages", "prompt") if name in self.columns)

    @cached_property
    def prompts_only(self) -> bool:
        """As for GRPO and its like, which have the answers written during training."""
        return not self.tokenised and not self.answers and self.plain == "prompt"

    @cached_property
    def encoder_decoder(self) -> bool:
        return bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    @cached_property
    def trl(self) -> bool:
        """A TRL trainer: it appends eos to every answer, and masks padding by position, never by id."""
        return any(base.__module__.partition(".")[0] == "trl" for base in type(self.args).__mro__)

    @cached_property
    def keep_end(self) -> bool:
        return getattr(self.args, "truncation_mode", "keep_start") == "keep_end"

    @cached_property
    def embedding_rows(self) -> int | None:
        table = self.model.get_input_embeddings() if hasattr(self.model, "get_input_embeddings") else None
        return getattr(table, "num_embeddings", None)

    @cached_property
    def ids_may_overflow(self) -> bool:
        """Only then is every id worth a look."""
        if self.embedding_rows is None:
            return False
        return self.tokenised or max(self.tokenizer.get_vocab().values(), default=0) >= self.embedding_rows


# ------------------------------------------------------------------------------------------------------- rows to tokens


class Tokens(NamedTuple):
    """One column of a batch in tokens: `ids` of prompt and answer together, and where the answer starts."""

    ids: list[list[int]]
    start: np.ndarray  # (rows,) int64: tokens before the answer
    total: np.ndarray  # (rows,) int64: tokens before truncation

    @property
    def first(self) -> np.ndarray:
        """Tokens before the first that carries loss, (rows,) int64: nothing predicts the first token of all."""
        return np.maximum(self.start, 1)

    @property
    def counted(self) -> np.ndarray:
        """Tokens that carry loss before truncation, (rows,) int64."""
        return self.total - self.first


@dataclass
class Batch:
    """Some rows, tokenised as the trainers do it. Only rows that are `ok`, with text in every column, are tokenised."""

    start: int  # number of the first row
    columns: dict[str, list]
    setup: Setup
    faults: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        names = [name for name in _TOKENISED if name in self.columns] if self.setup.tokenised else self.setup.texts
        kinds = [[*map(_JUDGES.get(name, _fault), self.columns[name])] for name in names]
        size = len(next(iter(self.columns.values())))
        table = np.array(kinds, dtype=object).reshape(len(kinds), size)
        self.faults = {kind: (table == kind).any(axis=0) for kind in _FAULTS}

    @cached_property
    def ok(self) -> np.ndarray:
        return ~np.logical_or.reduce([rows for kind, rows in self.faults.items() if kind != "empty prompt"])

    @cached_property
    def labels(self) -> list[list[int]] | None:
        """Of the rows that are ok, where there is one a token; None where there is none, or a class for the row."""
        column = self.columns.get("labels")
        if column is None or isinstance(column[0], Number) or isinstance(next(iter(as_list(column[0])), 0), float):
            return None
        return [as_list(column[row]) for row in np.flatnonzero(self.ok)]

    @cached_property
    def tokens(self) -> dict[str, Tokens]:
        rows = np.flatnonzero(self.ok).tolist()
        if not rows:
            return {}
        if self.setup.tokenised:
            return {"labels": _from_labels(self, rows)}
        if self.setup.answers:
            return _tokenise_answers(self, rows)
        return {self.setup.plain: (_tokenise_prompts if self.setup.prompts_only else _tokenise_plain)(self, rows)}

    def kept(self, tokens: Tokens) -> np.ndarray:
        """Tokens of the answer that carry loss after truncation, (rows,) int64."""
        limit = self.setup.max_length
        if limit is None:
            return tokens.counted
        if self.setup.keep_end:
            return np.minimum(tokens.counted, limit)
        return np.maximum(np.minimum(tokens.total, limit) - tokens.first, 0)

    def none(self) -> np.ndarray:
        return np.zeros(len(self.ok), dtype=bool)

    def spread(self, seen: np.ndarray) -> np.ndarray:
        """From tokenised rows back to all rows."""
        every = self.none()
        every[self.ok] = seen
        return every


_FAULTS = ("missing", "empty", "not text", "empty prompt", "not ids")


def _fault(value) -> str:
    """Why a value is no text: "missing", "empty", "not text"; "" where it is text or chat messages."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "missing"
    if isinstance(value, str):
        return "not text" if _is_torn(value) else "" if value.strip() else "empty"
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) and "role" in turn for turn in value):
        return "not text"
    said = [turn.get("tool_calls") or turn.get("content") for turn in value]
    if None in said or any(isinstance(one, str) and _is_torn(one) for one in said):
        return "missing" if None in said else "not text"
    return "" if said and all(said) else "empty"


def _prompt_fault(value) -> str:
    """The trainers keep a row without a prompt: there is an answer to learn."""
    fault = _fault(value)
    return "empty prompt" if fault == "empty" else fault


def _is_torn(text: str) -> bool:
    """It holds half a surrogate pair, which no tokenizer takes and no file in UTF-8 holds."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _ids_fault(value, kind: type = Integral) -> str:
    value = value.tolist() if hasattr(value, "tolist") else value
    right = isinstance(value, list | tuple) and all(issubclass(one, kind) for one in {*map(type, value)})
    return "" if right else "not ids"


def _labels_fault(value) -> str:
    """A class, or one number for each token; a row without any is a row without a label."""
    return "" if value is None or isinstance(value, Number) else _ids_fault(value, Number)


_JUDGES = {
    "prompt": _prompt_fault,
    "input_ids": _ids_fault,
    "labels": _labels_fault,
    "completion_mask": _labels_fault,
}  # anything else is text


def _encode(tokenizer, texts: list[str], chat: bool) -> list[list[int]]:
    """Token ids, cut and padded nowhere. A chat template has written its own special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow tokenizer
        return tokenizer(texts, add_special_tokens=not chat, return_attention_mask=False, verbose=False)["input_ids"]
    backend.no_truncation()
    backend.no_padding()
    # The same ids as above without offsets and masks, in two thirds of the time.
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=not chat)]


def _render(setup: Setup, row: int, messages: list, **options) -> str:
    if not getattr(setup.tokenizer, "chat_template", None):
        raise InputError(f"row {row} holds chat messages but the tokenizer has no chat_template: set one, or give text")
    try:
        return setup.tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template is a program: it may fail in every way
        raise InputError(f"row {row}: the chat template refuses these messages: {error}") from error


def _is_chat(batch: Batch, row: int, values: list) -> bool:
    chat = isinstance(values[0], list)
    if any(isinstance(value, list) != chat for value in values):
        raise InputError(f"row {batch.start + row} mixes text and chat messages: use one of them everywhere")
    return chat


def _pair(batch: Batch, row: int) -> tuple[str, ...]:
    """The prompt, and the prompt with each answer, as the strings that are tokenised."""
    setup, number = batch.setup, batch.start + row
    answers = [batch.columns[name][row] for name in setup.answers]
    if "prompt" in batch.columns:
        prompt = batch.columns["prompt"][row]
    else:  # the prompt is what the answers share
        shared = min([len(answer) - 1 for answer in answers] + [_shared(answers[0], answer) for answer in answers[1:]])
        shared = shared if len(answers) > 1 else 0
        prompt, answers = answers[0][:shared], [answer[shared:] for answer in answers]
    if _is_chat(batch, row, [prompt, *answers]):
        opening = _render(setup, number, prompt, add_generation_prompt=True) if prompt else ""
        return opening, *(_render(setup, number, prompt + answer) for answer in answers)
    eos = setup.tokenizer.eos_token or ""
    return prompt, *(prompt + (answer if answer.endswith(eos) else answer + eos) for answer in answers)


def _tokenise_answers(batch: Batch, rows: list[int]) -> dict[str, Tokens]:
    first = [batch.columns[batch.setup.answers[0]][row] for row in rows]
    chat = _is_chat(batch, rows[0], first)
    texts = zip(*(_pair(batch, row) for row in rows), strict=True)
    prompts, *wholes = [_encode(batch.setup.tokenizer, list(column), chat) for column in texts]
    # Tokens may merge across the boundary, so the answer starts where the two tokenisations part.
    start = np.array([min(_shared(prompt, ids) for ids in row) for prompt, *row in zip(prompts, *wholes, strict=True)])
    named = zip(batch.setup.answers, wholes, strict=True)
    return {name: Tokens(ids, start, _lengths(ids)) for name, ids in named}


def _lengths(ids: list[list[int]]) -> np.ndarray:
    return np.fromiter(map(len, ids), int, len(ids))


def _shared(prompt: list[int], whole: list[int]) -> int:
    if whole[: len(prompt)] == prompt:  # nearly always; compared in C
        return len(prompt)
    return next(
        (at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
    )


def _tokenise_plain(batch: Batch, rows: list[int]) -> Tokens:
    setup = batch.setup
    texts = [batch.columns[setup.plain][row] for row in rows]
    chat = _is_chat(batch, rows[0], texts)
    eos = setup.tokenizer.eos_token or ""
    if chat:
        texts = [_render(setup, batch.start + row, text) for row, text in zip(rows, texts, strict=True)]
    elif setup.trl:
        texts = [text if text.endswith(eos) else text + eos for text in texts]
    ids = _encode(setup.tokenizer, texts, chat)
    # Nothing predicts the first token.
    return Tokens(ids, np.ones(len(ids), dtype=int), _lengths(ids))


def _tokenise_prompts(batch: Batch, rows: list[int]) -> Tokens:
    """Prompts whose answers are still to be written, by one token at least."""
    setup = batch.setup
    texts = [batch.columns["prompt"][row] for row in rows]
    chat = _is_chat(batch, rows[0], texts)
    if chat:
        opened = zip(rows, texts, strict=True)
        texts = [_render(setup, batch.start + row, t, add_generation_prompt=True) if t else "" for row, t in opened]
    ids = _encode(setup.tokenizer, texts, chat)
    start = np.maximum(_lengths(ids), 1)  # where there is nothing, writing starts from one special token
    return Tokens(ids, start, start + 1)


def _from_labels(batch: Batch, rows: list[int]) -> Tokens:
    """A tokenised row carries loss from its first counted label on; labels lie one ahead of what predicts them."""
    ids = [as_list(batch.columns["input_ids"][row]) for row in rows]
    masks = batch.columns.get("completion_mask")
    if batch.labels is not None:
        counted = [[label != IGNORED for label in one] for one in batch.labels]
    else:
        counted = [as_list(masks[row]) for row in rows] if masks else [[True] * len(one) for one in ids]
    start = [next((at for at, flag in enumerate(one) if flag and at), len(one)) for one in counted]
    return Tokens(ids, np.array(start), _lengths(counted))


def as_list(value) -> list:
    """Ids or labels of a row: a list, a tensor or an array; nothing for None."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, list | tuple) else []
