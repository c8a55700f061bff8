"""Rows of a data set and their tokens, cut the way the trainers cut them: what `preflight` looks at."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from numbers import Integral, Number
from typing import Any, NamedTuple

import numpy as np

from nanlab.errors import InputError

ANSWERS = ("chosen", "rejected", "reference", "completion")
NUMBERS = ("reward", "rewards", "ref_chosen_logps", "ref_rejected_logps")
_TOKENISED = ("input_ids", "labels", "completion_mask", "assistant_masks")
_TEMPLATE = ("tools", "chat_template_kwargs")  # what a chat template is given besides the messages
_USED = ("prompt", *ANSWERS, "text", "messages", *_TOKENISED, *_TEMPLATE, *NUMBERS, "group", "label")
_BATCH = 1000  # rows tokenised at a time: enough to keep a fast tokenizer busy, a few MB of ids
IGNORED = -100  # the label that cross-entropy leaves out


def length_limit(max_length: int | None, args) -> int | None:
    """Tokens kept of a row: the argument, else `args.max_length`, else no limit (None).

    Raises `InputError` for what is no whole number from 1.
    """
    limit = max_length if max_length is not None else getattr(args, "max_length", None)
    if limit is None:
        return None
    if not isinstance(limit, Integral) or isinstance(limit, bool) or limit < 1:
        raise InputError(f"max_length is {limit!r}: give a whole number of tokens, at least 1")
    return min(int(limit), sys.maxsize)  # numpy knows no larger number, and no row is longer


class Rows:
    """Columns of a data set, a batch at a time; the same for a `datasets.Dataset` and for a list of dicts.

    `text` is the column that is read as "text"; `unused` are names that nothing reads.
    """

    def __init__(self, dataset, text: str = "text", unused: Container[str] = ()) -> None:
        _check_kind(dataset)
        self._table = hasattr(dataset, "select_columns")
        names = dataset.column_names if self._table else _keys(dataset)
        self._columns = {
            name: own for name in _USED if (own := text if name == "text" else name) in names and name not in unused
        }
        self.names = [*self._columns]
        if not {"prompt", *ANSWERS, "text", "messages", "input_ids"} & set(self.names):
            raise InputError(
                f"no column to look at: found {', '.join(map(str, names))}; wanted e.g. prompt, chosen, rejected, or "
                "prompt, completion, or text, messages, input_ids: rename yours"
            )
        used = [*dict.fromkeys(self._columns.values())]
        self._dataset = dataset.with_format(None).select_columns(used) if self._table else dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[tuple[int, dict[str, list]]]:
        for start in range(0, len(self), _BATCH):
            stop = min(start + _BATCH, len(self))
            if self._table:
                columns = self._dataset[start:stop]
                yield start, {name: columns[own] for name, own in self._columns.items()}
            else:
                rows = [self._dataset[row] for row in range(start, stop)]
                yield start, {name: [as_python(row.get(own)) for row in rows] for name, own in self._columns.items()}


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
    first: dict[bool, tuple[str, int]] = field(default_factory=dict)  # column and row of the first chat (True), text

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
        """The one column that is read where there are no answers; TRL prefers messages."""
        order = ("messages", "text", "prompt") if self.trl else ("text", "messages", "prompt")
        return next(name for name in order if name in self.columns)

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

    def _configures(self, name: str) -> bool:
        """Whether the arguments are TRL's configuration of that name, or made from it."""
        return any(base.__name__ == name for base in type(self.args).__mro__)

    @cached_property
    def reward_model(self) -> bool:
        """TRL's RewardTrainer: it cuts no row, it drops those that are too long."""
        return self._configures("RewardConfig")

    @cached_property
    def preference(self) -> bool:
        """TRL's DPO and KTO: beta multiplies all that the loss depends on."""
        return self._configures("DPOConfig") or self._configures("KTOConfig")

    @cached_property
    def kto(self) -> bool:
        """Labels say which answers are desirable."""
        meant = self._configures("KTOConfig") if self.trl else "completion" in self.answers
        return meant and "label" in self.columns

    @cached_property
    def completion_only(self) -> bool:
        """The loss is of the answer alone, as everywhere but in TRL's SFT where it is told or finds otherwise."""
        told = getattr(self.args, "completion_only_loss", True)
        return {"prompt", "completion"} <= {*self.columns} if told is None else bool(told)

    @cached_property
    def assistant_only(self) -> bool:
        return bool(getattr(self.args, "assistant_only_loss", False))

    @cached_property
    def masks(self) -> list[str]:
        """The columns that say which tokens of a tokenised row carry loss, where it has no labels."""
        heeded = {"completion_mask": self.completion_only, "assistant_masks": True}
        return [name for name, used in heeded.items() if used and name in self.columns]

    @cached_property
    def limit(self) -> int | None:
        """Where a row is cut; None where it is not: packing may only divide it, and TRL may be told to leave it."""
        divided = self.packed and getattr(self.args, "packing_strategy", "") != "bfd"
        left = (getattr(self.args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset", False)
        return None if divided or left or self.reward_model else self.max_length

    @cached_property
    def packed(self) -> bool:
        return bool(getattr(self.args, "packing", False))

    @cached_property
    def keep_end(self) -> bool:
        return not self.packed and getattr(self.args, "truncation_mode", "keep_start") == "keep_end"

    @cached_property
    def eos(self) -> str:
        return getattr(self.args, "eos_token", None) or self.tokenizer.eos_token or ""

    @cached_property
    def template(self) -> str | None:
        """What TRL takes in place of the tokenizer's chat template, which has to mark what the assistant says."""
        own = self.tokenizer.chat_template
        if not self.assistant_only or (isinstance(own, str) and re.search(r"\{%-?\s*generation\s*-?%\}", own)):
            return None
        from trl.chat_template_utils import get_training_chat_template

        try:
            return get_training_chat_template(self.tokenizer)
        except ValueError:  # none is known: then no token is marked
            return None

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
    """One column of a batch in tokens: `ids` of prompt and answer together, and where in them is what."""

    ids: list[list[int]]
    start: np.ndarray  # (rows,) int64: tokens before the answer
    first: np.ndarray  # (rows,) int64: tokens before the first that carries loss; nothing predicts the first of all
    last: np.ndarray  # (rows,) int64: tokens up to the last that carries loss
    total: np.ndarray  # (rows,) int64: tokens before truncation

    @property
    def counted(self) -> np.ndarray:
        """Tokens from the first to the last that carries loss, (rows,) int64; none at 0 or below."""
        return self.last - self.first


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
        self.scripts = {} if self.setup.tokenised else self._write(np.flatnonzero(self._sound()).tolist())

    def _sound(self) -> np.ndarray:
        return ~np.logical_or.reduce([rows for kind, rows in self.faults.items() if kind != "empty prompt"])

    def _write(self, rows: list[int]) -> dict[int, Script]:
        """Number of a row → what is tokenised of it. Rows that the chat template refuses are a fault."""
        _check_kinds(self, rows)
        scripts = {row: script for row in rows if (script := _script(self, row)) is not None}
        self.faults["refused"][[row for row in rows if row not in scripts]] = True
        return scripts

    @cached_property
    def ok(self) -> np.ndarray:
        return self._sound()

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
            return _tokenise_answers(self)
        return {self.setup.plain: _tokenise_plain(self)}

    def window(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Where what truncation leaves begins and ends, (rows,) int64 each."""
        limit = self.setup.limit
        if limit is None:
            return np.zeros_like(tokens.total), tokens.total
        kept = np.minimum(tokens.total, limit)
        return (tokens.total - kept, tokens.total) if self.setup.keep_end else (np.zeros_like(kept), kept)

    def kept(self, tokens: Tokens) -> np.ndarray:
        """Tokens that carry loss after truncation, (rows,) int64; nothing predicts the first that is left."""
        begin, end = self.window(tokens)
        return np.maximum(np.minimum(end, tokens.last) - np.maximum(begin + 1, tokens.first), 0)

    def none(self) -> np.ndarray:
        return np.zeros(len(self.ok), dtype=bool)

    def spread(self, seen: np.ndarray) -> np.ndarray:
        """From tokenised rows back to all rows."""
        every = self.none()
        every[self.ok] = seen
        return every


_FAULTS = ("missing", "empty", "not text", "empty prompt", "not ids", "refused")


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
    last = said[-1] if said else ""  # an empty system message, or one in the middle, leaves something to learn
    return "" if (last.strip() if isinstance(last, str) else last) else "empty"


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
    value = as_python(value)
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
    "assistant_masks": _labels_fault,
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


class Script(NamedTuple):
    """What is tokenised of a row: the prompt and the prompt with each answer, or its one text."""

    texts: tuple[str, ...]
    marks: Sequence[int] = ()  # one a token, 1 where the assistant speaks; only where the loss is of that alone


class _Refused(Exception):
    """The chat template does not take the messages."""


def _check_kinds(batch: Batch, rows: list[int]) -> None:
    """All chat messages or all text, from the first row of the data set on."""
    first = batch.setup.first
    for name in batch.setup.texts:
        column = batch.columns[name]
        for row in rows:
            if (chat := isinstance(column[row], list)) not in first:
                first[chat] = name, batch.start + row
    if len(first) > 1:
        chat, text = (f"{name} of row {row}" for name, row in (first[True], first[False]))
        raise InputError(f"chat messages ({chat}) and text ({text}) are mixed: use one of them everywhere")
    if True in first and not getattr(batch.setup.tokenizer, "chat_template", None):
        row = first[True][1]
        raise InputError(f"row {row} holds chat messages but the tokenizer has no chat_template: set one, or give text")


def _script(batch: Batch, row: int) -> Script | None:
    """None for messages that the chat template refuses."""
    setup = batch.setup
    try:
        if setup.answers:
            return _pair(batch, row)
        value = batch.columns[setup.plain][row]
        if isinstance(value, str):
            return Script((value if not setup.trl or setup.prompts_only else _ended(setup, value),))
        options = _template_options(batch, row)
        if setup.prompts_only:
            return Script((_render(setup, value, add_generation_prompt=True, **options) if value else "",))
        return Script((_render(setup, value, **options),), _marks(setup, value, options))
    except _Refused:
        return None


def _ended(setup: Setup, answer: str) -> str:
    return answer if answer.endswith(setup.eos) else answer + setup.eos


def _template_options(batch: Batch, row: int) -> dict[str, Any]:
    """What TRL gives the chat template besides the messages: much of a prompt may be its tools."""
    tools, own = (batch.columns[name][row] if name in batch.columns else None for name in _TEMPLATE)
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise _Refused from error
    known = {"chat_template": batch.setup.template, "tools": tools}
    options = {name: value for name, value in known.items() if value is not None}
    return {**options, **(getattr(batch.setup.args, "chat_template_kwargs", None) or {}), **(own or {})}


def _render(setup: Setup, messages: list, tokenize: bool = False, **options):
    try:
        return setup.tokenizer.apply_chat_template(messages, tokenize=tokenize, **options)
    except Exception as error:  # a template is a program: it may fail in every way
        raise _Refused from error


def _marks(setup: Setup, messages: list, options: dict[str, Any]) -> Sequence[int]:
    if not setup.assistant_only:
        return ()
    told = _render(setup, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options)
    return told["assistant_masks"]


def _pair(batch: Batch, row: int) -> Script:
    setup = batch.setup
    answers = [batch.columns[name][row] for name in setup.answers]
    if "prompt" in batch.columns:
        prompt = batch.columns["prompt"][row]
    else:  # the prompt is what the answers share
        shared = min([len(answer) - 1 for answer in answers] + [_shared(answers[0], answer) for answer in answers[1:]])
        shared = shared if len(answers) > 1 else 0
        batch.faults["empty prompt"][row] |= len(answers) > 1 and not shared and not setup.reward_model
        prompt, answers = answers[0][:shared], [answer[shared:] for answer in answers]
    if isinstance(prompt, str):
        return Script((prompt, *(prompt + _ended(setup, answer) for answer in answers)))
    options = _template_options(batch, row)
    opening = _render(setup, prompt, add_generation_prompt=True, **options) if prompt else ""
    wholes = [_render(setup, prompt + answer, **options) for answer in answers]
    return Script((opening, *wholes), _marks(setup, prompt + answers[0], options))


def _tokenise(batch: Batch) -> list[list[list[int]]]:
    """Token ids of each of the texts of a script, row by row."""
    texts = zip(*(script.texts for script in batch.scripts.values()), strict=True)
    return [_encode(batch.setup.tokenizer, list(column), True in batch.setup.first) for column in texts]


def _tokenise_answers(batch: Batch) -> dict[str, Tokens]:
    prompts, *wholes = _tokenise(batch)
    # Tokens may merge across the boundary, so the answer starts where the two tokenisations part.
    start = np.array([min(_shared(prompt, ids) for ids in row) for prompt, *row in zip(prompts, *wholes, strict=True)])
    named = zip(batch.setup.answers, wholes, strict=True)
    return {name: _located(batch, ids, start) for name, ids in named}


def _tokenise_plain(batch: Batch) -> Tokens:
    (ids,) = _tokenise(batch)
    if not batch.setup.prompts_only:
        return _located(batch, ids, np.zeros(len(ids), dtype=int))
    # An answer is still to be written, by one token at least; where there is nothing, from one special token on.
    start = np.maximum(_lengths(ids), 1)
    return Tokens(ids, start, start, start + 1, start + 1)


def _located(batch: Batch, ids: list[list[int]], start: np.ndarray) -> Tokens:
    """Loss is of the answer, of everything, or of what the assistant says."""
    total = _lengths(ids)
    first, last = np.maximum(start if batch.setup.completion_only else 0, 1), total
    if batch.setup.assistant_only:
        bounds = [_bounds(script.marks) for script in batch.scripts.values()]
        first, last = np.maximum(first, [one[0] for one in bounds]), np.minimum(last, [one[1] for one in bounds])
    return Tokens(ids, start, first, last, total)


def _bounds(flags: Sequence) -> tuple[int, int]:
    """Tokens before the first flag that counts, and up to the last; the first of all does not count."""
    counted = [at for at, flag in enumerate(flags) if flag and at]
    return (counted[0], counted[-1] + 1) if counted else (len(flags), 0)


def _lengths(ids: list[list[int]]) -> np.ndarray:
    return np.fromiter(map(len, ids), int, len(ids))


def _shared(prompt: list[int], whole: list[int]) -> int:
    if whole[: len(prompt)] == prompt:  # nearly always; compared in C
        return len(prompt)
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))])


def _from_labels(batch: Batch, rows: list[int]) -> Tokens:
    """A tokenised row carries loss from its first counted label on; labels lie one ahead of what predicts them."""
    ids = [as_list(batch.columns["input_ids"][row]) for row in rows]
    masks = [batch.columns[name] for name in batch.setup.masks]
    if batch.labels is not None:
        counted = [[label != IGNORED for label in one] for one in batch.labels]
    elif masks:  # a token counts where all of them say so
        counted = [[all(flags) for flags in zip(*(as_list(mask[row]) for mask in masks), strict=False)] for row in rows]
    else:
        counted = [[True] * len(one) for one in ids]
    bounds = np.array([_bounds(one) for one in counted]).reshape(-1, 2)
    return Tokens(ids, bounds[:, 0], bounds[:, 0], bounds[:, 1], _lengths(counted))


def as_python(value):
    """What a tensor, an array or a number of NumPy holds, in Python's own types; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_list(value) -> list:
    """Ids or labels of a row: a list, a tensor or an array; nothing for None."""
    value = as_python(value)
    return list(value) if isinstance(value, list | tuple) else []
