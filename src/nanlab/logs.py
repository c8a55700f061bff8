"""The log of a run, whoever wrote it: entries in order, numbers only, under the names of transformers.

Read are `trainer_state.json` (also cut off or damaged), JSON, JSON lines and CSV, and what a Trainer prints on the
console, between progress bars and whatever else stands there.
"""

from __future__ import annotations

import ast
import codecs
import json
import math
import os
import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise, takewhile
from pathlib import Path
from textwrap import shorten

import numpy as np

from nanlab.errors import InputError
from nanlab.files import csv_rows
from nanlab.findings import amount


class Part(dict[str, float]):
    """What an entry says of one thing: a training step, an evaluation, the run as a whole.

    An evaluation of one set among several (`eval_a_loss`) goes by the names of a single one (`eval_loss`); `prefix` is
    what its names begin with in the log. `place` is the place in the log.
    """

    def __init__(self, numbers: Mapping[str, float], prefix: str, place: int) -> None:
        super().__init__(numbers)
        self.prefix = prefix
        self.place = place

    def called(self, name: str) -> str:
        """The name of a metric in the log."""
        return self.prefix + name.removeprefix("eval_") if name.startswith("eval_") else name


class Log:
    """Log entries in order, numbers only, under the names of transformers; `parts` are the same, a thing at a time.

    `train` are the parts of training steps, `evals` those of evaluations, `summaries` those of whole runs; `damage`
    says what was wrong with the file. `unit` is what places are counted in: "step", or "entry" where no step is told.
    """

    def __init__(self, entries: Iterable[Mapping], source: str, damage: str = "") -> None:
        entries = [*entries]
        self.entries = _per_step([_numbers(entry) for entry in entries])
        self.unit = "step" if any("step" in entry for entry in self.entries) else "entry"
        _count(self.entries, self.unit)
        self.source = source
        self.damage = damage
        self.parts = _parts(self.entries, table=len({frozenset(entry) for entry in entries}) == 1)
        self.train = [part for part in self.parts if {"loss", "grad_norm"} & part.keys()]
        self.evals = [part for part in self.parts if eval_metrics(part)]
        self.summaries = [part for part in self.parts if "train_loss" in part]
        if not self.train and not self.evals and not self.summaries:
            found = ", ".join(map(repr, dict.fromkeys(name for entry in entries for name in entry))) or "nothing"
            raise InputError(
                f"{source}: no log entry with a loss, grad_norm, train_loss or eval_ metric; found {shorten(found, 99)}"
            )

    def train_array(self, *names: str, start: int = 0) -> np.ndarray:
        """Step and metrics of the training entries from `start` that have them all: float64 `[1 + len(names), n]`."""
        train = (entry for entry in self.train[start:] if {*names} <= entry.keys())
        rows = [[entry["step"], *(entry[name] for name in names)] for entry in train]
        return np.array(rows, float).reshape(-1, 1 + len(names)).T

    def by_set(self) -> dict[str, list[Part]]:
        """Prefix → the evaluations of that set."""
        sets: dict[str, list[Part]] = {}
        for part in self.evals:
            sets.setdefault(part.prefix, []).append(part)
        return sets

    @cached_property
    def rewards(self) -> bool:
        """A policy-gradient run (GRPO and the like): its loss starts at 0 and measures nothing."""
        return any({"reward", "reward_std", "eval_reward"} & part.keys() for part in self.parts)

    @cached_property
    def zeros_for_nan(self) -> set[int]:
        """Places of losses that are exactly 0.0 to the end and were NaN, though no gradient norm says so.

        There is none, and the loss did not fall to 0 but jumped there; or it never moves: DeepSpeed writes −1 for a
        norm that is NaN, and 1 or √2 for one over several groups of parameters.
        """
        tail = [*takewhile(lambda part: part.get("loss") == 0 and not scored(part), reversed(self.train))]
        norms = {part.get("grad_norm") for part in tail}
        if len(tail) < 2 or len(norms) > 1 or self.rewards:
            return set()
        before, norm = self.train[: len(self.train) - len(tail)], norms.pop()
        usual = min((part.get("loss", math.inf) for part in before), default=0.0) > 0  # other losses pass through 0
        jumped = usual and before[-1].get("loss", 0.0) > _NEAR_ZERO
        odd = jumped if norm is None else norm != 0 and math.isfinite(norm) and (jumped or not before)
        return {part.place for part in tail} if odd else set()

    def sign_of_life(self, part: Part) -> float:
        """The gradient norm of a training step, without one its loss; NaN where that was NaN."""
        return math.nan if part.place in self.zeros_for_nan else part.get("grad_norm", part.get("loss", math.nan))

    @cached_property
    def dead_from(self) -> int | None:
        """Index in `train` from which on no sign of life is finite until the end.

        A single such entry may be a step that a GradScaler skipped. It counts only beside a loss of 0.0 or NaN.
        """
        tail = [*takewhile(lambda part: not math.isfinite(self.sign_of_life(part)), reversed(self.train))]
        alone = len(tail) == 1 and math.isfinite(loss := tail[0].get("loss", 1.0)) and loss != 0
        return len(self.train) - len(tail) if tail and not alone else None

    @cached_property
    def death(self) -> tuple[float, int]:
        """The step from which on training is dead, and where in the log that run starts: another may come before it."""
        if self.dead_from is None:
            return math.inf, 0
        until = self.train[: self.dead_from + 1]
        starts = [part.place for before, part in pairwise(until) if part["step"] < before["step"]]
        return until[-1]["step"], max(starts, default=0)

    def alive_at(self, part: Part) -> bool:
        """Training was still finite there."""
        step, start = self.death
        return part["step"] < step or part.place < start


# Other names, the better one first: W&B's _step counts its own calls.
_NAMES = {
    "global_step": "step",
    "current_steps": "step",  # LLaMA-Factory
    "global_step/max_steps": "step",  # ms-swift
    "iteration": "step",
    "_step": "step",
    "lr": "learning_rate",
    "gradient_norm": "grad_norm",
    "training_loss": "loss",  # the Trainer's table in a notebook
    "validation_loss": "eval_loss",
    "train_loss_step": "loss",  # Lightning
    "val_loss": "eval_loss",
}
# A strict writer of JSON has no other way to say NaN, and pandas leaves the cell of a CSV empty; TRL writes the mean of
# no reward so. Some writers give all names to every entry: then another number has to say that it was measured.
_NULL_IS_NAN = {
    re.compile("loss|grad_norm"): re.compile("learning_rate|lr|loss|grad_norm"),
    re.compile("eval_(.*_)?(loss|reward)"): re.compile("eval_.*"),
    re.compile("reward"): re.compile("rewards?[_/].*|completions/.*"),
    re.compile("train_loss"): re.compile("train_(samples|steps)_per_second"),
}
_NEAR_ZERO = 0.01  # a loss that was below may well be 0.0 to four digits
_NO_METRIC = re.compile(r"runtime|per_second|preparation_time|num_tokens|epoch|flos|_rows$|step$")


def _numbers(entry: Mapping) -> dict[str, float]:
    """The numbers of an entry; the text "NaN" is one, "n/a" is not, and "5/300" is step 5."""
    named = {_name(str(key)): value for key, value in entry.items()}
    clean: dict[str, float] = {}
    for name, value in (named | dict.fromkeys(_nan_as_null(named), math.nan)).items():
        if name.endswith(("__MIN", "__MAX")):  # of the same points, in a table of W&B
            continue
        if (number := _float(value)) is not None:
            clean[name] = number
    for other, name in _NAMES.items():
        if other in clean:
            clean = {name: clean.pop(other), **clean}
    if not math.isfinite(clean.get("step", 0.0)):
        del clean["step"]
    return clean


def _float(value: object) -> float | None:
    """None for a name, a list, an empty cell."""
    try:
        return float(value.partition("/")[0] if isinstance(value, str) else value)
    except OverflowError:  # an integer of more than 308 digits
        return math.copysign(math.inf, value > 0 or -1)
    except (TypeError, ValueError):
        return None


@lru_cache
def _name(key: str) -> str:
    """Without what W&B puts before it ("run - train/loss"), and as in a log if it is a title ("Training Loss")."""
    name = re.sub("^eval/", "eval_", key.rpartition(" - ")[2].removeprefix("train/"))
    title = name.lower().replace(" ", "_")
    return title if title in ("step", "epoch", *_NAMES) else name


def _nan_as_null(named: Mapping) -> list[str]:
    """The names under which null is a number that was NaN, and not one that was not measured."""
    null = [name for name, value in named.items() if value is None or value == ""]
    if not null:
        return []
    kinds = {name: kind for name in named for kind in _NULL_IS_NAN if kind.fullmatch(name)}
    told = [n for n in named if n not in null or n.startswith(("reward_", "rewards/"))]
    measured = {kind for kind in kinds.values() if any(map(_NULL_IS_NAN[kind].fullmatch, told))}
    alone = len({*kinds.values()}) == 1
    return [n for n in null if n in kinds and (kinds[n] in measured or (alone and named[n] is None))]


def _per_step(entries: list[dict[str, float]]) -> list[dict[str, float]]:
    """Lightning calls the loss of a step what the Trainer calls that of a run."""
    several = sum("train_loss" in entry for entry in entries) > 1
    if not several or any({"loss", "train_runtime"} & entry.keys() for entry in entries):
        return entries
    return [{"loss" if name == "train_loss" else name: value for name, value in e.items()} for e in entries]


def _count(entries: list[dict[str, float]], unit: str) -> None:
    """Give each entry a step: the last that was told, or its number where none is told at all."""
    step = 1.0
    for number, entry in enumerate(entries, start=1):
        step = entry.setdefault("step", step if unit == "step" else float(number))


_SUMMARY = re.compile(r"train_(loss$|runtime$|\w+_per_second$)")
# Whatever the entry is about; _timestamp and the like are W&B's.
_SHARED = re.compile(r"(step|epoch|total_flos|index|num_input_tokens_seen|memory\(GiB\)|Unnamed: \d+)$|_")
# What is a number in the row of a data frame that measures such a thing, whatever became of its loss.
_PROOF = {
    "": re.compile("learning_rate|grad_norm"),
    "eval_": re.compile("eval_runtime|eval_.*_per_second"),
    "train_": re.compile("train_(samples|steps)_per_second"),
}


def _parts(entries: list[dict[str, float]], *, table: bool) -> list[Part]:
    """The entries, a thing at a time. Where all have the same names, NaN may stand for what was not measured."""
    names = dict.fromkeys(name for entry in entries for name in entry)
    sets = _eval_sets([*names])
    prefixes = {name: _prefix(name, sets) for name in names if not _SHARED.match(name)}
    groups = [_groups(entry, prefixes) for entry in entries]
    if table:
        groups = _without_missing(groups)
    shared = [{k: v for k, v in entry.items() if k not in prefixes and math.isfinite(v)} for entry in entries]
    return [
        Part({**shared[place], **numbers}, prefix, place)
        for place, here in enumerate(groups)
        for prefix, numbers in here.items()
    ]


def _eval_sets(names: Sequence[str]) -> list[str]:
    """What the names of each evaluation set begin with: "eval_", or "eval_a_" and "eval_b_" for a dict of sets.

    The Trainer writes a time beside the loss of a set, not beside one of several losses (`eval_nll_loss`).
    """
    sets = [name.removesuffix("loss") for name in names if name.startswith("eval_") and name.endswith("loss")]
    timed = [prefix for prefix in sets if f"{prefix}runtime" in names]
    return sorted(timed or (["eval_"] if "eval_" in sets else sets), key=len, reverse=True)


def _prefix(name: str, sets: Sequence[str]) -> str:
    if name.startswith("eval_"):
        return next((prefix for prefix in sets if name.startswith(prefix)), "eval_")
    return "train_" if _SUMMARY.match(name) else ""


def _groups(entry: Mapping[str, float], prefixes: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Prefix → the metrics under it, evaluations by the names of a single set."""
    groups: dict[str, dict[str, float]] = {}
    for name, value in entry.items():
        if (prefix := prefixes.get(name)) is not None:
            single = f"eval_{name.removeprefix(prefix)}" if prefix.startswith("eval_") else name
            groups.setdefault(prefix, {})[single] = value
    return groups


def _without_missing(rows: list[dict[str, dict[str, float]]]) -> list[dict[str, dict[str, float]]]:
    """A row of a data frame measures one thing and is NaN in the others' columns.

    Without a proof, where some row measures two, or one is measured nowhere, NaN may be measured too: then all stays
    as it is.
    """
    table: dict[str, set[str]] = {}
    for row in rows:
        for prefix, numbers in row.items():
            table.setdefault(prefix, set()).update(numbers)
    kind = lambda prefix: "eval_" if prefix.startswith("eval_") else prefix
    proof = {prefix: {n for n in names if _PROOF[kind(prefix)].fullmatch(n)} for prefix, names in table.items()}
    says = lambda row, prefix: (v for n, v in row[prefix].items() if not proof[prefix] or n in proof[prefix])
    measured = [{prefix for prefix in row if any(map(math.isfinite, says(row, prefix)))} for row in rows]
    proven = {prefix for prefix in table if proof[prefix]}
    known = set().union(*measured) | proven
    if any(len(here) > 1 and not here <= proven for here in measured):
        return rows
    return [
        {prefix: row[prefix] for prefix in row if not here or prefix in here or prefix not in known}
        for row, here in zip(rows, measured, strict=True)
    ]


def eval_metrics(part: Mapping[str, float]) -> dict[str, float]:
    """Metrics of an evaluation, without times and counts."""
    return {key: value for key, value in part.items() if key.startswith("eval_") and not _NO_METRIC.search(key)}


_SCORES = re.compile("rewards/|logps/|margins")


def scored(part: Part) -> bool:
    """An accuracy above 0, or a reward or log-prob other than 0: there was something to be scored."""
    accuracies = any("accurac" in name and value > 0 for name, value in part.items())
    others = (v for name, v in part.items() if "accurac" not in name and _SCORES.search(name))
    return accuracies or any(math.isfinite(value) and value != 0 for value in others)


def read_log(source: str | os.PathLike | Sequence[Mapping]) -> Log:
    """What `autopsy` accepts, as a `Log`. Raises InputError, see there."""
    if isinstance(source, str | os.PathLike):
        return _first_readable(_log_files(Path(source)))
    if isinstance(source, Mapping):  # the content of a trainer_state.json
        source = source.get("log_history")
    if not isinstance(source, Sequence) or not all(isinstance(entry, Mapping) for entry in source):
        raise InputError("autopsy wants a path or a log history (a list of dicts), e.g. trainer.state.log_history")
    return Log(source, "the log history")


_OTHERS = ("trainer_log.jsonl", "logging.jsonl")  # LLaMA-Factory's and ms-swift's, beside checkpoints or without


def _log_files(path: Path) -> list[Path]:
    """The file itself (also a pipe), or every trainer_state.json in the folder of a run, newest (by step) first."""
    if not os.path.exists(path):  # unlike path.exists(), False also for a name that no system takes
        raise InputError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    top = path / "trainer_state.json"
    steps = {top: math.inf, **{file: _number(file.parent) for file in path.glob("checkpoint-*/trainer_state.json")}}
    found = [file for file in steps if file.is_file()] or [file for n in _OTHERS if (file := path / n).is_file()]
    if not found:
        raise InputError(f"{path}: no trainer_state.json here or in a checkpoint-* folder; name the log file itself")
    if top in found[:1] and len(found) > 1:
        steps[top] = _reaches(top)
    return sorted(found, key=lambda file: steps.get(file, 0), reverse=True)


def _number(checkpoint: Path) -> int:
    return int(re.sub(r"\D", "", checkpoint.name) or 0)


def _reaches(state: Path) -> float:
    """The last step in it: the file of a finished run may stand beside checkpoints of a later one that was resumed.

    One that says nothing comes first, to be told of.
    """
    try:
        entries = _parse(state)[0]
    except InputError:
        return math.inf
    return max((_numbers(entry).get("step", 0.0) for entry in entries), default=math.inf)


def _first_readable(files: list[Path]) -> Log:
    """A run that was killed while it saved leaves an empty newest log beside whole older ones."""
    wrong = []
    for path in files:
        try:
            log = Log(*_parse(path))
        except InputError as error:
            wrong.append(error)
            continue
        log.damage = "; ".join([*(f"{error}, so {path} was read" for error in wrong[:1]), *filter(None, [log.damage])])
        return log
    raise wrong[0]


_JSON = (".json", ".jsonl", ".ndjson")
_UNREAD = "no complete log entry can be read from it; give a trainer_state.json, JSON, CSV, or lines like {'loss': 1.2}"


def _parse(path: Path) -> tuple[list[Mapping], str, str]:
    """Entries, source, and damage of a CSV, JSON, JSONL file, or of what a console showed."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # what PowerShell writes for `>`
    text = raw.decode("utf-16" if wide else "utf-8-sig", errors="replace")
    if not text.strip("\0 \r\n\t"):
        raise InputError(f"{path}: the file is empty")
    if path.suffix.lower() == ".csv":
        return csv_rows(text), str(path), ""
    for whole in (lambda text: _entries(json.loads(text)), _one_a_line):
        try:
            values = whole(text)
        except (ValueError, RecursionError):
            continue
        entries = [value for value in values if isinstance(value, Mapping)]
        if entries or not values:
            odd = len(values) - len(entries)
            return entries, str(path), f"{odd} of {len(values)} entries hold no named numbers" if odd else ""
    if not (entries := _salvage(text)):
        raise InputError(f"{path}: {_UNREAD}")
    what = f"{amount(len(entries), 'complete entry', 'complete entries')} could be recovered"
    last = f"{what}, the last of step {entries[-1].get('step', 'unknown')}"
    return entries, str(path), last if path.suffix.lower() in _JSON else ""


def _entries(value: object) -> list:
    """What a JSON value holds: the log history of a trainer_state.json, a list of entries, or one entry."""
    history = value.get("log_history") if isinstance(value, Mapping) else value
    return history if isinstance(history, list) else [value]


def _one_a_line(text: str) -> list:
    lines = re.split(r"[\r\n]", text)  # not splitlines(): U+2028 and U+0085 may stand inside a text
    return [json.loads(line) for line in lines if line.strip()]


_ENTRY = re.compile("grad_norm|(.*_)?loss|eval_.*")
_OBJECT = re.compile(r"\{\s*[\"}]")  # how one begins in JSON
_PRINTED = re.compile(r"\{[^{}]*\}")
_NOT_FINITE = re.compile(r"(?<=[\s:])-?(nan|inf)\b")
_BAR = re.compile(r"(:\s*)?\b\d{1,3}%\|[^|\r\n]*\|\s*(\d+)/(\d+) \[")  # of tqdm; with a title it is not the training's


def _salvage(text: str) -> list[Mapping]:
    """Every complete log entry in a damaged file, or among other things on a console."""
    text = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", text)  # colours
    decoder, at, found = json.JSONDecoder(), text.find("{"), []
    while at >= 0:
        value, end = _json(decoder, text, at) or _literal(text, at) or ({}, at + 1)  # cut off: look into it
        found += [(at, end, entry) for entry in _entries(value) if _is_entry(entry)]
        at = text.find("{", end)
    twice = [_same(one, another) for (_, _, one), (_, _, another) in pairwise(found)]
    return _with_steps(text, [entry for entry, again in zip(found, [*twice, False], strict=False) if not again])


def _is_entry(value: object) -> bool:
    """A number under a name that a log has; a configuration may have the name."""
    number = lambda v: not isinstance(v, bool) and v is not None and _float(v) is not None
    return isinstance(value, Mapping) and any(_ENTRY.fullmatch(str(name)) and number(v) for name, v in value.items())


def _json(decoder: json.JSONDecoder, text: str, at: int) -> tuple[dict, int] | None:
    """The JSON object that begins there, and where it ends. A failure counts lines from the start: it is not cheap."""
    if not _OBJECT.match(text, at):
        return None
    try:
        return decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _literal(text: str, at: int) -> tuple[dict, int] | None:
    """The dict that begins there as Python prints it, with nan and inf, and where it ends."""
    printed = _PRINTED.match(text, at)
    if printed is None or not ("loss" in printed[0] or "grad_norm" in printed[0]):
        return None
    try:
        value = ast.literal_eval(_NOT_FINITE.sub(r"'\g<0>'", printed[0]))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return (value, printed.end()) if isinstance(value, dict) else None


def _same(one: Mapping, another: Mapping) -> bool:
    """LLaMA-Factory prints loss and rate of an entry, and then the Trainer prints it whole."""
    place = [(entry.get("step"), entry.get("epoch")) for entry in (one, another)]
    return one.keys() < another.keys() and another.keys() - one == {"grad_norm"} and place[0] == place[1]


def _with_steps(text: str, found: list[tuple[int, int, dict]]) -> list[Mapping]:
    """A printed entry names no step, but tqdm draws the bar of the training again right after it.

    After all of them, and with rising steps, or none can be trusted: a file that was buffered has the bars elsewhere.
    """
    bars = [(bar.end(), int(bar[2]), int(bar[3])) for bar in _BAR.finditer(text) if not bar[1]]
    places, ends = [at for at, _, _ in bars], [*(start for start, _, _ in found[1:]), len(text)]
    after = [bars[bisect(places, end) : bisect(places, until)] for (_, end, _), until in zip(found, ends, strict=False)]
    without = [(e, shown) for (_, _, e), shown in zip(found, after, strict=True) if "step" not in e]
    training = [(e, shown[:1]) for e, shown in without if "loss" in e]
    steps = [(step, _float(e.get("epoch")) or 0.0) for e, shown in training for _, step, _ in shown]
    rising = all(step < later or epoch > next_epoch for (step, epoch), (later, next_epoch) in pairwise(steps))
    totals = {total for _, shown in training for _, _, total in shown}
    for entry, shown in without if len(steps) == len(training) and rising else ():
        told = [step for _, step, total in shown if total in totals]  # an evaluation has a bar of its own
        entry.update({"step": told[0]} if told else {})
    return [entry for _, _, entry in found]
