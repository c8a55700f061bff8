"""Faults that can be seen before training: in the rows, the tokenizer, the arguments and the weights.

Every fault is one line of a table: its code, the function that sees it, and what to say about it. `ROW_CHECKS` look at
a batch of rows, `WHOLE_CHECKS` at columns that only make sense as a whole, `SETUP_CHECKS` at everything else.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from nanlab.errors import InputError
from nanlab.findings import Finding, Findings, amount
from nanlab.rows import IGNORED, NUMBERS, Batch, Rows, Setup, Tokens, as_list, as_python, length_limit


def preflight(dataset, tokenizer, *, max_length: int | None = None, model=None, args=None) -> Preflight:
    """Look for what would make this training NaN, or teach nothing, before it starts.

    Args:
        dataset: a `datasets.Dataset`, or a list of rows (dicts). Columns: `prompt` `chosen` `rejected` (`reference`),
            or `prompt` `completion` (`reward` `group` `label`), or `text`, or `messages`, or `prompt` alone (for
            answers that are written during training), or `input_ids` (`labels`, or `completion_mask` and
            `assistant_masks`). Text may be strings or chat messages (`tools`, `chat_template_kwargs`).
        tokenizer: the tokenizer that the run uses, loaded; a fast one, for speed.
        max_length: tokens kept of prompt and answer together; by default `args.max_length`.
        model: optional; its weights and buffers are read, never changed.
        args: optional; the `TrainingArguments`, or a TRL configuration. Its class says which trainer it will be, and so
            what is cut, dropped and counted; `dataset_text_field` names another column than `text`.

    Returns:
        `Preflight`: a sequence of findings whose `clean(dataset)` drops the rows that cannot be trained on.

    Raises:
        InputError: no rows, no known column, chat rows without a chat template or among text, a `max_length` below 1,
            or another thing in place of the tokenizer, the model or the arguments, such as a name or a dict.
    """
    _check_loaded("tokenizer", tokenizer, "pad_token_id")
    if model is not None:
        _check_loaded("model", model, "named_parameters")
    if args is not None and (isinstance(args, type) or not hasattr(args, "learning_rate")):
        raise InputError(f"args: got a {_kind(args)}; give the TrainingArguments, or a TRL configuration")
    rows = Rows(dataset, text=getattr(args, "dataset_text_field", "text"), unused=_unread(args))
    setup = Setup(tokenizer, args, model, length_limit(max_length, args), rows.names)
    seen, gathered = _look_at_rows(rows, setup)
    findings, dead = [], np.zeros(len(rows), dtype=bool)

    def note(check: RowCheck, places: Sequence[int]) -> None:
        if len(places):
            findings.append(check.finding(places))
            dead[places] |= check.drop

    for check, places in seen.items():
        note(check, places)
    for check in WHOLE_CHECKS:
        note(check, array("q", check.see(Whole(gathered, dead))))
    findings += [check.finding(things) for check in SETUP_CHECKS if (things := check.see(setup))]
    return Preflight(findings, dead)


def _check_loaded(what: str, given, attribute: str) -> None:
    if isinstance(given, type) or not hasattr(given, attribute):
        raise InputError(f"{what}: got a {_kind(given)}; give a loaded {what}, as from_pretrained(…) returns it")


def _unread(args) -> tuple[str, ...]:
    """Columns that no trainer will read: TRL's own trainers of these kinds know no rewards of rows."""
    kind = type(args)
    without = kind.__name__ in ("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig")
    return ("reward", "rewards", "group") if without and kind.__module__.startswith("trl.") else ()


def _look_at_rows(rows: Rows, setup: Setup) -> tuple[dict[RowCheck, array], dict[str, list]]:
    """One pass: the guilty rows of each check, and the columns that are judged as a whole."""
    from tqdm import tqdm

    seen = {check: array("q") for check in ROW_CHECKS}
    wanted = ("reward", "group", *(["label"] if setup.kto else []))
    gathered: dict[str, list] = {name: [] for name in wanted if name in setup.columns}
    with tqdm(total=len(rows), desc="preflight", unit=" rows", disable=None) as bar:  # None: off unless a terminal
        for start, columns in rows:
            batch = Batch(start, columns, setup)
            for check in ROW_CHECKS:
                seen[check].extend((np.flatnonzero(check.see(batch)) + start).tolist())
            for name, column in gathered.items():
                column += columns[name]
            bar.update(len(batch.ok))
    return seen, gathered


def _kind(given) -> str:
    return given.__name__ + " class" if isinstance(given, type) else type(given).__name__


class Preflight(Findings):
    """What `preflight` found."""

    def __init__(self, findings: Sequence[Finding], dead: np.ndarray) -> None:
        super().__init__(findings, subject=f"{amount(len(dead), 'row')} and the set-up", unit="row")
        self._dead = dead

    def clean(self, dataset):
        """The same kind of data set without the rows that cannot be trained on; prints how many went, and why.

        Rows that are only cut short stay. A row with several faults is counted under the first.

        Raises:
            InputError: this is not the data set that was looked at (another number of rows).
        """
        if len(dataset) != len(self._dead):
            raise InputError(
                f"clean() got {amount(len(dataset), 'row')}, preflight saw {len(self._dead)}: give it the same data set"
            )
        keep = np.flatnonzero(~self._dead)
        left, why = self._dead.copy(), []
        for finding in self:
            first = [row for row in finding.rows if left[row]] if finding.code in _DROPPED else []
            left[first] = False
            if first:
                why.append(f"{len(first):,} {finding.code}")
        dropped = f"; dropped {', '.join(why)}" if why else ""
        print(f"kept {len(keep):,} of {amount(len(dataset), 'row')}{dropped}")
        return dataset.select(keep) if hasattr(dataset, "select") else [dataset[int(row)] for row in keep]


# ------------------------------------------------------------------------------------------------------- faults of rows


def _has(kind: str, batch: Batch) -> np.ndarray:
    return batch.faults[kind]


def _any_column(batch: Batch, see: Callable[[Tokens], np.ndarray]) -> np.ndarray:
    """Rows where some column shows it."""
    return batch.spread(np.logical_or.reduce([np.zeros(batch.ok.sum(), bool), *map(see, batch.tokens.values())]))


def _no_label(batch: Batch) -> np.ndarray:
    return _any_column(batch, lambda tokens: tokens.counted <= 0)


def _truncated_away(batch: Batch) -> np.ndarray:
    return _any_column(batch, lambda tokens: batch.kept(tokens) == 0) & ~_no_label(batch)


def _truncated_partly(batch: Batch) -> np.ndarray:
    def cut(tokens: Tokens) -> np.ndarray:
        begin, end = batch.window(tokens)
        return (batch.kept(tokens) > 0) & ((begin > tokens.start) | (end < tokens.total))

    # A tokenised or plain row is expected to be cut to length; an answer that loses its end is not.
    return _any_column(batch, cut) if batch.setup.answers else batch.none()


def _too_long(batch: Batch) -> np.ndarray:
    limit = batch.setup.max_length
    if limit is None or not batch.setup.reward_model:
        return batch.none()
    return _any_column(batch, lambda tokens: tokens.total > limit)


def _identical_pair(batch: Batch) -> np.ndarray:
    if not {"chosen", "rejected"} <= batch.tokens.keys():
        return batch.none()
    chosen, rejected = batch.tokens["chosen"], batch.tokens["rejected"]
    limit = batch.setup.limit
    seen = slice(None) if limit is None else slice(-limit, None) if batch.setup.keep_end else slice(limit)
    same = [a[seen] == b[seen] for a, b in zip(chosen.ids, rejected.ids, strict=True)]
    return batch.spread(np.array(same)) & ~_truncated_away(batch)


def _answer_only_of(special: set[int | None], batch: Batch) -> np.ndarray:
    """A special token that the tokenizer lacks is None, which no id is."""

    def only(tokens: Tokens) -> np.ndarray:
        bodies = (ids[start:] for ids, start in zip(tokens.ids, tokens.start, strict=True))
        return np.fromiter((bool(body) and special.issuperset(body) for body in bodies), bool, len(tokens.ids))

    return _any_column(batch, only) if batch.setup.answers else batch.none()


def _all_unk(batch: Batch) -> np.ndarray:
    tokenizer = batch.setup.tokenizer
    lost = {tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id}
    return _answer_only_of(lost, batch) & ~_only_special(batch)


def _only_special(batch: Batch) -> np.ndarray:
    """Nothing but bos and eos. Where one of them is also unk or pad, the answer is lost in the same way."""
    tokenizer = batch.setup.tokenizer
    return _answer_only_of({tokenizer.bos_token_id, tokenizer.eos_token_id}, batch)


def _two_bos(batch: Batch) -> np.ndarray:
    bos = batch.setup.tokenizer.bos_token_id
    return _any_column(batch, lambda tokens: np.array([ids[:2] == [bos, bos] for ids in tokens.ids]))


def _outside_vocabulary(batch: Batch) -> np.ndarray:
    if not batch.setup.ids_may_overflow:
        return batch.none()
    size = batch.setup.embedding_rows

    def outside(rows: list[list[int]]) -> np.ndarray:
        return np.array([max(ids, default=0) >= size or min(ids, default=0) < 0 for ids in rows])

    labels = [[label for label in one if label != IGNORED] for one in batch.labels or []]
    return _any_column(batch, lambda tokens: outside(tokens.ids) | (outside(labels) if labels else False))


def _label_count(batch: Batch) -> np.ndarray:
    if batch.labels is None or batch.setup.encoder_decoder:
        return batch.none()
    counts = np.fromiter(map(len, batch.labels), int)
    return _any_column(batch, lambda tokens: (counts > 0) & (counts != [len(ids) for ids in tokens.ids]))


def _eos_label_lost(batch: Batch) -> np.ndarray:
    """The eos right after a counted label has none itself; a second eos after it is padding."""
    eos = batch.setup.tokenizer.eos_token_id
    if not {"input_ids", "labels"} <= batch.columns.keys():
        return batch.none()

    def lost(ids: list[int], labels: list[int]) -> bool:
        steps = zip(ids, ids[1:], labels, labels[1:], strict=False)
        return any(
            token == eos != before and label == IGNORED != label_before for before, token, label_before, label in steps
        )

    pairs = zip(batch.columns["input_ids"], batch.columns["labels"], strict=True)
    return np.array([lost(as_list(ids), as_list(labels)) for ids, labels in pairs])


def _bad_label(batch: Batch) -> np.ndarray:
    """Of KTO: neither true nor false, as 1 and 0 are too; 2 and NaN count as true and are hardly meant so."""
    if not batch.setup.kto:
        return batch.none()
    labels = map(as_python, batch.columns["label"])
    return np.array([label not in (0, 1) for label in labels])


def _number(value) -> float:
    """A reward as a float; NaN for whatever is none. A list (one reward a token) is NaN if any entry is."""
    value = as_python(value)
    if isinstance(value, list | tuple):
        return sum(map(_number, value)) if value else math.nan
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of more than 308 digits
        return math.nan
    return number if math.isfinite(number) else math.nan


def _bad_reward(batch: Batch) -> np.ndarray:
    seen = batch.none()
    for name in NUMBERS:
        seen |= np.isnan([_number(value) for value in batch.columns.get(name, ())] or [0.0])
    return seen


class RowCheck(NamedTuple):
    """`see(batch)` gives one bool a row. `drop`: such a row cannot be trained on."""

    code: str
    see: Callable[..., np.ndarray]
    message: str
    fix: str
    lesson: str
    drop: bool = True
    confidence: str = "certain"

    def finding(self, rows: Sequence[int]) -> Finding:
        message = self.message.format(rows=amount(len(rows), "row"))
        return Finding(self.code, len(rows), message, self.fix, self.lesson, rows, self.confidence)


EMPTY, UNK, STD = "03_empty_batch", "05_unk_pad", "02_zero_std"
HALF, DIRTY, GUARD = "06_fp16_overflow", "07_learning_rate_and_dirty_data", "09_guard"
_DROP = "Drop them: rows = findings.clean(rows)."

ROW_CHECKS = (
    RowCheck(
        "missing_text",
        partial(_has, "missing"),
        "{rows}: None in place of a prompt or an answer.",
        _DROP,
        DIRTY,
    ),
    RowCheck(
        "not_text",
        partial(_has, "not text"),
        "{rows}: a prompt or an answer is neither text nor chat messages, or holds half a surrogate pair, which no "
        "tokenizer takes.",
        "Chat messages hold role and content; rename what is called otherwise (ShareGPT: from and value). Or drop the "
        "rows: findings.clean(rows).",
        DIRTY,
    ),
    RowCheck(
        "empty_text",
        partial(_has, "empty"),
        "{rows}: an answer (or the whole text) is empty.",
        _DROP,
        EMPTY,
    ),
    RowCheck(
        "empty_prompt",
        partial(_has, "empty prompt"),
        "{rows}: the prompt is empty, or the answers share none. The trainers keep such rows: an answer to nothing.",
        "Look at where the prompt was lost (a column that is not called prompt?); the rows can be trained on.",
        EMPTY,
        drop=False,
        confidence="likely",
    ),
    RowCheck(
        "not_ids",
        partial(_has, "not ids"),
        "{rows}: input_ids are no list of whole numbers, or labels no list of numbers.",
        _DROP,
        DIRTY,
    ),
    RowCheck(
        "refused_by_template",
        partial(_has, "refused"),
        "{rows}: the chat template, or the JSON of the tools, gives an error.",
        "Call tokenizer.apply_chat_template on the messages of such a row to see why, or drop the rows: "
        "findings.clean(rows).",
        DIRTY,
    ),
    RowCheck(
        "label_count",
        _label_count,
        "{rows}: more or fewer labels than input_ids. Only an encoder-decoder takes such a row, any other model stops.",
        "Make labels of the same length as input_ids, −100 where a token carries no loss.",
        DIRTY,
        drop=False,
        confidence="likely",
    ),
    RowCheck(
        "truncated_away",
        _truncated_away,
        "{rows}: the prompt alone fills max_length, no token of an answer is left. A mean over nothing is NaN; a "
        "sum over nothing is 0 and teaches nothing.",
        "Raise max_length or shorten the prompts, or drop the rows: findings.clean(rows).",
        EMPTY,
    ),
    RowCheck(
        "no_label",
        _no_label,
        "{rows}: no token carries loss (all labels masked, or one token only), so the mean loss is NaN.",
        "Look at what masks the labels (a marker not found, a wrong template), or drop the rows: findings.clean(rows).",
        EMPTY,
    ),
    RowCheck(
        "truncated_partly",
        _truncated_partly,
        "{rows}: max_length cuts off the end of an answer, and the eos with it (its start, with keep_end).",
        "Raise max_length if the ends matter; the rows can be trained on.",
        EMPTY,
        drop=False,
    ),
    RowCheck(
        "too_long",
        _too_long,
        "{rows}: chosen or rejected is longer than max_length. RewardTrainer cuts nothing, it drops the whole row.",
        "Raise max_length, or drop the rows: findings.clean(rows).",
        EMPTY,
    ),
    RowCheck(
        "identical_pair",
        _identical_pair,
        "{rows}: chosen and rejected are the same, or the same after truncation. The preference has no gradient.",
        _DROP,
        DIRTY,
    ),
    RowCheck(
        "all_unk",
        _all_unk,
        "{rows}: an answer is made of unk or pad ids only. A collator that masks by id leaves at most the eos to "
        "learn from.",
        "Use a tokenizer that knows the script, or drop the rows: findings.clean(rows).",
        UNK,
    ),
    RowCheck(
        "only_special_tokens",
        _only_special,
        "{rows}: an answer holds nothing but bos and eos tokens.",
        _DROP,
        UNK,
    ),
    RowCheck(
        "two_bos",
        _two_bos,
        "{rows}: two bos tokens at the start. One is written in the text, as a chat template does, and the tokenizer "
        "adds another.",
        "Take the written one out, or give chat messages instead of rendered text; the rows can be trained on.",
        UNK,
        drop=False,
        confidence="likely",
    ),
    RowCheck(
        "id_outside_vocabulary",
        _outside_vocabulary,
        "{rows}: token ids or labels without an embedding row. An index error on CPU, a device assert or garbage on a "
        "GPU.",
        "Call model.resize_token_embeddings(len(tokenizer)), or use the model's own tokenizer.",
        UNK,
    ),
    RowCheck(
        "eos_label_lost",
        _eos_label_lost,
        "{rows}: the answer is counted but its eos is masked, so the model never learns to stop.",
        "Mask padding by position, not by id; with pad = eos, add a pad token of its own.",
        UNK,
        drop=False,
    ),
    RowCheck(
        "bad_label",
        _bad_label,
        "{rows}: a KTO label that is neither true nor false. None and text stop the run, any other number counts as "
        "true.",
        "Give True or False, or drop the rows: findings.clean(rows).",
        DIRTY,
    ),
    RowCheck(
        "bad_reward",
        _bad_reward,
        "{rows}: a reward (or a reference log-prob) is None, NaN, inf or no number.",
        _DROP,
        STD,
    ),
)


# --------------------------------------------------------------------------------------------------- rows as a whole


class Whole(NamedTuple):
    """What is gathered from all rows; `dead` marks those that other faults have ruled out, one bool a row."""

    columns: dict[str, list]
    dead: np.ndarray

    def groups(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows and rewards of each group, living rows only."""
        members: dict[Any, list[int]] = {}
        if {"group", "reward"} <= self.columns.keys():
            for row in np.flatnonzero(~self.dead).tolist():
                group = self.columns["group"][row]
                if not isinstance(group, Hashable):
                    raise InputError(f"row {row}: the group is a {type(group).__name__}; give a number or a name")
                members.setdefault(group, []).append(row)
        for rows in members.values():
            yield np.array(rows), np.array([_number(self.columns["reward"][row]) for row in rows])


def _group_of_one(whole: Whole) -> list[int]:
    return [int(rows[0]) for rows, _ in whole.groups() if len(rows) == 1]


def _constant_group(whole: Whole) -> list[int]:
    """Equal up to float32 rounding: 7 × 0.1 has a standard deviation that is noise, not 0."""
    equal = (rows for rows, rewards in whole.groups() if np.ptp(rewards) <= 1e-6 * np.abs(rewards).max())
    return sorted(row for rows in equal for row in rows.tolist())


def _one_class(whole: Whole) -> list[int]:
    """KTO's desirable and undesirable answers, of the living rows."""
    labels = whole.columns.get("label", ())
    rows = np.flatnonzero(~whole.dead).tolist() if labels else []
    return rows if len(rows) > 1 and len({bool(labels[row]) for row in rows}) == 1 else []


WHOLE_CHECKS = (
    RowCheck(
        "group_of_one",
        _group_of_one,
        "{rows}: alone in a group. The standard deviation of one reward is NaN, or 0.",
        "Give every prompt at least two answers, or drop the rows: findings.clean(rows).",
        STD,
    ),
    RowCheck(
        "constant_group",
        _constant_group,
        "{rows}: all rewards of the group are equal. Its advantages are 0/0, or rounding noise blown up to ±1.",
        "Use nanlab.numerics.group_advantages, which gives such a group 0, or drop the rows: findings.clean(rows).",
        STD,
    ),
    RowCheck(
        "one_class_labels",
        _one_class,
        "{rows}, all that can be trained on: the same KTO label. The mean over the other class is a mean of nothing.",
        "Mix desirable and undesirable answers, and shuffle.",
        EMPTY,
        drop=False,
    ),
)


_DROPPED = {check.code for check in (*ROW_CHECKS, *WHOLE_CHECKS) if check.drop}


# ------------------------------------------------------------------------------------------------ faults of the set-up


def _no_pad(setup: Setup) -> list[str]:
    return ["pad_token"] if setup.tokenizer.pad_token_id is None and not setup.trl else []


def _no_eos(setup: Setup) -> list[str]:
    """TRL appends eos to every text; a chat template writes its own."""
    return ["eos_token"] if setup.trl and not setup.eos and False in setup.first and not setup.prompts_only else []


def _eos_lost(setup: Setup) -> list[str]:
    """pad = eos harms only where labels are masked by id: DataCollatorForLanguageModeling, not TRL's collators."""
    tokenizer = setup.tokenizer
    same = tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id
    labelled = setup.answers or setup.prompts_only or {"labels", "completion_mask"} & set(setup.columns)
    by_id = not setup.trl and not labelled
    return [str(tokenizer.eos_token)] if same and by_id else []


def _special_outside(setup: Setup) -> list[str]:
    if setup.embedding_rows is None:
        return []
    ids = {name: getattr(setup.tokenizer, f"{name}_token_id") for name in ("pad", "unk", "bos", "eos")}
    return [
        f"{name} = {number}" for name, number in ids.items() if number is not None and number >= setup.embedding_rows
    ]


def _filter_on(setup: Setup) -> list[str]:
    return ["logging_nan_inf_filter"] if getattr(setup.args, "logging_nan_inf_filter", False) else []


def _optimizer(setup: Setup) -> str:
    optim = getattr(setup.args, "optim", "")
    return str(getattr(optim, "value", optim))


def _setting(setup: Setup, name: str, default: float) -> float:
    """A numeric argument; the default where it is absent or no number, which a check of its own tells."""
    value = getattr(setup.args, name, default)
    return value if isinstance(value, Real) else default


def _bad_rate(setup: Setup) -> list[str]:
    rate = getattr(setup.args, "learning_rate", None)
    fine = rate is None or (isinstance(rate, Real) and math.isfinite(rate) and rate >= 0)
    return [] if fine else [repr(rate) if isinstance(rate, str) else str(rate)]


def _huge_rate(setup: Setup) -> list[str]:
    rate = _setting(setup, "learning_rate", 0.0)
    limit = 10.0 if "sgd" in _optimizer(setup) else 0.01  # Adam moves every weight by about the rate itself
    return [f"{rate:g}"] if math.isfinite(rate) and rate >= limit else []


# Here inf means "no limit".
_LIMITS = {
    "max_grad_norm", "eval_delay", "epsilon", "epsilon_high", "delta", "vllm_importance_sampling_clip_max",
    "vllm_server_timeout", "entropy_coef_max",
}  # fmt: skip


def _bad_arguments(setup: Setup) -> list[str]:
    """NaN, inf where it is no limit, and text where the default is a number. The learning rate has its own check."""
    known = fields(setup.args) if is_dataclass(setup.args) else ()
    numeric = {one.name for one in known if type(one.default) in (int, float)}

    def bad(name: str, value) -> bool:
        if isinstance(value, str):
            return name in numeric
        return isinstance(value, Real) and (math.isnan(value) or (math.isinf(value) and name not in _LIMITS))

    given = vars(setup.args).items() if setup.args is not None else ()
    one_by_one = ((name, one) for name, value in given for one in (value if isinstance(value, list) else [value]))
    return [f"{name} = {one!r}" for name, one in one_by_one if name != "learning_rate" and bad(name, one)]


# What a loss divides by, and the value that makes it 0.
_DIVISORS = {
    "ipo": ("beta", 0.0),
    "sppo_hard": ("beta", 0.0),
    "simpo": ("beta", 0.0),
    "tpo-l": ("beta", 0.0),
    "robust": ("label_smoothing", 0.5),
    "discopop": ("discopop_tau", 0.0),
}


def _loss_types(setup: Setup) -> list[str]:
    kinds = getattr(setup.args, "loss_type", None) or []
    return [kinds] if isinstance(kinds, str) else kinds


def _zero_divisors(setup: Setup) -> list[str]:
    seen = []
    for kind in _loss_types(setup):
        name, zero = _DIVISORS.get(kind, ("", 0.0))
        if getattr(setup.args, name, None) == zero:
            seen.append(f"{kind} with {name} = {zero:g}")
    return seen


def _learns_nothing(setup: Setup) -> list[str]:
    """Settings by which the gradient, or the step, is exactly 0. Other trainers' beta weighs a term beside the loss."""
    by_beta = setup.preference and not {"sft", "ipo", "sppo_hard"} & {*_loss_types(setup)}
    return [f"{n} = 0" for n in ("learning_rate", *["beta"] * by_beta) if _setting(setup, n, 1.0) == 0]


def _fp16_trained(setup: Setup) -> list[str]:
    import torch

    named = setup.model.named_parameters() if setup.model is not None else ()
    return [name for name, weight in named if weight.requires_grad and weight.dtype == torch.float16]


def _scaler_refuses(setup: Setup) -> list[str]:
    return _fp16_trained(setup) if getattr(setup.args, "fp16", False) else []


def _eps_is_zero(eps: float, dtype) -> bool:
    import torch

    return torch.tensor(eps, dtype=torch.float64).to(dtype).item() == 0


def _fp16_adam(setup: Setup) -> list[str]:
    """The unfused Adam computes in the dtype of the weights. Without `args` the optimizer is not known."""
    import torch

    unfused = setup.args is not None and _optimizer(setup) in ("adamw_torch", "adamw_hf")
    eps = _setting(setup, "adam_epsilon", 1e-8)
    return _fp16_trained(setup) if unfused and not _scaler_refuses(setup) and _eps_is_zero(eps, torch.float16) else []


def _adam_eps(setup: Setup) -> list[str]:
    import torch

    eps = _setting(setup, "adam_epsilon", 1e-8)
    zero = "adam" in _optimizer(setup) and not _fp16_adam(setup) and _eps_is_zero(eps, torch.float32)
    return [f"{eps:g}"] if zero else []


def _fp16_adapters(setup: Setup) -> list[str]:
    return [name for name in _fp16_trained(setup) if "lora_" in name or ".adapter" in name]


def _fp16_weights(setup: Setup) -> list[str]:
    told = _scaler_refuses(setup) or _fp16_adam(setup) or _fp16_adapters(setup)
    return [] if told else _fp16_trained(setup)


# Trained in bfloat16, with activations that leave the range of float16 (65504).
_WIDE_FAMILIES = {"gemma", "gemma2", "gemma3", "gemma3_text", "t5", "mt5", "umt5"}


def _wide_family(setup: Setup) -> list[str]:
    import torch

    family = getattr(getattr(setup.model, "config", None), "model_type", "")
    half = getattr(setup.args, "fp16", False) or any(t.dtype == torch.float16 for _, t in _tensors(setup))
    return [family] if family in _WIDE_FAMILIES and half else []


def _tensors(setup: Setup, buffers: bool = False) -> Iterator[tuple[str, Any]]:
    """Named floating-point parameters (or buffers), also those on the meta device."""
    if setup.model is None:
        return
    named = setup.model.named_buffers() if buffers else setup.model.named_parameters()
    yield from ((name, t.detach()) for name, t in named if t.is_floating_point() and t.numel())


def _filled(setup: Setup, buffers: bool = False) -> Iterator[tuple[str, Any]]:
    """Those of them that hold data."""
    yield from ((name, tensor) for name, tensor in _tensors(setup, buffers) if not tensor.is_meta)


def _range(tensor) -> tuple[float, float]:
    """Smallest and largest entry in one pass and without a copy; NaN, if any entry is, in both."""
    lowest, highest = (tensor.float() if tensor.element_size() == 1 else tensor).aminmax()
    return lowest.item(), highest.item()


def _on_meta(setup: Setup) -> list[str]:
    return [name for kind in (False, True) for name, tensor in _tensors(setup, kind) if tensor.is_meta]


def _bad_weights(setup: Setup) -> list[str]:
    return [name for name, tensor in _filled(setup) if not all(map(math.isfinite, _range(tensor)))]


def _bad_buffers(setup: Setup) -> list[str]:
    """NaN or +inf; a −inf is how attention masks are written. Known buffers also have a range."""
    seen = []
    for name, tensor in _filled(setup, buffers=True):
        low, high = _range(tensor)
        variance = name.endswith("running_var") and low < 0
        frequency = "inv_freq" in name and (low < 0 or high > 1 or high == 0)
        if math.isnan(low) or high == math.inf or variance or frequency:
            seen.append(name)
    return seen


def _uninitialised(setup: Setup) -> list[str]:
    """What fresh memory looks like: absurdly large entries, or many that are below the smallest normal number."""
    import torch

    seen = []
    for name, tensor in _filled(setup):
        if not all(map(math.isfinite, bounds := _range(tensor))):
            continue
        sample = tensor.reshape(-1)[:: max(1, tensor.numel() // 65536)]
        sample = sample.float() if sample.element_size() == 1 else sample  # float8 cannot be compared
        # Weights in float16 are often subnormal.
        tiny = 0 if tensor.dtype == torch.float16 else torch.finfo(torch.float32).tiny
        subnormal = ((sample != 0) & (sample.abs() < tiny)).float().mean().item()
        if max(map(abs, bounds)) > 1e4 or subnormal > 0.01:
            seen.append(name)
    return seen


def _norms(setup: Setup) -> Iterator[tuple[str, Any]]:
    modules = setup.model.named_modules() if setup.model is not None else ()
    for name, module in modules:
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and weight is not None and not weight.is_meta:
            yield name, module


def _answer_to(module, value: float):
    """What a norm layer makes of a constant row. A batch norm would update its statistics, so it is left out."""
    import torch

    if isinstance(module, torch.nn.modules.batchnorm._NormBase):
        return None
    weight = module.weight
    row = torch.full((1, 1, *weight.shape), value, device=weight.device)
    row[..., ::2] *= -2  # not constant unless it is 0
    try:
        with torch.no_grad():
            return module(row.to(weight.dtype))
    except (TypeError, RuntimeError):  # a layer that wants more than one input, or float8: nothing can be said
        return None


def _dead_norms(setup: Setup) -> list[str]:
    """A weight of zeros is right where the layer multiplies by 1 + weight, so the layer itself is asked."""
    zeros = ((name, norm) for name, norm in _norms(setup) if norm.weight.numel() and not norm.weight.any())
    return [name for name, norm in zeros if (out := _answer_to(norm, 1.0)) is not None and not out.any()]


def _norm_eps(setup: Setup) -> list[str]:
    """An eps that is 0 in the dtype of the layer, where a row of zeros then gives 0/0. Most layers compute in fp32."""
    seen = []
    for name, norm in _norms(setup):
        eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
        if isinstance(eps, float | int) and _eps_is_zero(eps, norm.weight.dtype):
            out = _answer_to(norm, 0.0)
            if out is not None and not out.isfinite().all():
                seen.append(name)
    return seen


class SetupCheck(NamedTuple):
    """`see(setup)` gives the guilty things by name: settings, tokens or tensors."""

    code: str
    see: Callable[[Setup], list[str]]
    message: str
    fix: str
    lesson: str
    confidence: str = "certain"

    def finding(self, things: list[str]) -> Finding:
        named = ", ".join(things[:3]) + (", …" if len(things) > 3 else "")
        message = self.message.format(named=named, count=len(things))
        return Finding(self.code, len(things), message, self.fix, self.lesson, (), self.confidence)


_FP32 = "Load the weights in float32 and let bf16=True or fp16=True do the casting."

SETUP_CHECKS = (
    SetupCheck(
        "no_pad_token",
        _no_pad,
        "The tokenizer has no pad token: TRL then takes eos in its place, other collators stop.",
        "Set tokenizer.pad_token; a token of its own is safest.",
        UNK,
        "possible",
    ),
    SetupCheck(
        "no_eos_token",
        _no_eos,
        "The tokenizer has no eos token, which TRL appends to every answer and text: it stops with a TypeError.",
        "Set tokenizer.eos_token to the token that the model ends with.",
        UNK,
    ),
    SetupCheck(
        "eos_lost",
        _eos_lost,
        "pad and eos are one token ({named}): a collator that masks padding by id masks the real eos too, and "
        "the model never learns to stop.",
        "Add a pad token of its own, or use a collator that masks by position.",
        UNK,
        "possible",
    ),
    SetupCheck(
        "special_token_outside_vocabulary",
        _special_outside,
        "Special tokens without an embedding row: {named}.",
        "Call model.resize_token_embeddings(len(tokenizer)).",
        UNK,
    ),
    SetupCheck(
        "nan_filter_on",
        _filter_on,
        "logging_nan_inf_filter is on: a NaN loss is logged as 0.0 or as a share of the sum since the last entry, and "
        "NaN batches vanish from eval_loss.",
        "Set logging_nan_inf_filter=False, so that the log tells the truth.",
        GUARD,
    ),
    SetupCheck(
        "bad_learning_rate",
        _bad_rate,
        "The learning rate is {named}.",
        "Give a finite number, 0 or more (YAML takes 1e-5 for text: write 1.0e-5).",
        DIRTY,
    ),
    SetupCheck(
        "huge_learning_rate",
        _huge_rate,
        "The learning rate is {named}: with most models the loss explodes within a few steps.",
        "Start near 1e-6 for preference tuning, 1e-5 for full tuning, 1e-4 for adapters.",
        DIRTY,
        "likely",
    ),
    SetupCheck(
        "bad_argument",
        _bad_arguments,
        "NaN, inf, or text in place of a number among the arguments: {named}.",
        "Give finite numbers (YAML takes 1e-8 for text: write 1.0e-8).",
        DIRTY,
    ),
    SetupCheck(
        "zero_divisor",
        _zero_divisors,
        "The loss divides by 0: {named}.",
        "Choose another value, or another loss_type.",
        STD,
    ),
    SetupCheck(
        "learns_nothing",
        _learns_nothing,
        "Nothing will be learned: {named}. The loss stays where it starts, finite and useless.",
        "Give a value above 0: beta is 0.1 in most papers, the learning rate near 1e-6 for full tuning.",
        DIRTY,
    ),
    SetupCheck(
        "adam_eps_is_zero",
        _adam_eps,
        "adam_epsilon is {named}, which is 0 in float32: Adam divides 0 by 0 for a weight without a gradient, such as "
        "the embedding of a token that the batch lacks, and it is NaN.",
        "Use an adam_epsilon of 1e-8 or so.",
        HALF,
        "likely",
    ),
    SetupCheck(
        "scaler_refuses_fp16_weights",
        _scaler_refuses,
        "fp16=True with trained tensors already in float16 ({count}): GradScaler stops with 'Attempting to unscale "
        "FP16 gradients'.",
        _FP32,
        HALF,
    ),
    SetupCheck(
        "fp16_adam_eps",
        _fp16_adam,
        "Tensors in float16 ({count}) under an unfused Adam whose eps is 0 in float16: the first step divides 0 by 0 "
        "and the weights are NaN.",
        _FP32 + " The fused optimizer only hides it.",
        HALF,
    ),
    SetupCheck(
        "fp16_adapters",
        _fp16_adapters,
        "Adapter tensors that are trained in float16 ({count}): {named}.",
        "Keep adapters in float32: leave autocast_adapter_dtype=True, or cast them with .float().",
        HALF,
    ),
    SetupCheck(
        "fp16_weights",
        _fp16_weights,
        "Tensors that are trained in float16 ({count}): small updates round away, and large values pass 65504. With "
        "the unfused Adam they turn NaN at the first step.",
        _FP32,
        HALF,
        "likely",
    ),
    SetupCheck(
        "overflows_in_fp16",
        _wide_family,
        "Models of the family {named} are known to pass the range of float16 in the forward pass.",
        "Use bf16, or float32 where the device has no bf16.",
        HALF,
        "possible",
    ),
    SetupCheck(
        "meta_weights",
        _on_meta,
        "Tensors on the meta device, which hold no data ({count}): {named}.",
        "Load the model again with from_pretrained, or initialise what to_empty() leaves.",
        DIRTY,
    ),
    SetupCheck(
        "bad_weights",
        _bad_weights,
        "Weights that already hold NaN or inf ({count}): {named}.",
        "Load the checkpoint again, from before the run that broke it; a tensor that no file holds has to be "
        "initialised.",
        DIRTY,
    ),
    SetupCheck(
        "bad_buffers",
        _bad_buffers,
        "Buffers that hold NaN, inf or values they cannot have ({count}): {named}. No gradient check sees a buffer.",
        "Recompute or reload the buffers; for running statistics call reset_running_stats().",
        DIRTY,
    ),
    SetupCheck(
        "uninitialised_weights",
        _uninitialised,
        "Weights that look like memory that was never filled ({count}): {named}.",
        "Check for missing keys when loading; initialise what the checkpoint lacks.",
        DIRTY,
        "likely",
    ),
    SetupCheck(
        "dead_norm_layers",
        _dead_norms,
        "Norm layers with a weight of zeros, which put out only zeros ({count}): {named}.",
        "Check for missing keys when loading; a norm weight starts at one.",
        DIRTY,
        "likely",
    ),
    SetupCheck(
        "norm_eps_is_zero",
        _norm_eps,
        "Norm layers whose eps is 0 in their dtype, so that a constant row gives 0/0 ({count}): {named}.",
        "Use an eps of at least 1e-6 and compute the norm in float32.",
        HALF,
    ),
)
