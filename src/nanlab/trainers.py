"""Trainers whose `evaluate()` is right.

Three rules, the same for all of them:

1. Training and evaluation go through one loss (`row_terms`), so their numbers can be compared.
2. A row without a completion token has no loss. It is dropped beforehand and counted (`eval_dropped_rows`).
3. Every average is a sum over a count: rows weigh one, per-token losses weigh their tokens. The result does not move
   with the batch size, the order of the rows or the number of ranks, nor does a training step with how its rows are
   cut into micro-batches. A row with a number that is not finite, its loss or a log-prob, is left out of every
   average and counted (`eval_excluded_rows`); if no row is left, the loss is NaN, not 0.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor
from trl.experimental import tpo

from nanlab.errors import InputError
from nanlab.losses import dpo_loss, token_policy_loss, triple_preference_loss
from nanlab.metrics import WeightedMean
from nanlab.models import clone, completion_batch, completion_log_probs
from nanlab.numerics import group_advantages

TPOConfig = tpo.TPOConfig
DPOConfig = trl.DPOConfig


class RowSum(NamedTuple):
    """One quantity of a batch: its sum in each row and the row's weight (1, or its number of tokens), both `[B]`."""

    sums: Tensor
    weights: Tensor


def _per_row(values: Tensor) -> RowSum:
    return RowSum(values, torch.ones_like(values))


class _Means:
    """Weighted means over the rows of any number of batches.

    Tables of rows wait on the device, since turning them into numbers would stall a GPU at every step. When there are
    `AT_ONCE` of them they are added up: memory does not grow with the batches, and no row is forgotten.
    """

    AT_ONCE = 1_000

    def __init__(self) -> None:
        self.clear()

    def __bool__(self) -> bool:
        return bool(self._tables or self._means)

    def clear(self) -> None:
        self._tables: list[Tensor] = []
        self._means: dict[str, WeightedMean] = {}
        self._excluded = 0

    def add(self, names: Iterable[str], table: Tensor) -> None:
        """`table`: `[rows, 2 · names]`, sum and weight of each named quantity."""
        self._names = list(names)
        self._tables.append(table)
        if len(self._tables) == self.AT_ONCE:
            self._add_up()

    def take(self) -> tuple[dict[str, float], int]:
        """The means, all over the same rows: those whose numbers are all finite. And how many other rows there were."""
        self._add_up()
        taken = {name: mean.compute() for name, mean in self._means.items()}, self._excluded
        self.clear()
        return taken

    def _add_up(self) -> None:
        if not self._tables:
            return
        rows = torch.cat(self._tables).cpu().double()
        self._tables.clear()
        finite = rows.isfinite().all(1)
        self._excluded += int((~finite).sum())
        columns = rows[finite].T.unflatten(0, (len(self._names), 2))
        for name, (sums, weights) in zip(self._names, columns, strict=True):
            self._means.setdefault(name, WeightedMean()).update(sums / weights, weights)  # no weight: does not count


# Arguments of the Trainer for what it computes out of logits. `evaluate()` keeps none, and there is one loss.
_NEVER_CALLED = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func")


class _OneLoss:
    """What the three trainers share: one loss for training and evaluation, and averages that know their weights.

    `objective` names the terms of the loss with their coefficients: loss = Σ coefficient · weighted mean of the term.
    """

    objective: dict[str, float]
    loss_is_scaled_for_ga = None  # TRL's DPO says False; ours is scaled where it was given the step's weights

    def __init__(self, *args, **kwargs):
        for name in _NEVER_CALLED:
            if kwargs.get(name) is not None:
                raise InputError(f"{name}: {type(self).__name__} never calls it; leave it out, or override row_terms")
        self.dropped_rows: dict[str, int] = {}  # name of a data set: rows dropped from it
        self._dropped = 0  # from the set that is evaluated
        self._seen = {"train": _Means(), "eval": _Means()}
        super().__init__(*args, **kwargs)
        self._check_router()
        # Several GPUs in one process would split a batch among threads (DataParallel), and no loss sees all its rows.
        self.args._n_gpu = min(1, self.args.n_gpu)
        self._train_batch_size = self.args.train_batch_size
        self.model_accepts_loss_kwargs = True  # the Trainer shall not divide by the number of micro-batches as well

    def _check_router(self) -> None:
        """A mixture of experts may ask for a loss that spreads the tokens over them, in its config alone.

        TRL's DPO takes the config's coefficient if it is given none, and says so in `aux_loss_enabled`.
        """
        config = self.model.config.get_text_config()
        asked = getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0)
        if getattr(self, "aux_loss_enabled", asked):
            raise InputError(
                f"router_aux_loss_coef: {type(self).__name__} computes no router loss of a mixture of experts; set it "
                "to 0.0 in the arguments of DPO, else in the model's config"
            )

    def row_weights(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weight of each term of the loss in each row, `[B]`: known before the model runs."""
        raise NotImplementedError

    def row_terms(self, model, inputs: dict[str, Tensor]) -> dict[str, RowSum]:
        """The terms of the loss and the metrics, by row. The terms in `objective` carry the gradient."""
        raise NotImplementedError

    def train(self, *args, **kwargs):
        self._seen["train"].clear()  # an earlier training may have ended between two log entries
        return super().train(*args, **kwargs)

    def get_batch_samples(self, *args, **kwargs):
        """The micro-batches of a step, and what divides each term of the loss in every one of them.

        That is the term's weight in the whole step; the mean over ranks, since these average their gradients. A mean
        in each micro-batch would weigh a token of a short answer more than one of a long answer.
        """
        batches, _ = super().get_batch_samples(*args, **kwargs)
        if not batches:
            return batches, None
        rows = [self.row_weights(batch) for batch in batches]
        weights = torch.stack([sum(row[name].sum() for row in rows) for name in self.objective]).float()
        return batches, self.accelerator.reduce(weights.to(self.args.device), "mean")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """`num_items_in_batch`: one weight for each term, from `get_batch_samples`; by default the batch's own."""
        terms = self.row_terms(model, inputs)
        self._record(terms)
        weights = [None] * len(self.objective) if num_items_in_batch is None else num_items_in_batch
        objective = zip(self.objective.items(), weights, strict=True)
        loss = sum(coefficient * self._mean(terms[name], weight) for (name, coefficient), weight in objective)
        return (loss, {}) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None

    def evaluate(self, eval_dataset=None, *args, **kwargs):
        """As the trainer it stands on. Rows dropped from a data set that is passed in count in its own metrics only."""
        counts = dict(self.dropped_rows)
        try:
            return super().evaluate(self._prepare_eval(eval_dataset), *args, **kwargs)
        finally:
            self.dropped_rows = counts
            self._take_back_preparation()

    def _take_back_preparation(self) -> None:
        """Let training wrap the model in DDP also when an evaluation came first.

        Evaluating marks the bare model as prepared for accelerate. Training then takes it as it is, and every rank
        trains on its own without a word (transformers 5.24, accelerate 1.15).
        """
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.is_in_train or self.model_wrapped is not self.model or sharded or self.accelerator.num_processes == 1:
            return
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)  # autocast comes back with the next one
        self.model.__dict__.pop("_is_accelerate_prepared", None)
        self.accelerator._models.clear()

    def _prepare_eval(self, eval_dataset):
        return eval_dataset  # TRL's trainers do it in their evaluate()

    def get_eval_dataloader(self, eval_dataset=None):
        return self._every_row(super().get_eval_dataloader, eval_dataset)

    def get_test_dataloader(self, test_dataset):
        return self._every_row(super().get_test_dataloader, test_dataset)

    def _every_row(self, make: Callable, dataset):
        """A data loader of every row: `dataloader_drop_last` is for training, where a row's turn comes again."""
        chosen = self.eval_dataset if dataset is None else dataset
        self._dropped = _dropped_from(self.eval_dataset[chosen] if isinstance(chosen, str) else chosen)
        drop_last, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return make(dataset)
        finally:
            self.args.dataloader_drop_last = drop_last

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        self._seen["eval"].clear()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        means = {**self._means("eval"), "dropped_rows": self._dropped}
        output.metrics.update({f"{metric_key_prefix}_{key}": value for key, value in means.items()})
        return output

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        self._not_found = []
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_renamed_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._not_found = []
        super()._load_best_model()
        self._load_renamed_weights(self.state.best_model_checkpoint)

    def _issue_warnings_after_load(self, load_result) -> None:
        super()._issue_warnings_after_load(load_result)
        self._not_found = load_result.missing_keys

    def _load_renamed_weights(self, folder: str) -> None:
        """Load what the Trainer passes over with no more than a warning when it resumes.

        It saves weights under the names of the model's hub files (GPT-NeoX: `embed_out`), looks for the names in the
        model (`lm_head`) and leaves what it does not find as it is (huggingface/transformers#43701, #48805). The rest
        is in place, each weight in its own type.
        """
        if not self._not_found or self.is_fsdp_enabled or not isinstance(self.model, transformers.PreTrainedModel):
            return
        weights = self.model.state_dict()
        widest = reduce(torch.promote_types, [weights[name].dtype for name in self._not_found])  # rounds none of them
        saved, info = type(self.model).from_pretrained(folder, dtype=widest, output_loading_info=True)
        renamed = set(self._not_found) - set(info["missing_keys"])
        self.model.load_state_dict({n: w for n, w in saved.state_dict().items() if n in renamed}, strict=False)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Beside `loss`, the Trainer's mean over the steps since the last entry, means over the rows of these steps.

        The terms times their coefficients add up to the loss of one step. Over several steps a long one, with more
        tokens, weighs more in the terms and not in `loss`.
        """
        if "loss" in logs and self._seen["train"]:
            logs.update({name: mean for name, mean in self._means("train").items() if name != "loss"})
        super().log(logs, *args, **kwargs)

    def _mean(self, term: RowSum, count: Tensor | None) -> Tensor:
        """Σ sums / count; for None Σ weights of the batch, in training of all ranks (which average gradients).

        Without any weight there is no mean: the value is NaN, the gradient 0.
        """
        if count is None:
            count = term.weights.sum().float()
            if self.model.training and self.accelerator.num_processes > 1:
                count = self.accelerator.reduce(count, "mean")
        total = term.sums.sum()
        return torch.where(count > 0, total / count.clamp(min=1e-12), torch.nan)

    def _record(self, terms: dict[str, RowSum]) -> None:
        columns = [column.detach().float() for term in terms.values() for column in term]
        table = torch.stack(columns, dim=1)  # [B, 2 · terms]
        if self.model.training:
            self._seen["train"].add(terms, self.accelerator.gather(table))
        else:  # without the rows that pad the last batch of some ranks
            self._seen["eval"].add(terms, self.accelerator.gather_for_metrics(table))

    def _means(self, mode: str) -> dict[str, float]:
        """The loss and the means of all rows since the last call; NaN and no other means if there was none."""
        means, excluded = self._seen[mode].take()
        loss = sum(coefficient * means.get(name, math.nan) for name, coefficient in self.objective.items())
        return {"loss": loss, **means, "excluded_rows": excluded}


def _log_probs(model, inputs: dict[str, Tensor]) -> Tensor:
    """Of the completion tokens of a batch, which may hold other columns besides."""
    return completion_log_probs(model, inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"])


def _preference_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, RowSum]:
    """Reward metrics under TRL's names. (NaN > 0 is False, an accuracy of 0; but such a row is left out.)"""
    margins = chosen - rejected
    accuracies = (margins > 0).float()
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    return {n: _per_row(v) for n, v in zip(names, (chosen, rejected, margins, accuracies), strict=True)}


# --- rows that can be trained on ------------------------------------------------------------------------------------


def _has_text(row: dict[str, Any], completions: tuple[str, ...]) -> bool:
    """Whether the row has a prompt (which may be empty) and every completion. Chats are lists, plain text is str."""
    texts = [row[name] for name in completions]
    return row.get("prompt", "") is not None and all(t.strip() if isinstance(t, str) else t for t in texts)


def _predicted_tokens(prompt: int, completion: int, max_length: int | None, mode: str) -> int:
    """How many completion tokens are left after truncation and have a token before them that predicts them."""
    total = prompt + completion
    cut = 0 if max_length is None else max(0, total - max_length)
    first = prompt - cut if mode == "keep_end" else prompt  # where the completion begins in what is kept
    return total - cut - max(first, 1)


def _has_tokens(row: dict[str, Any], completions: tuple[str, ...], max_length: int | None, mode: str) -> bool:
    prompt = len(row["prompt_ids"])
    return all(_predicted_tokens(prompt, len(row[f"{name}_ids"]), max_length, mode) > 0 for name in completions)


def _keep(dataset: Dataset, test: Callable[..., bool], if_none: str, **settings) -> Dataset:
    """The rows that pass the test; without one an InputError with the text `if_none`."""
    kept = dataset.filter(test, fn_kwargs=settings)
    if len(kept) == 0:
        raise InputError(if_none)
    return kept


def _keep_with_text(dataset: Dataset, name: str, completions: tuple[str, ...]) -> Dataset:
    lack = f"has a prompt and text in {', '.join(completions)}; fill these columns"
    return _keep(dataset, _has_text, f"{name} dataset: no row of {len(dataset)} {lack}", completions=completions)


def _keep_with_tokens(dataset: Dataset, name: str, before: int, max_length: int | None, **settings) -> Dataset:
    """`before`: the number of rows that were tokenised. TRL's DPO drops some itself."""
    lack = f"has a completion token within max_length={max_length}; raise max_length or shorten the prompts"
    if_none = f"{name} dataset: no row of {before} with text {lack}"
    return _keep(dataset, _has_tokens, if_none, max_length=max_length, **settings)


class _Kind(NamedTuple):
    """What a column may hold, and None, which drops the row, unless it is needed."""

    fits: Callable[[Any], bool]
    wish: str
    needed: bool = False


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


_TEXT = _Kind(lambda value: isinstance(value, str), "text")
_TEXT_OR_CHAT = _Kind(lambda value: isinstance(value, str) or _is_chat(value), "text or a list of messages")
_NUMBER = _Kind(lambda value: isinstance(value, int | float), "a number, or None where it is missing")
_GROUP = _Kind(lambda value: isinstance(value, int | str) or _is_finite(value), "an int or a str", needed=True)


def _is_prepared(dataset) -> bool:
    return isinstance(dataset, Dataset) and "prompt_ids" in dataset.column_names


def _check_rows(dataset, name: str, columns: dict[str, _Kind]) -> None:
    """Before anything is dropped, so that a message names the row as the user counts it."""
    for column, kind in columns.items():
        for i, value in enumerate(dataset[column]):
            if not kind.fits(value) and (kind.needed or value is not None):
                raise InputError(f"{name} dataset, row {i}: {column} is {reprlib.repr(value)}; give {kind.wish}")


def _check_columns(dataset, name: str, needed: tuple[str, ...]) -> None:
    if not isinstance(dataset, Dataset):
        raise InputError(
            f"{name} dataset: is a {type(dataset).__name__}; give a datasets.Dataset, its rows are counted"
        )
    if len(dataset) == 0:
        raise InputError(f"{name} dataset: has no rows; give it one at least")
    missing = [column for column in needed if column not in dataset.column_names]
    if missing:
        raise InputError(
            f"{name} dataset: no column {missing[0]!r}; it has {', '.join(dataset.column_names)}; "
            f"needed are {', '.join(needed)}"
        )


_DROPPED = "rows_dropped_from_this_set"


def _with_count(dataset: Dataset, dropped: int) -> Dataset:
    """Every row of a prepared set carries it: so it is known whatever the set's name, and of a part of it."""
    return dataset.add_column(_DROPPED, [dropped] * len(dataset))


def _dropped_from(dataset) -> int:
    return int(sum(dataset[:1].get(_DROPPED, ()))) if isinstance(dataset, Dataset) else 0


class _DropsEmptyRows:
    """For TRL's preference trainers: drop rows without a completion token when a dataset is prepared, and count them.

    TRL itself drops over-long prompts in DPO (since 1.9) but not in TPO, where such a row makes eval_loss NaN
    (huggingface/trl#5662).
    """

    completions: tuple[str, ...]

    def __init__(self, *args, train_dataset=None, **kwargs):
        if train_dataset is not None:
            _check_columns(train_dataset, "train", self.completions)  # TRL's DPO reads a row before it prepares any
        super().__init__(*args, train_dataset=train_dataset, **kwargs)

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        _check_columns(dataset, dataset_name, self.completions)
        if _is_prepared(dataset):
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        columns = [column for column in ("prompt", *self.completions) if column in dataset.column_names]
        _check_rows(dataset, dataset_name, dict.fromkeys(columns, _TEXT_OR_CHAT))
        before = len(dataset)
        texts = _keep_with_text(dataset, dataset_name, self.completions)
        dataset = super()._prepare_dataset(texts, processing_class, args, dataset_name)
        how = {"completions": self.completions, "mode": getattr(args, "truncation_mode", "keep_start")}
        dataset = _keep_with_tokens(dataset, dataset_name, len(texts), args.max_length, **how)
        self.dropped_rows[dataset_name] = before - len(dataset)
        return _with_count(dataset, before - len(dataset))


@contextmanager
def _own_forward(*models):
    """TRL replaces `model.forward`. Put back what was there, so that a copy of the model runs its own weights."""
    before = {id(model): model.__dict__.get("forward") for model in models}
    replaced: list[Any] = [*models]
    yield replaced  # models that are made inside are added here
    for model in replaced:
        if before.get(id(model)) is None:
            model.__dict__.pop("forward", None)
        else:
            model.forward = before[id(model)]


# --- the trainers ---------------------------------------------------------------------------------------------------


class TPOTrainer(_OneLoss, _DropsEmptyRows, tpo.TPOTrainer):
    """Triple preference optimization (arXiv 2405.16681) on TRL's experimental trainer.

    Takes what `trl.experimental.tpo.TPOTrainer` takes; columns prompt, chosen, rejected, reference (the gold answer).
    `loss_type` is "sigmoid" or "tpo-l". The loss of a batch is TRL's: mean preference loss over rows plus
    `tpo_alpha` · mean NLL over the tokens of the gold answers. With gradient accumulation the batch is the whole step;
    TRL takes the mean over micro-batches.

    Raises:
        InputError: another `loss_type`, a router loss or a function of logits that is asked for, a missing column, a
            prompt or answer that is no text, or no row with a completion token.
    """

    completions = ("chosen", "rejected", "reference")

    def __init__(self, model, args: TPOConfig | None = None, **kwargs):
        args = args or TPOConfig("tpo-output")
        if args.loss_type not in ("sigmoid", "tpo-l"):
            raise InputError(f"loss_type={args.loss_type!r}: TPOTrainer computes 'sigmoid' and 'tpo-l'")
        self.objective = {"preference_loss": 1.0} | ({"nll": args.tpo_alpha} if args.tpo_alpha else {})
        super().__init__(model, args, **kwargs)

    def row_weights(self, inputs):
        tokens = self._tokens(inputs)
        return {"preference_loss": torch.ones_like(tokens[0]), "nll": tokens[-1]}

    def _tokens(self, inputs) -> tuple[Tensor, ...]:
        """Completion tokens of chosen, rejected and, where the loss has a use for it, gold answer, each `[B]`."""
        return inputs["completion_mask"][:, 1:].sum(1).chunk(3 if "nll" in self.objective else 2)

    def row_terms(self, model, inputs):
        args, tokens = self.args, self._tokens(inputs)
        log_probs = _log_probs(model, inputs).chunk(len(tokens))
        by_length = args.loss_type == "tpo-l"
        chosen, rejected = (
            x.sum(1) / n if by_length else x.sum(1) for x, n in zip(log_probs[:2], tokens, strict=False)
        )
        loss = triple_preference_loss(
            chosen, rejected, 0.0, args.beta, alpha=0.0, gamma=args.tpo_l_gamma if by_length else 0.0,
            label_smoothing=args.label_smoothing,
        )  # fmt: skip
        terms = {"preference_loss": _per_row(loss)}
        if "nll" in self.objective:
            terms["nll"] = RowSum(-log_probs[2].sum(1), tokens[2])
        metrics = _preference_metrics(args.beta * chosen.detach(), args.beta * rejected.detach())
        return {**terms, **metrics, "logps/chosen": _per_row(chosen), "logps/rejected": _per_row(rejected)}


# What TRL's DPO can also do, and the only value that our loss covers.
_DPO_ONLY = {"f_divergence_type": "reverse_kl", "ld_alpha": None, "use_weighting": False, "padding_free": False}


class DPOTrainer(_OneLoss, _DropsEmptyRows, trl.DPOTrainer):
    """Direct preference optimization (arXiv 2305.18290) on TRL's trainer, with an `evaluate()` that is right.

    Takes what `trl.DPOTrainer` takes; columns prompt, chosen, rejected. `loss_type` is "sigmoid" (with
    `label_smoothing`) and, beside it, "sft": the NLL per token of the chosen answer, weighted by `loss_weights`. It
    keeps the model a language model. With gradient accumulation tokens weigh alike in the whole step; TRL takes the
    mean over micro-batches. Without `ref_model` the reference is a copy of the model as it is now.

    Raises:
        InputError: another `loss_type`, an option our loss does not cover (among them the router loss of a mixture of
            experts), a function of logits, a missing column, a prompt or answer that is no text, or no row with a
            completion token.
    """

    completions = ("chosen", "rejected")

    def __init__(self, model, ref_model=None, args: DPOConfig | None = None, **kwargs):
        args = args or DPOConfig("dpo-output")
        self.objective = _dpo_objective(args)
        is_plain = isinstance(model, transformers.PreTrainedModel) and kwargs.get("peft_config") is None
        if ref_model is None and is_plain and not args.precompute_ref_log_probs:
            ref_model = clone(model).eval().requires_grad_(False)
        given = [_base(m) for m in (model, ref_model) if isinstance(m, torch.nn.Module)]
        with _own_forward(*given) as models:
            super().__init__(model, ref_model, args, **kwargs)
            models += [_base(m) for m in (self.model, self.ref_model) if m is not None]

    def row_weights(self, inputs):
        chosen, _ = inputs["completion_mask"][:, 1:].sum(1).chunk(2)
        return {"preference_loss": torch.ones_like(chosen), "nll": chosen}

    def row_terms(self, model, inputs):
        beta = self.args.beta
        chosen, rejected = _log_probs(model, inputs).sum(1).chunk(2)
        ref_chosen, ref_rejected = self._reference(inputs)
        loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, self.args.label_smoothing)
        terms = {"preference_loss": _per_row(loss)}
        if "nll" in self.objective:
            terms["nll"] = RowSum(-chosen, self.row_weights(inputs)["nll"])
        rewards = beta * (chosen - ref_chosen).detach(), beta * (rejected - ref_rejected).detach()
        logps = {"logps/chosen": _per_row(chosen), "logps/rejected": _per_row(rejected)}
        return {**terms, **_preference_metrics(*rewards), **logps}

    def _reference(self, inputs) -> tuple[Tensor, Tensor]:
        if "ref_chosen_logps" in inputs:
            return inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
        return self.compute_ref_log_probs(inputs)

    def compute_ref_log_probs(self, *args):
        """Log-probs of chosen and rejected, each `[B]`, under the reference. Also TRL's entry for precomputing them."""
        own = self.model if self.ref_model is None else self.ref_model  # `or` asks a compiled model for its length
        model, inputs = (own, *args)[-2:]  # older TRL passes the inputs alone
        adapters = _reference_adapter(self.accelerator.unwrap_model(model)) if self.ref_model is None else nullcontext()
        with torch.no_grad(), adapters, self.accelerator.autocast():
            return _log_probs(model, inputs).sum(1).chunk(2)


def _dpo_objective(args: DPOConfig) -> dict[str, float]:
    for name, only in _DPO_ONLY.items():
        if getattr(args, name, only) != only:
            raise InputError(f"{name}={getattr(args, name)!r}: DPOTrainer computes {name}={only!r} alone")
    kinds = [args.loss_type] if isinstance(args.loss_type, str) else args.loss_type or []
    names = {"sigmoid": "preference_loss", "sft": "nll"}
    unknown = [kind for kind in kinds if kind not in names]
    if unknown or "sigmoid" not in kinds:
        raise InputError(f"loss_type={args.loss_type}: DPOTrainer computes 'sigmoid', with or without 'sft'")
    objective = dict.fromkeys((names[kind] for kind in kinds), 0.0)
    for kind, weight in zip(kinds, args.loss_weights or [1.0] * len(kinds), strict=True):
        objective[names[kind]] += weight  # a kind may be named twice
    return objective


def _base(model):
    """The transformers model inside a compiled or PEFT model; another model as it is."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _reference_adapter(model):
    """Within this context a PEFT model is its own reference: the adapter off, or the copy that TRL named "ref"."""
    if not hasattr(model, "peft_config"):
        return nullcontext()
    from trl.trainer.utils import use_adapter

    return use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)


@dataclass
class TokenTPOConfig(transformers.TrainingArguments):
    """Training arguments of `TokenTPOTrainer`."""

    max_length: int | None = field(
        default=512, metadata={"help": "Longest prompt and completion together, in tokens; the end is cut off."}
    )


class TokenTPOTrainer(_OneLoss, transformers.Trainer):
    """Token-level policy optimization: −advantage · log-prob over completion tokens, advantages normalised by group.

    What some articles call TPO; unlike triple preference optimization it scores single completions. Offline, on fixed
    samples, a negative advantage is a loss without a lower bound: few steps, a small learning rate, and an eye on the
    log-probs of good answers.

    Args:
        args: `TokenTPOConfig`, or any `TrainingArguments`.
        train_dataset, eval_dataset: columns prompt, completion (text), reward (float; None, NaN and inf are
            missing) and group (int or str). Groups are normalised over the dataset, so a batch need not hold whole
            groups. Rows without a reward or without a completion token are dropped and counted.
        processing_class: the tokenizer.

    Raises:
        InputError: no tokenizer or one without eos, a router loss or a function of logits that is asked for, a data
            set that is no datasets.Dataset, a missing column, a value that is none of the above, or no row to train on.
    """

    objective = {"policy_loss": 1.0}  # noqa: RUF012  (never changed)

    def __init__(self, model, args=None, train_dataset=None, eval_dataset=None, processing_class=None, **kwargs):
        args = args or TokenTPOConfig("token-tpo-output")
        if processing_class is None:
            raise InputError("processing_class is missing: give TokenTPOTrainer the model's tokenizer")
        if processing_class.eos_token_id is None:
            raise InputError("processing_class has no eos_token: set it to the token that shall end every completion")
        super().__init__(
            model, args, data_collator=_TokenPolicyCollator(processing_class.pad_token_id or 0),
            train_dataset=train_dataset, eval_dataset=eval_dataset, processing_class=processing_class, **kwargs,
        )  # fmt: skip
        self.train_dataset = self._prepare("train", train_dataset)
        self.eval_dataset = self._prepare_eval(eval_dataset)

    def row_weights(self, inputs):
        return {"policy_loss": inputs["completion_mask"][:, 1:].sum(1)}

    def row_terms(self, model, inputs):
        log_probs = _log_probs(model, inputs)
        mask = inputs["completion_mask"][:, 1:]
        loss = token_policy_loss(log_probs, inputs["advantages"], mask)
        advantages = _per_row(inputs["advantages"])
        return {"policy_loss": RowSum(*loss), "logps": RowSum(log_probs.sum(1), mask.sum(1)), "advantages": advantages}

    def _prepare_eval(self, dataset):
        if isinstance(dataset, str):
            return dataset  # the name of one that was given to the trainer
        if isinstance(dataset, dict):
            return {name: self._prepare(name, part) for name, part in dataset.items()}
        return self._prepare("eval", dataset)

    def _prepare(self, name: str, dataset: Dataset | None) -> Dataset | None:
        if dataset is None or _is_prepared(dataset):
            return dataset
        _check_columns(dataset, name, tuple(_SCORED))
        _check_rows(dataset, name, _SCORED)
        before, max_length = len(dataset), getattr(self.args, "max_length", 512)
        dataset = _keep_with_text(dataset, name, ("completion",))
        lack = "has a finite reward; fill the column reward"
        dataset = _keep(dataset, _has_reward, f"{name} dataset: no row of {len(dataset)} with text {lack}")
        dataset = dataset.map(_tokenize, fn_kwargs={"tokenizer": self.processing_class})
        how = {"completions": ("completion",), "mode": "keep_start"}
        dataset = _keep_with_tokens(dataset, name, len(dataset), max_length, **how)
        self.dropped_rows[name] = before - len(dataset)
        ids = {group: i for i, group in enumerate(dict.fromkeys(dataset["group"]))}
        rewards = torch.tensor(dataset["reward"], dtype=torch.float64)
        advantages = group_advantages(rewards, torch.tensor([ids[group] for group in dataset["group"]])).values
        columns = {"prompt_ids", "completion_ids"}
        dataset = dataset.remove_columns([c for c in dataset.column_names if c not in columns])
        dataset = dataset.map(_truncate, fn_kwargs={"max_length": max_length})
        return _with_count(dataset.add_column("advantages", advantages.tolist()), self.dropped_rows[name])

    def _set_signature_columns_if_needed(self):
        self._signature_columns = ["prompt_ids", "completion_ids", "advantages"]


_SCORED = {"prompt": _TEXT, "completion": _TEXT, "reward": _NUMBER, "group": _GROUP}


def _has_reward(row: dict[str, Any]) -> bool:
    return _is_finite(row["reward"])


def _tokenize(row: dict[str, Any], tokenizer) -> dict[str, list[int]]:
    completion = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    return {
        "prompt_ids": tokenizer(row["prompt"])["input_ids"],
        "completion_ids": [*completion, tokenizer.eos_token_id],
    }


def _truncate(row: dict[str, Any], max_length: int | None) -> dict[str, list[int]]:
    room = None if max_length is None else max_length - len(row["prompt_ids"])
    return {"completion_ids": row["completion_ids"][:room]}


@dataclass
class _TokenPolicyCollator:
    pad_token_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        prompts, completions = ([row[name] for row in rows] for name in ("prompt_ids", "completion_ids"))
        advantages = torch.tensor([row["advantages"] for row in rows], dtype=torch.float32)
        return {**completion_batch(prompts, completions, self.pad_token_id), "advantages": advantages}
