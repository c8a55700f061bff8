"""What the log of a finished (or dead) run gives away, also where the log itself hides it.

transformers writes 0.0, or a share of the sum since the last entry, in place of a NaN loss (`logging_nan_inf_filter`,
on by default), and from 5.23 drops NaN batches from `eval_loss`. The footprints stay: the gradient norm, the other
metrics, repeated numbers.

`CHECKS` is the table of them: code, the function that sees it, what it means, how sure that is, what to run next.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from typing import NamedTuple

import numpy as np

from nanlab.findings import Finding, Findings, amount
from nanlab.logs import Log, Part, eval_metrics, read_log, scored


def autopsy(path_or_log_history: str | os.PathLike | Sequence[Mapping]) -> Autopsy:
    """Read the log of a run and say what went wrong in it, how sure that is, and what to run next.

    Args:
        path_or_log_history: a `trainer_state.json` (also cut off or damaged), the folder of a run or checkpoint that
            holds one (the newest by step; where it says nothing, the next), a JSON, JSONL or CSV file of metrics, a
            text file of what the console showed, or `trainer.state.log_history`.

    Returns:
        `Autopsy`: findings whose `rows` are steps (numbers of log entries where no step is told), with `plot()`.

    Raises:
        InputError: the file is missing, is no log, or holds no entry.
    """
    return Autopsy(read_log(path_or_log_history))


class Autopsy(Findings):
    """What `autopsy` found; `log` is what it read."""

    def __init__(self, log: Log) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # a log may hold any number, up to the largest, and inf
            found = [(check, check.see(log)) for check in CHECKS]
        findings = [check.finding(seen, log.unit) for check, seen in found if seen]
        what = amount(len(log.entries), "log entry", "log entries")
        super().__init__(findings, subject=f"{what} of {log.source}", unit=log.unit)
        self.log = log

    def plot(self):
        """Loss and gradient norm over the steps, with the findings marked: a matplotlib `Figure`, 100 dpi.

        What was not finite is drawn as a cross at the upper edge. Findings are numbered where they start.
        """
        return _plot(self)


# ---------------------------------------------------------------------------------------------------------- footprints


class Seen(NamedTuple):
    """Where a footprint shows (steps), how sure it is, what the message says about it, and of which metrics."""

    steps: Sequence[float]
    confidence: str = "certain"
    detail: str = ""
    names: str = ""


def _at(parts: Sequence[Part], confidence: str = "certain", detail: str = "") -> Seen | None:
    """At the steps of these parts of the log, evaluations by the names that their losses have there."""
    names = dict.fromkeys(part.called("eval_loss") for part in parts)
    return Seen([part["step"] for part in parts], confidence, detail, " or ".join(names)) if parts else None


def _damage(log: Log) -> Seen | None:
    return Seen((), detail=log.damage) if log.damage else None


def _bad_rate(log: Log) -> Seen | None:
    steps, rate = log.train_array("learning_rate")
    return _where(steps, ~np.isfinite(rate))


def _filter_footprint(log: Log) -> Seen | None:
    bad = [part for part in log.train if part.get("loss") == 0 and not math.isfinite(part.get("grad_norm", 0.0))]
    others = {name: value for part in bad[:1] for name, value in part.items() if name != "grad_norm"}
    return _at(bad, detail=_beside(others))


def _zeros_for_nan(log: Log) -> Seen | None:
    zeros = [part for part in log.train if part.place in log.zeros_for_nan]
    if not zeros:
        return None
    norm = zeros[0].get("grad_norm")
    detail = "" if norm is None else f", beside a gradient norm that is {norm:.6g} each time"
    return _at(zeros, "likely", detail)


def _nan_loss(log: Log) -> Seen | None:
    bad = [part for part in log.train if not math.isfinite(part.get("loss", 0.0))]
    return _at(bad, detail=_beside(bad[0])) if bad else None


def _beside(part: Mapping[str, float]) -> str:
    """What else was logged there, and is finite or not: it says how far the NaN has come."""
    others = {name: value for name, value in part.items() if _RESULT.match(name)}
    bad, good = ([n for n, value in others.items() if math.isfinite(value) is finite] for finite in (False, True))
    told = [f"{what}: {', '.join(names[:3])}" for what, names in (("NaN or inf too", bad), ("finite", good)) if names]
    return f" ({'; '.join(told)})" if told else ""


_RESULT = re.compile("(?!.*accurac).*(grad_norm|reward|logp|logit|kl$|entropy)")


def _nan_summary(log: Log) -> Seen | None:
    """The average over the run is not finite, and no logged loss says why."""
    bad = [part for part in log.summaries if not math.isfinite(part["train_loss"])]
    return None if _nan_loss(log) else _at(bad)


_HALVINGS = 16  # GradScaler starts at a scale of 2¹⁶ and halves it in each step that overflows


def _bad_gradient(log: Log) -> Seen | None:
    """A finite loss beside gradients that stay NaN or inf. Single ones are a GradScaler at work."""
    if log.dead_from is None:
        return None
    steps, loss, norm = log.train_array("loss", "grad_norm", start=log.dead_from)
    sure = "possible" if log.dead_from == 0 and len(log.train) <= _HALVINGS else "likely"
    return _where(steps, np.isfinite(loss) & (loss != 0) & ~np.isfinite(norm), sure)


def _no_gradient(log: Log) -> Seen | None:
    """Loss and gradient exactly 0: nothing was averaged. Without gradient norms the loss alone says less.

    An accuracy above 0 was measured on something: there the loss is 0 since the model has learned the rows by heart.
    """
    if log.rewards:
        return None
    zero = [part for part in log.train if part.get("loss") == 0 and not scored(part)]
    zero = [part for part in zero if part.place not in log.zeros_for_nan]
    if any({"loss", "grad_norm"} <= part.keys() for part in log.train):
        zero = [part for part in zero if part.get("grad_norm") == 0]
        return _at(zero, "likely", "Loss and gradient are")
    if not log.train:  # a short run that logged nothing but its summary
        zero = [part for part in log.summaries if part["train_loss"] == 0]
        return _at(zero, "possible", "train_loss is")
    return _at(zero, "possible", "The loss is") if len(zero) > 1 else None


def _zero_gradient(log: Log) -> Seen | None:
    """A gradient of exactly 0 to the end, beside a loss that is none or measures nothing."""
    norms = np.array([part.get("grad_norm", math.nan) for part in log.train])
    start = _last(norms != 0) + 1
    measures = lambda part: math.isfinite(part.get("reward", 0.0)) if log.rewards else part.get("loss", 1.0) != 0
    tail = [*filter(measures, log.train[start:])]
    alike = tail and (tail[0].get("reward_std") == 0 or tail[0].get("frac_reward_zero_std") == 1)
    why = "the rewards of each group are alike, so every advantage is 0" if alike else "nothing reaches the weights"
    return _at(tail, "likely", why) if len(tail) >= 3 else None


def _steps_skipped(log: Log) -> Seen | None:
    """The scheduler only moves with the optimizer: a rate that stands still in a moving schedule means no step."""
    parts = [part for part in log.train if "learning_rate" in part]
    steps, rate, life = np.array([[p["step"], p["learning_rate"], log.sign_of_life(p)] for p in parts]).reshape(-1, 3).T
    if len(set(rate)) < 2:
        return None
    still = np.concatenate([[False], (rate[1:] == rate[:-1]) & ~np.isfinite(life[1:])])
    runs = _runs(still)
    longest = max(runs, key=len, default=range(0))
    return Seen(steps[longest.start : longest.stop], "likely") if len(longest) >= 5 else None


def _steps_guarded(log: Log) -> Seen | None:
    """What `nanlab.watch` has skipped: its count, which later entries repeat, has grown there."""
    counts = [0.0, *(part.get("guard_skipped", 0.0) for part in log.train)]
    return _at([part for part, (before, now) in zip(log.train, pairwise(counts), strict=True) if now > before])


def _repeated_loss(log: Log) -> Seen | None:
    """The same loss to the last digit. Rounded logs and losses in half precision repeat by themselves.

    Beside a gradient of exactly 0 they do not. DPO may start at log 2, not end there.
    """
    if log.rewards:  # the loss of equal rewards is noise around 0, and may be the same noise
        return None
    steps, loss = log.train_array("loss")
    norm = np.array([part.get("grad_norm", math.nan) for part in log.train if "loss" in part])
    same = np.concatenate([[False], loss[1:] == loss[:-1]]) & (loss != 0) & np.isfinite(loss)
    exact = np.array([*map(_exact, loss)], bool) & (np.frexp(loss)[0] * 2**11 % 1 != 0) | (norm == 0)
    starting = np.abs(loss - math.log(2)) < 1e-5
    runs = [run for run in _runs(same & exact) if len(run) >= 2 and not starting[run[0]]]
    runs += [run for run in _runs(same & starting) if len(run) >= 9 and run.stop == len(loss)]
    guarded = {*seen.steps} if (seen := _steps_guarded(log)) else set()  # there the guard is why
    runs = [run for run in runs if guarded.isdisjoint(steps[run.start : run.stop])]
    return Seen([step for run in runs for step in steps[run.start - 1 : run.stop]], "likely") if runs else None


def _scale_falls(log: Log) -> Seen | None:
    """Never up, still falling in the last quarter, by 256 or more: no step fits into the range any more."""
    for name in ("loss_scale", "grad_scale", "scale", "scaler_scale", "amp_scale"):
        steps, scale = log.train_array(name)
        change = np.diff(scale)
        late = change[math.ceil(len(change) * 3 / 4) :]  # of fewer than four changes none
        if (change <= 0).all() and late.any() and scale[0] >= 256 * scale[-1]:
            return Seen(steps[1:][change < 0], detail=f"from {scale[0]:g} to {scale[-1]:g}")
    return None


_TOLD = {"learning_rate", "reward", "eval_reward", "train_loss"}  # by other checks


def _nan_metrics(log: Log) -> Seen | None:
    """Other metrics NaN beside a finite loss, in an evaluation or in a training step with a finite gradient."""
    steps, names = [], {}
    trained = {part.place: part.get("loss", math.nan) for part in log.train}
    for part in log.parts:
        loss = part.get("eval_loss", trained.get(part.place, math.nan))
        finite = math.isfinite(loss) and loss != 0 and math.isfinite(part.get("grad_norm", 0.0))
        bad = [part.called(name) for name, value in part.items() if name not in _TOLD and not math.isfinite(value)]
        if finite and bad:
            steps.append(part["step"])
            names.update(dict.fromkeys(bad))
    return Seen(steps, "likely", ", ".join([*names][:3])) if steps else None


def _empty_evaluation(log: Log) -> Seen | None:
    """eval_loss NaN while training is finite, as far as is known."""
    bad = [part for part in log.evals if not math.isfinite(part.get("eval_loss", 0.0)) and log.alive_at(part)]
    others = [value for part in bad for value in eval_metrics(part).values() if math.isfinite(value)]
    alive = any(log.sign_of_life(part) != 0 and log.alive_at(part) for part in log.train)
    training = " while training is" if alive else ""
    empty = "; every other metric is exactly 0" if others and not any(others) else ""
    return _at(bad, "likely" if alive else "possible", training + empty)


def _dead_evaluation(log: Log) -> Seen | None:
    return _at([part for part in log.evals if not math.isfinite(part.get("eval_loss", 0.0)) and not log.alive_at(part)])


def _zero_evaluation(log: Log) -> Seen | None:
    """Where the loss of a policy gradient is 0, the rewards of each group were alike."""
    zero = [part for part in log.evals if part.get("eval_loss") == 0 and not scored(part)]
    return None if log.rewards else _at(zero, "likely")


def _no_reward(log: Log) -> Seen | None:
    return _at([p for p in log.parts if not math.isfinite(p.get("reward", p.get("eval_reward", 0.0)))])


def _excluded_rows(log: Log) -> Seen | None:
    return _at([p for p in log.parts if any(name.endswith("excluded_rows") and p[name] > 0 for name in p)])


def _lying_accuracy(log: Log) -> Seen | None:
    """A comparison with NaN is False: accuracies of 0.0 beside margins of NaN count nothing."""

    def lies(part: Part) -> bool:
        zero = any("accurac" in name and value == 0 for name, value in part.items())
        return zero and any("margin" in name and math.isnan(value) for name, value in part.items())

    steps = dict.fromkeys(part["step"] for part in log.parts if lies(part))  # training and evaluation share steps
    return Seen([*steps]) if steps else None


def _no_progress(log: Log) -> Seen | None:
    """Three evaluations of one set alike to the last digit of every metric."""
    longest: list[float] = []
    for evals in log.by_set().values():
        metrics = [eval_metrics(part) for part in evals]
        finite = [bool(m.get("eval_loss")) and all(map(math.isfinite, m.values())) for m in metrics]
        whole = [so and any(map(_exact, m.values())) for so, m in zip(finite, metrics, strict=True)]
        same = [False] + [whole[at] and metrics[at] == metrics[at - 1] for at in range(1, len(metrics))]
        run = max(_runs(np.array(same)), key=len, default=range(0))
        steps = [part["step"] for part in evals[run.start - 1 : run.stop]]
        longest = max(longest, steps, key=len)
    return Seen(longest, "likely") if len(longest) >= 3 else None


def _exact(number: float) -> bool:
    """Not rounded to four digits, as transformers prints numbers, or to four decimals."""
    return number not in (float(f"{number:.4g}"), round(number, 4))


def _where(steps: np.ndarray, mask: np.ndarray, confidence: str = "certain") -> Seen | None:
    return Seen(steps[mask], confidence) if mask.any() else None


def _runs(mask: np.ndarray) -> list[range]:
    """Stretches of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


# ---------------------------------------------------------------------------------------------------------- divergence

_CALM = 0.1  # decades: gradient norms of a healthy run scatter by some 25 %, so less is no scatter at all


class Onset(NamedTuple):
    """Where heights (in decades) leave the range of the calmest quarter of a run for good."""

    start: int  # the first entry above normal that is followed by none within it
    normal: float  # median of the calmest quarter
    jump: bool  # from normal to ten times as much within two entries


def _onset(heights: np.ndarray) -> Onset | None:
    """Normal reaches up to 2, abnormal starts at 5 scaled median absolute deviations above the median."""
    width = max(1, len(heights) // 4)
    if len(heights) <= width:
        return None
    import pandas  # datasets brings it; here, so that importing this module stays quick

    medians = pandas.Series(heights).rolling(width).median().to_numpy()[width - 1 :]
    calm = int(medians.argmin())
    normal = float(medians[calm])
    scatter = max(1.4826 * float(np.median(np.abs(heights[calm : calm + width] - normal))), _CALM)
    if heights[-1] <= normal + 5 * scatter:
        return None
    start = _last(heights <= normal + 2 * scatter) + 1
    return Onset(start, normal, jump=bool((heights[start : start + 2] >= normal + 1).any()))


def _last(mask: np.ndarray) -> int:
    """Index of the last True, −1 without one."""
    return int(np.flatnonzero(mask)[-1]) if mask.any() else -1


def _divergence(log: Log) -> tuple[str, Seen] | None:
    if log.dead_from is not None:
        return _death(log)
    return _departure(log, "grad_norm") or _worse_than_at_first(log) or _departure(log, "loss")


def _heights(log: Log, name: str) -> tuple[list[int], np.ndarray]:
    """Places in `log.train`, up to a death, and how high (in decades) the metric is there.

    Places, not steps: a run that starts again writes the same steps twice. NaN is no height: a GradScaler skipped that
    step. Neither is the loss of a policy gradient.
    """
    trusted = log.train[: log.dead_from] if name == "grad_norm" or not log.rewards else []
    places = [at for at, part in enumerate(trusted) if not math.isnan(part.get(name, math.nan))]
    values = np.array([log.train[at][name] for at in places], float)
    return places, np.log10(np.clip(np.nan_to_num(np.abs(values), posinf=1e30), 1e-12, 1e30))


def _normed(log: Log) -> bool:
    return log.train_array("grad_norm").shape[1] * 2 >= len(log.train)


def _death(log: Log) -> tuple[str, Seen] | None:
    """After a climb or not. Where only the norms are bad, from the first entry on, nothing broke."""
    if log.dead_from == 0 and all(math.isfinite(loss := part.get("loss", 0.0)) and loss != 0 for part in log.train):
        return None
    if (ruined := _worse_than_at_first(log)) is not None:
        return ruined
    alone = len(log.train) == 1  # it may be the last of many
    sure = "likely" if log.zeros_for_nan or alone else "certain"
    places, heights = _heights(log, "grad_norm" if _normed(log) else "loss")
    onset = _onset(heights)
    if onset is not None and len(places) - onset.start >= 3:
        return "gradual", _since(log, places[onset.start], sure)
    lost = not math.isfinite(loss := log.train[0].get("loss", math.nan)) or loss == 0
    return "from the start" if log.dead_from == 0 and lost else "sudden", _since(log, log.dead_from, sure)


def _departure(log: Log, name: str) -> tuple[str, Seen] | None:
    """The metric leaves its usual range for good, tenfold; what the norm shows, the loss must confirm."""
    places, heights = _heights(log, name)
    onset = _onset(heights) if name == "loss" or _normed(log) else None
    if onset is None or len(heights) < 8 or len(heights) - onset.start < 3:  # too short to tell noise from a trend
        return None
    at = places[onset.start]
    tenfold = heights[onset.start :].max() >= onset.normal + 1
    if not tenfold or (name == "grad_norm" and not _loss_worse(log, at)):
        return None
    sure = "likely" if name == "grad_norm" else "possible"
    return "sudden" if onset.jump else "gradual", _since(log, at, sure)


def _since(log: Log, at: int, confidence: str = "certain") -> Seen:
    """The steps of the training entries from this place on, and the learning rate there."""
    rate = next((entry["learning_rate"] for entry in log.train[at:] if "learning_rate" in entry), None)
    detail = f" (learning rate {rate:.2g} there)" if rate is not None else ""
    return Seen([entry["step"] for entry in log.train[at:]], confidence, detail)


def _loss_worse(log: Log, at: int) -> bool:
    """The loss from this place on lies clearly above that before it."""
    loss = [entry.get("loss", math.nan) for entry in log.train]
    before, after = (np.array([value for value in part if not math.isnan(value)]) for part in (loss[:at], loss[at:]))
    if log.rewards or not len(before) or not len(after):
        return False
    normal = np.median(before[-max(3, len(before) // 4) :])
    return bool(np.median(after) > 1.3 * normal > 0)


def _worse_than_at_first(log: Log) -> tuple[str, Seen] | None:
    """A rate so high that the first step ruins the model leaves no calm stretch: loss and norm never come back."""
    steps, loss, norm = log.train_array("loss", "grad_norm")[:, : log.dead_from]
    if log.rewards or len(steps) < 8 or not (loss[1:].min() > loss[0] > 0 and norm[1:].min() > norm[0]):
        return None
    worse = np.median(loss[1:]) > 1.5 * loss[0] and np.median(norm[1:]) > 3 * norm[0]
    return ("gradual", _since(log, 1, "likely")) if worse else None


def _diverges(kind: str) -> Callable[[Log], Seen | None]:
    def see(log: Log) -> Seen | None:
        found = _divergence(log) if log.train else None
        return found[1] if found and found[0] == kind else None

    return see


# --------------------------------------------------------------------------------------------------------------- table


class Check(NamedTuple):
    """`see(log)` gives the steps or None; `message` may use {at}, {entries}, {evaluations}, {names} and {detail}."""

    code: str
    see: Callable[[Log], Seen | None]
    message: str
    fix: str
    lesson: str

    def finding(self, seen: Seen, unit: str) -> Finding:
        steps = [int(step) for step in seen.steps]
        fill = {
            "at": f"{unit} {steps[0]}" if steps else "",
            "entries": amount(len(steps), "entry", "entries"),
            "evaluations": amount(len(steps), "evaluation"),
            "detail": seen.detail,
            "names": seen.names,
        }
        message, fix = self.message.format(**fill), self.fix.format(**fill)
        return Finding(self.code, len(steps) or 1, message, fix, self.lesson, steps, seen.confidence)


EMPTY, HALF, RATE, GUARD = "03_empty_batch", "06_fp16_overflow", "07_learning_rate_and_dirty_data", "09_guard"
_LOCATE = "Run nanlab.locate(trainer) to name the operation"

CHECKS = (
    Check(
        "damaged_file",
        _damage,
        "The file is cut off or damaged: {detail}.",
        "Look for another copy of the log (checkpoint-*/trainer_state.json) if what is missing matters.",
        GUARD,
    ),
    Check(
        "filter_footprint",
        _filter_footprint,
        "Loss exactly 0.0 beside a grad_norm that is not finite, from {at} on ({entries}): the 0.0 "
        "was NaN{detail}. logging_nan_inf_filter wrote it, and train_loss averages these zeros too.",
        "Set logging_nan_inf_filter=False. " + _LOCATE + " in the steps up to {at}.",
        GUARD,
    ),
    Check(
        "zeros_for_nan",
        _zeros_for_nan,
        "The loss is exactly 0.0 from {at} on to the end ({entries}){detail}: most likely the 0.0 was NaN, which "
        "logging_nan_inf_filter and fp16 under DeepSpeed hide so.",
        "Set logging_nan_inf_filter=False. " + _LOCATE + " in the steps up to {at}.",
        GUARD,
    ),
    Check(
        "nan_loss",
        _nan_loss,
        "The loss is NaN or inf in {entries}, first at {at}{detail}.",
        _LOCATE + " at {at}; nanlab.watch(trainer) keeps the weights while you look.",
        "08_locate",
    ),
    Check(
        "nan_train_loss",
        _nan_summary,
        "train_loss, which the Trainer averages over the whole run, is NaN or inf at {at}, and no logged loss "
        "is: the steps that went wrong have no entry of their own.",
        "Set logging_nan_inf_filter=False and logging_steps=1. " + _LOCATE + ".",
        GUARD,
    ),
    Check(
        "gradient_not_finite",
        _bad_gradient,
        "A finite loss beside a grad_norm that is NaN or inf to the end, from {at} on ({entries}): "
        "the fault is in the backward pass, the norm overflows, the loss is an average that hides NaN steps, or "
        "GradScaler has not found its scale.",
        "Set logging_nan_inf_filter=False and logging_steps=1. " + _LOCATE + " at {at}.",
        "08_locate",
    ),
    Check(
        "steps_skipped",
        _steps_skipped,
        "The learning rate stands still without a finite gradient, from {at} on ({entries}): the "
        "optimizer takes no step.",
        "The loss scale cannot help when the loss itself overflows: use bf16 or fp32. " + _LOCATE + ".",
        HALF,
    ),
    Check(
        "loss_scale_falls",
        _scale_falls,
        "The loss scale only falls ({detail}): GradScaler skips every step.",
        "Use bf16 or fp32. " + _LOCATE + ".",
        HALF,
    ),
    Check(
        "no_gradient",
        _no_gradient,
        "{detail} exactly 0 from {at} on ({entries}): no token carried loss, or none is left. TRL's own losses are "
        "0.0 then; where the loss was NaN, the filter wrote 0.0.",
        "Run nanlab.preflight(dataset, tokenizer, max_length=…): look for truncated_away and no_label.",
        EMPTY,
    ),
    Check(
        "zero_gradient",
        _zero_gradient,
        "The gradient norm is exactly 0 from {at} on to the end ({entries}): {detail}.",
        "Look for frozen or detached weights and for beta=0; with rewards, for prompts whose answers all score alike.",
        "02_zero_std",
    ),
    Check(
        "gradual_divergence",
        _diverges("gradual"),
        "The run diverges step by step from {at} on{detail}: gradient norm or loss leave their usual range "
        "and stay out.",
        "Lower the learning rate or lengthen the warm-up; resume from a checkpoint before {at}.",
        RATE,
    ),
    Check(
        "sudden_divergence",
        _diverges("sudden"),
        "The run breaks suddenly at {at}{detail}, with no climb before it: one batch, one overflow or one "
        "optimizer step.",
        _LOCATE + " at {at}; run nanlab.preflight with model= and args= for fp16 weights and bad rows.",
        "08_locate",
    ),
    Check(
        "never_finite",
        _diverges("from the start"),
        "The run is not finite from its first entry on, {at}{detail}: what broke it came before that, and no climb can "
        "be seen.",
        _LOCATE + " at the first step; run nanlab.preflight with model= and args= for weights, dtypes and rows.",
        "08_locate",
    ),
    Check(
        "steps_guarded",
        _steps_guarded,
        "nanlab.watch refused steps, first at {at} ({entries}): something was NaN or inf there, and the loss of that "
        "entry is of a batch that was left out.",
        "Ask the guard (summary()), or run nanlab.locate(trainer) in the steps up to {at}.",
        GUARD,
    ),
    Check(
        "repeated_loss",
        _repeated_loss,
        "The same loss to the last digit, first at {at} ({entries}): a filter stood in for NaN, or no step is taken.",
        "Set logging_nan_inf_filter=False and logging_steps=1; compare the weights before and after one step.",
        GUARD,
    ),
    Check(
        "no_progress",
        _no_progress,
        "{evaluations} from {at} on are alike to the last digit: the weights do not change.",
        "Look at the learning rate, at frozen parameters, at fp16 weights, and at a GradScaler that skips every step.",
        HALF,
    ),
    Check(
        "bad_learning_rate",
        _bad_rate,
        "The learning rate is NaN or inf in {entries}, first at {at}.",
        "Look at the scheduler: warm-up of 0 steps, division by a total of 0 steps.",
        RATE,
    ),
    Check(
        "nan_eval_loss",
        _empty_evaluation,
        "{names} is not finite from {at} on ({evaluations}){detail}: some "
        "evaluation batch has no token that carries loss.",
        "Run nanlab.preflight on the evaluation set with max_length; use nanlab.trainers, or nanlab.locate(trainer, "
        "mode='eval').",
        EMPTY,
    ),
    Check(
        "eval_of_dead_model",
        _dead_evaluation,
        "{names} is not finite in {evaluations} from {at} on, after training had died.",
        "Look at the training steps before it, not at the evaluation.",
        GUARD,
    ),
    Check(
        "nan_metrics",
        _nan_metrics,
        "{detail}: not finite beside a finite loss, first at {at} ({entries}). NaN batches were left "
        "out of the loss (transformers 5.23 and later do so), or the metric is a mean over nothing.",
        "Run nanlab.preflight on that data set, or nanlab.locate(trainer); set logging_nan_inf_filter=False.",
        "10_case_tpo_evaluate",
    ),
    Check(
        "zero_eval_loss",
        _zero_evaluation,
        "{names} is exactly 0.0, first at {at} ({evaluations}): an average over nothing that was "
        "called 0, and the best model for metric_for_best_model.",
        "Report NaN where nothing was averaged (nanlab.WeightedMean), and evaluate again.",
        EMPTY,
    ),
    Check(
        "no_reward",
        _no_reward,
        "The reward is NaN or None, first at {at} ({entries}): no reward function scored a completion, or one "
        "gave NaN. A loss of 0.0 beside it means that nothing was learned.",
        "Look at what the reward functions return: a finite number for each completion that they are meant for.",
        EMPTY,
    ),
    Check(
        "lying_accuracy",
        _lying_accuracy,
        "Accuracies of 0.0 beside margins of NaN, first at {at} ({entries}): a comparison with NaN is "
        "False, so nothing was measured.",
        "Do not read this accuracy. Find what made the margins NaN: " + _LOCATE + ".",
        "11_case_dpo_pythia",
    ),
    Check(
        "excluded_rows",
        _excluded_rows,
        "Rows with a non-finite loss were left out of the averages, first at {at} ({entries}).",
        _LOCATE + " on those rows; the averages are over the rest only.",
        GUARD,
    ),
)


# ---------------------------------------------------------------------------------------------------------------- plot


def _plot(autopsy: Autopsy):
    from matplotlib.figure import Figure

    log = autopsy.log
    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for axis, name, label in zip(axes, ("loss", "grad_norm"), ("loss", "gradient norm"), strict=True):
        _draw(axis, *log.train_array(name), label=f"training {label}", color="black")
        axis.set_ylabel(label)
    for (prefix, parts), marker in zip(log.by_set().items(), cycle("s^vD")):
        evals = np.array([[e["step"], e["eval_loss"]] for e in parts if "eval_loss" in e], float).reshape(-1, 2).T
        label = "evaluation loss" if prefix == "eval_" else f"{prefix}loss"
        _draw(axes[0], *evals, label=label, color="0.5", marker=marker, linestyle="--")
    positive = [value for value in log.train_array("grad_norm")[1] if math.isfinite(value) and value > 0]
    if positive and max(positive) > 20 * min(positive):
        axes[1].set_yscale("log")
    axes[1].set_xlabel("step" if log.unit == "step" else "number of the log entry")
    axes[1].xaxis.get_major_locator().set_params(integer=True)
    _mark(axes, autopsy)
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="best", fontsize=8)
    return figure


def _draw(axis, steps: np.ndarray, values: np.ndarray, *, label: str, color: str, marker=".", linestyle="-") -> None:
    """A line through what is finite; what is not lies at the upper edge."""
    finite = np.isfinite(values)
    if finite.any():
        shown = np.where(finite, values, np.nan)
        axis.plot(steps, shown, color=color, marker=marker, markersize=4, linestyle=linestyle, linewidth=1, label=label)
    if not finite.all():
        edge = np.full((~finite).sum(), 0.94)
        axis.plot(
            steps[~finite], edge, "x", color=color, transform=axis.get_xaxis_transform(), label=f"{label}: NaN or inf"
        )


def _mark(axes, autopsy: Autopsy) -> None:
    """A dotted line where findings start, with their numbers; the names stand below the title."""
    starts: dict[int, list[int]] = {}
    for number, finding in enumerate(autopsy, start=1):
        if finding.rows:
            starts.setdefault(finding.rows[0], []).append(number)
    for step, numbers in starts.items():
        for axis in axes:
            axis.axvline(step, color="0.4", linestyle=":", linewidth=1)
        text = ", ".join(map(str, numbers))
        axes[0].annotate(text, (step, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=9)
    names = [f"{number} {finding.code}" for number, finding in enumerate(autopsy, start=1)]
    lines = ["   ".join(names[at : at + 4]) for at in range(0, len(names), 4)]
    axes[0].set_title("\n".join([*lines, ""]) if lines else "nothing found", fontsize=9, loc="left")
