"""Rows of a data set and their tokens, cut the way the trainers cut them: what `preflight` looks at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Number
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
    """Tokens kept of a row: the argument, else `args.max_length`, else no limit (None)."""
    limit = max_length if max_length is not None else getattr(args, "max_length", None)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise InputError(f"max_length is {limit!r}: give a whole number of tokens, at least 1")
    return limit


class Rows:
    """Columns of a data set, a batch at a time; the same for a `datasets.Dataset` and for a list of dicts."""

    def __init__(self, dataset) -> None:
        if isinstance(dataset, Mapping):
            raise InputError(f"this data set has several splits ({', '.join(map(str, dataset))}): give one of them")
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise InputError(
                f"a {type(dataset).__name__} cannot be read by row: give a datasets.Dataset or a list of dicts"
            )
        if len(dataset) == 0:
            raise InputError("the data set has no rows")
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
        return [name for name in ("prompt", *self.answers) if name in self.columns] or [self.plain]

    @cached_property
    def plain(self) -> str:
        return "text" if "text" in self.columns else "messages"

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
    start: np.ndarray  # (rows,) int64: tokens before the first that carries loss
    total: np.ndarray  # (rows,) int64: tokens before truncation


@dataclass
class Batch:
    """Some rows, tokenised as the trainers do it. Only rows that are `ok`, with text in every column, are tokenised."""

    start: int  # number of the first row
    columns: dict[str, list]
    setup: Setup
    faults: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        kinds = [[_fault(value) for value in self.columns[name]] for name in self.setup.texts]
        size = len(next(iter(self.columns.values())))
        table = np.array(kinds, dtype=object).reshape(len(kinds), size)
        self.faults = {kind: (table == kind).any(axis=0) for kind in ("missing", "empty", "not text")}

    @cached_property
    def ok(self) -> np.ndarray:
        return ~np.logical_or.reduce(list(self.faults.values()))

    @cached_property
    def tokens(self) -> dict[str, Tokens]:
        if self.setup.tokenised:
            return {"labels": _from_labels(self.columns)}
        rows = np.flatnonzero(self.ok).tolist()
        if not rows:
            return {}
        if self.setup.answers:
            return _tokenise_answers(self, rows)
        return {self.setup.plain: _tokenise_plain(self, rows)}

    def kept(self, tokens: Tokens) -> np.ndarray:
        """Tokens of the answer that carry loss after truncation, (rows,) int64."""
        limit = self.setup.max_length
        if limit is None:
            return tokens.total - tokens.start
        if self.setup.keep_end:
            return np.minimum(tokens.total - tokens.start, limit)
        return np.maximum(np.minimum(tokens.total, limit) - tokens.start, 0)

    def none(self) -> np.ndarray:
        return np.zeros(len(self.ok), dtype=bool)

    def spread(self, seen: np.ndarray) -> np.ndarray:
        """From tokenised rows back to all rows."""
        every = self.none()
        every[self.ok] = seen
        return every


def _fault(value) -> str:
    """Why a value is no text: "missing", "empty", "not text"; "" where it is text or chat messages."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "missing"
    if isinstance(value, str):
        return "" if value.strip() else "empty"
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) and "role" in turn for turn in value):
        return "not text"
    said = [turn.get("content") or turn.get("tool_calls") for turn in value]
    return "" if said and all(said) else "empty"


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
    from jinja2 import TemplateError

    if not getattr(setup.tokenizer, "chat_template", None):
        raise InputError(f"row {row} holds chat messages but the tokenizer has no chat_template: set one, or give text")
    try:
        return setup.tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except TemplateError as error:
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
    return {name: Tokens(ids, start, np.fromiter(map(len, ids), int, len(ids))) for name, ids in named}


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
    return Tokens(ids, np.ones(len(ids), dtype=int), np.fromiter(map(len, ids), int, len(ids)))


def _from_labels(columns: dict[str, list]) -> Tokens:
    """A tokenised row carries loss from its first counted label on; labels lie one ahead of what predicts them."""
    ids = [as_list(one) for one in columns["input_ids"]]
    masks = columns.get("completion_mask")
    if "labels" in columns and not isinstance(columns["labels"][0], Number):  # one number a row is a class, no token
        counted = [[label != IGNORED for label in as_list(one)] for one in columns["labels"]]
    else:
        counted = [as_list(one) for one in masks] if masks else [[True] * len(one) for one in ids]
    start = [next((at for at, flag in enumerate(one) if flag and at), len(one)) for one in counted]
    return Tokens(ids, np.array(start), np.array([len(one) for one in counted]))


def as_list(value) -> list:
    """Ids or labels of a row: a list, a tensor or an array; nothing for None."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, list | tuple) else []
