"""What lies between the batches of a trainer, and what a batch changes for the next one: callbacks, clipping, momentum
encoders, codebooks, groups that are added later; rows and masks that must not be confused."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from marks import lines_of, verdict
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from nanlab import locate

line = lines_of(__file__)
NAN, INF = math.nan, math.inf
DATA = [{"x": i, "labels": i % 3} for i in range(8)]  # row i is token i; tokens 8 to 15 are never used


class Net(nn.Module):
    def __init__(self, zero_row: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(16, 4), nn.Linear(4, 3)
        if zero_row is not None:
            self.emb.weight.data[zero_row] = 0

    def forward(self, x, labels=None, w=None):
        logits = self.head(self.emb(x))
        loss = F.cross_entropy(logits, labels, reduction="none")
        return {"loss": (loss if w is None else loss * w).mean(), "logits": logits}


class InOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.fixture
def make(tmp_path):
    def build(kind=InOrder, model=None, rows=DATA, batch=2, steps=4, callbacks=(), **more):
        args = TrainingArguments(
            str(tmp_path), max_steps=steps, per_device_train_batch_size=batch, per_device_eval_batch_size=2,
            report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", **more,
        )  # fmt: skip
        data = Dataset.from_list(rows)
        return kind(model or Net(), args, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))

    return build


# -- what a batch changes ---------------------------------------------------------------------------------------------
def test_a_momentum_encoder_is_put_back_before_its_batch_runs_again(make):
    class Momentum(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            with torch.no_grad():
                self.key.weight.mul_(0.5)  # 0.5, 0.25, 0.125
            return model(**inputs)["loss"] / (self.key.weight[0, 0] - 0.125)  # the third time

    trainer = make(Momentum)
    trainer.key = nn.Linear(1, 1)
    trainer.key.weight.data.fill_(1.0)
    report = locate(trainer)
    assert (*verdict(report), report.batch) == ("division_by_zero", "forward", line("the third time"), 2), str(report)
    assert trainer.key.weight.item() == 1.0


def test_a_buffer_that_becomes_nan_at_the_end_of_a_batch_is_that_batchs_fault(make):
    class Codebook(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("book", torch.randn(6, 3))
            self.register_buffer("uses", torch.full((6,), 3.0))

        def forward(self, x, labels=None):
            out = super().forward(x, labels)
            nearest = self.book[torch.cdist(out["logits"], self.book).argmin(1)]
            self.uses[5] -= 1.5
            self.book[5] *= self.uses[5]
            self.book.div_(self.uses[:, None])  # code five dies
            return {"loss": (out["logits"] - nearest.detach()).pow(2).mean()}

    report = locate(make(model=Codebook()))
    assert (report.found, report.batch, report.source) == (True, 1, line("code five dies")), str(report)
    assert report.story[-1] == "It surfaced in buffer book."


clips_itself = pytest.mark.skipif(
    not hasattr(Trainer, "_clip_grad_norm"), reason="this transformers clips inside its training loop"
)


# -- between the batches ----------------------------------------------------------------------------------------------
EVENTS = {"on_train_begin": 1, "on_epoch_begin": 1, "on_step_begin": 1, "on_substep_end": 9, "on_step_end": 9}


@pytest.mark.parametrize("event", [*EVENTS, "on_epoch_end"])
def test_a_callback_that_spoils_a_weight_has_its_line(make, event):
    def unit(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            model.emb.weight.div_(model.emb.weight.norm(dim=1, keepdim=True))  # unit rows

    callback = type("Unit", (TrainerCallback,), {event: unit})()
    trainer = make(model=Net(EVENTS.get(event, 9)), callbacks=[callback], gradient_accumulation_steps=2)
    report = locate(trainer)
    assert (report.cause, report.source) == ("zero_over_zero", line("unit rows")), str(report)


def test_weights_that_a_callback_makes_inf_are_no_mask(make):
    class Rescale(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                with torch.no_grad():
                    model.head.weight.mul_(INF)  # the scale is inf

    report = locate(make(callbacks=[Rescale()]))
    assert (report.found, report.kind, report.batch) == (True, "inf", 1), str(report)
    assert report.source == line("the scale is inf")


@pytest.mark.parametrize("first", [0, 2])
def test_gradients_that_a_callback_divides_by_a_counter_of_0(make, first):
    class Scale(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for p in model.parameters():
                p.grad /= state.global_step - first  # the counter

    report = locate(make(model=Net(9), callbacks=[Scale()]))
    assert verdict(report) == ("zero_over_zero", "optimizer", line("the counter")), str(report)
    assert (report.batch, report.rows) == (first, [])


@clips_itself
@pytest.mark.parametrize("start", [0, 2])
def test_clipping_of_ones_own_has_its_line(make, start):
    class Own(InOrder):
        def _clip_grad_norm(self, model):
            for p in model.parameters():
                if p.grad is not None and self.state.global_step >= start:
                    p.grad.div_(p.grad.norm())  # a gradient of zero
            return torch.tensor(1.0)

        def compute_loss(self, model, inputs, **kwargs):
            return F.cross_entropy(model.head(0 * model.emb(inputs["x"]) + 1), inputs["labels"])

    report = locate(make(Own))
    assert (report.cause, report.source) == ("zero_over_zero", line("a gradient of zero")), str(report)


@clips_itself
def test_a_norm_that_overflows_is_not_told_as_a_gradient_left_over(make):
    class Steep(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            return sum(p.float().sum() for p in model.parameters()) * 40000  # in float16, and 40000² is not

    report = locate(make(Steep, Net().half(), optim="sgd", max_grad_norm=0.0))
    assert report.found
    assert "left over" not in str(report)
    assert report.library.startswith("accelerate/accelerator.py")


def test_a_weight_that_joins_the_optimizer_later_and_was_bad_is_state(make):
    class Unfreeze(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            if state.global_step == 1:
                model.emb.weight.requires_grad_(True)
                optimizer.optimizer.add_param_group({"params": [model.emb.weight]})

    model = Net()
    model.emb.weight.data[9] = NAN
    model.emb.weight.requires_grad_(False)
    trainer = make(model=model, callbacks=[Unfreeze()])
    trainer.optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, 1.0)
    report = locate(trainer)
    assert (report.cause, report.op) == ("bad_state", "parameter emb.weight"), str(report)


# -- what must not be confused ----------------------------------------------------------------------------------------
def test_a_perplexity_of_inf_in_the_log_has_made_no_mask(make):
    class Pool(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            out = model(**inputs)
            self.perplexity = (out["loss"] * 200).exp().item()
            scores = out["logits"].masked_fill((inputs["x"] == 4)[:, None], -INF)
            return (scores.softmax(-1) * out["logits"]).sum(-1).mean()  # row four is masked

    report = locate(make(Pool))
    assert (report.cause, report.batch, report.rows) == ("masked_row", 2, [0]), str(report)
    assert report.source == line("row four is masked")


def test_a_nan_in_the_log_of_a_callback_has_made_no_weights(make):
    class Log(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            self.seen = float(torch.tensor([]).mean())

    class Weighted(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs, w=torch.tensor([NAN if i == 4 else 1.0 for i in inputs["x"]]))["loss"]

    report = locate(make(Weighted, callbacks=[Log()]))
    assert (report.cause, report.batch, report.rows) == ("bad_input", 2, [0]), str(report)


def test_a_setting_of_zero_is_no_count(make):
    class Controlled(InOrder):
        target_kl = 0.0

        def compute_loss(self, model, inputs, **kwargs):
            out = model(**inputs)
            kl = (out["logits"].detach() - out["logits"].detach()).mean()
            return out["loss"] * (kl / self.target_kl)  # by a setting

    assert verdict(locate(make(Controlled))) == ("zero_over_zero", "forward", line("by a setting"))


def test_a_batch_of_a_nan_is_not_one_of_a_zero(make):
    rows = [row | {"w": {3: NAN, 4: 0.0}.get(i, 1.0), "x": 0, "labels": 0} for i, row in enumerate(DATA)]
    report = locate(make(rows=rows, batch=1, remove_unused_columns=False))
    assert (report.cause, report.batch, report.examples) == ("bad_input", 3, [3]), str(report)


def test_class_weights_as_many_as_rows_are_no_rows(make):
    weights = torch.tensor([NAN, 1.0])

    class Binary(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            return F.cross_entropy(model(**inputs)["logits"][:, :2], (inputs["x"] > 3).long(), weight=weights)

    report = locate(make(Binary))
    assert (report.op, report.examples, report.texts) == ("weights", [], {}), str(report)


def test_an_evaluation_whose_loss_is_minus_inf_has_a_batch(make):
    class Hardest(InOrder):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            out = model(**inputs)
            scores = out["logits"][:, 0]
            negative = scores.masked_fill(inputs["labels"] < 3, -INF).max()  # none is left
            loss = negative - scores.mean()
            return (loss, {"loss": loss, "logits": out["logits"]}) if return_outputs else loss

    report = locate(make(Hardest), mode="eval")
    assert (report.found, report.kind, report.batch) == (True, "inf", 0), str(report)


def test_a_nan_that_marks_a_gap_in_an_evaluation_is_no_finding(make):
    class Gaps(InOrder):
        gap = torch.tensor(NAN)

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            out = model(**inputs)
            scores = torch.where(inputs["x"] != 4, out["logits"][:, 0], self.gap)
            return (out["loss"], {"loss": out["loss"], "scores": scores}) if return_outputs else out["loss"]

    trainer = make(Gaps)
    trainer.compute_metrics = lambda p: {"score": float(np.nanmean(p.predictions))}
    report = locate(trainer, mode="eval")
    assert not report.found, str(report)


def test_labels_of_a_class_that_are_all_masked_have_rows(make):
    class Classes(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            return F.cross_entropy(model(inputs["x"], inputs["labels"].clamp(min=0))["logits"], inputs["labels"])

    rows = [{"x": i, "labels": -100 if i in (2, 3) else i % 3} for i in range(8)]
    report = locate(make(Classes, rows=rows))
    assert (report.cause, report.batch, report.rows, report.examples) == ("empty_mean", 1, [0, 1], [2, 3]), str(report)


def test_a_bad_number_in_a_nested_input_has_a_row_of_the_dataset(make):
    class Pairs(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            return (model.emb(inputs["x"]).sum(-1) * inputs["rejected"]["w"]).mean()

    def collate(rows):
        weights = torch.tensor([NAN if row["x"] == 3 else 1.0 for row in rows])
        return {"x": torch.tensor([row["x"] for row in rows]), "rejected": {"w": weights}}

    trainer = make(Pairs, remove_unused_columns=False)
    trainer.data_collator = collate
    report = locate(trainer)
    assert (report.cause, report.batch, report.rows, report.examples) == ("bad_input", 1, [1], [3]), str(report)
    assert report.op == "batch rejected['w']"


# -- what a healthy batch leaves behind, and what raises between the batches -------------------------------------------
def test_what_a_batch_leaves_on_the_trainer_for_the_next_is_made_there(make):
    class Queue(InOrder):
        queue = None

        def compute_loss(self, model, inputs, **kwargs):
            out = model(**inputs)
            extra = 0 if self.queue is None else (out["logits"] @ self.queue.T).mean()
            key = out["logits"].detach() * (inputs["x"] != 5)[:, None]
            self.queue = key / key.norm(dim=1, keepdim=True)  # left on the trainer
            return out["loss"] + extra

    report = locate(make(Queue))
    assert verdict(report) == ("zero_over_zero", "forward", line("left on the trainer")), str(report)


def test_what_a_trainer_keeps_by_pairs_is_told_apart(make):
    class Cached(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            loss = model(**inputs)["loss"] + self.kept["used", 1]
            if 3 in inputs["x"].tolist():
                self.kept["used", 1] = torch.tensor(0.0) / torch.tensor(0.0)  # one of a pair
            return loss

    trainer = make(Cached)
    trainer.kept = {("never used", 1): torch.tensor(NAN), ("used", 1): torch.tensor(0.0)}
    report = locate(trainer)
    assert verdict(report) == ("zero_over_zero", "forward", line("one of a pair")), str(report)


def test_a_mask_that_a_batch_leaves_on_the_trainer_is_no_finding(make):
    class Masked(InOrder):
        mask = None

        def compute_loss(self, model, inputs, **kwargs):
            out = model(**inputs)
            if self.mask is None:
                self.mask = torch.tensor([0.0, 0.0, -INF])
            return -(out["logits"] + self.mask).log_softmax(-1)[:, 0].mean()

    report = locate(make(Masked))
    assert not report.found, str(report)
    assert "failed" not in report.explanation


def test_a_callback_that_raises_at_a_nan_gets_the_place_where_it_was_made(make):
    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                model.head.weight.div_(model.head.weight * 0)  # before it raises
            if not all(p.isfinite().all() for p in model.parameters()):
                raise RuntimeError("a weight is not finite")

    report = locate(make(callbacks=[Spoil()]))
    assert (report.source, report.batch) == (line("before it raises"), None), str(report)
    assert report.found
    assert isinstance(report.exception, RuntimeError)


def test_a_sampler_that_refuses_its_weights_gets_the_place_where_they_were_made(make):
    class Weighted(InOrder):
        def _get_train_sampler(self, *args, **kwargs):
            weights = 1 / torch.tensor([2.0, 0.0])  # one over the frequency
            return torch.utils.data.WeightedRandomSampler(weights, 8)

    report = locate(make(Weighted))
    assert (report.cause, report.source, report.batch) == ("division_by_zero", line("one over the frequency"), None)


def test_numbers_that_a_collator_hands_on_through_python_are_made_where_they_were_made(make):
    class Weighted(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs)["loss"]

    def collate(rows):
        count = torch.tensor([0.0 if row["x"] == 5 else 1.0 for row in rows])
        weights = count / count  # through Python
        batch = {k: torch.tensor([row[k] for row in rows]) for k in ("x", "labels")}
        return {**batch, "w": torch.tensor([one.item() for one in weights])}

    trainer = make(Weighted, remove_unused_columns=False)
    trainer.data_collator = collate
    report = locate(trainer)
    assert verdict(report) == ("zero_over_zero", "forward", line("through Python")), str(report)
    assert report.examples == [5]


def test_a_number_for_the_whole_batch_says_of_which_rows_it_is_made(make):
    class Whole(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs)["loss"] / (inputs["x"] - 4).abs().sum().sub(1)  # zero for the third batch

    report = locate(make(Whole))
    assert (report.cause, report.batch) == ("division_by_zero", 2), str(report)
    assert "The batch is made of rows 4, 5 of the dataset." in report.explanation


def test_a_function_that_one_has_written_is_in_its_own_module(make):
    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.clamp(min=0) / x.clamp(min=0)  # of its own

    class Act(nn.Module):
        def forward(self, x):
            return Clip.apply(x)

    model = Net()
    model.head = nn.Sequential(Act(), nn.Linear(4, 3))
    report = locate(make(model=model))
    assert (report.source, report.module, report.phase) == (line("of its own"), "head.0", "backward"), str(report)


def test_a_model_that_is_made_when_training_begins_is_not_told_as_an_update(make):
    class Late(InOrder):
        def train(self, *args, **kwargs):
            with torch.no_grad():
                self.model.emb.weight.div_(self.model.emb.weight.norm(dim=1, keepdim=True))  # before any backward
            return super().train(*args, **kwargs)

    report = locate(make(Late, model=Net(zero_row=0)))
    assert verdict(report) == ("zero_over_zero", "forward", line("before any backward")), str(report)


def test_the_reference_that_trl_updates_itself_is_watched(tmp_path):
    pytest.importorskip("trl.experimental.bema_for_ref_model", reason="this trl has no such callback")
    from trl import DPOConfig
    from trl.experimental.bema_for_ref_model import BEMACallback, DPOTrainer

    from nanlab.course import load_model, load_preferences

    model, tokenizer = load_model("tiny")
    args = DPOConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    often = {"update_freq": 1, "ref_model_update_freq": 1, "update_ref_model": True}
    update = BEMACallback(**often, bias_power=-60.0)  # 10^60
    rows = load_preferences()["train"].select(range(4))
    trainer = DPOTrainer(
        model, load_model("tiny")[0], args, train_dataset=rows, processing_class=tokenizer, callbacks=[update]
    )
    report = locate(trainer)
    assert report.found
    assert "ref_model" in report.story[-1], str(report)
    update.bias_power = 0.2
    assert not locate(trainer).found
    assert not list(tmp_path.iterdir())  # that callback saves a model when training ends


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_metric_of_trl_that_is_not_finite_is_named(tmp_path, mode):
    from trl import DPOConfig, DPOTrainer

    from nanlab.course import load_model, load_preferences

    class Measured(DPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            hard = inputs["input_ids"].sum() < 0
            self._metrics["train" if model.training else "eval"]["share"].append((hard / hard).item())
            return super().compute_loss(model, inputs, *args, **kwargs)

    model, tokenizer = load_model("tiny")
    args = DPOConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    rows = load_preferences()["train"].select(range(4))
    trainer = Measured(
        model, load_model("tiny")[0], args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer
    )
    report = locate(trainer, mode=mode)
    assert not report.found
    assert report.explanation.startswith("Not finite, although no batch was to blame: share."), str(report)


def test_a_batch_of_prompts_has_rows_of_the_dataset(make):
    class Prompts(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            x = torch.tensor([len(row["prompt"]) for row in inputs])
            return model(x, labels=x % 3)["loss"] / (x != 5).sum()  # no prompt is left

    trainer = make(Prompts, remove_unused_columns=False, steps=8)
    trainer.train_dataset = [{"prompt": "a" * (n // 2 - 1) + "\ud83d"} for n in range(2, 18)]  # half an emoji
    trainer.data_collator = list
    report = locate(trainer)
    assert (report.source, report.batch, report.examples) == (line("no prompt is left"), 4, []), str(report)
    assert "The batch is made of rows 8, 9 of the dataset." in report.explanation


def test_what_a_trainer_keeps_may_be_stored_in_a_way_that_torch_does_not_know(make):
    trainer = make()
    trainer.kept = {"reversed": np.arange(3.0)[::-1], "big": np.arange(3.0).astype(">f8"), "long": np.longdouble([1.0])}
    assert not locate(trainer).found


@pytest.mark.parametrize("look", [torch.Tensor.sum, torch.argmax, lambda best: best.isnan().any()])
@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end"])
def test_a_callback_that_raises_for_its_own_reason_after_it_has_looked_at_a_sentinel(make, event, look):
    best = torch.tensor([1.0, NAN])

    def read(self, args, state, control, **kwargs):
        if look(best).item() is not None:
            raise OSError("disk full on /mnt/nano")

    report = locate(make(callbacks=[type("Reads", (TrainerCallback,), {event: read})()]))
    assert not report.found, str(report)
    assert isinstance(report.exception, OSError)


def test_a_batch_that_raises_for_its_own_reason_after_a_callback_has_asked_about_a_sentinel(make):
    class Raises(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            if 5 in inputs["x"].tolist():
                raise OSError("disk full")
            return model(**inputs)["loss"]

    class Asks(TrainerCallback):
        best = torch.tensor([1.0, NAN])

        def on_step_end(self, args, state, control, **kwargs):
            self.known = not self.best.isnan().any()

    report = locate(make(Raises, callbacks=[Asks()]))
    assert (report.found, report.batch) == (False, 2), str(report)


@pytest.mark.parametrize("row", [0, 5])
def test_a_batch_that_raises_after_a_look_at_its_loss_is_that_batchs_fault(make, row):
    class Strict(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            loss = model(**inputs)["loss"]
            if not loss.isfinite():
                raise ValueError("stop here")
            return loss

    rows = [{**one, "w": NAN if one["x"] == row else 1.0} for one in DATA]
    report = locate(make(Strict, rows=rows, remove_unused_columns=False))
    assert (report.op, report.batch, report.examples) == ("batch w", row // 2, [row]), str(report)


# -- what is made of bad numbers outside of the batches, and what hides them -------------------------------------------
class Perplexity(InOrder):
    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        return metrics | {"eval_ppl": torch.tensor(1000 * metrics["eval_loss"]).exp().item()}  # of evaluate()


class Ratio(TrainerCallback):
    def on_evaluate(self, *args, metrics=None, **kwargs):
        none = torch.zeros(2)
        metrics["eval_ratio"] = (none / none).mean().item()  # of a callback


@pytest.mark.parametrize(
    ("options", "cause", "where"),
    [
        ({"kind": Perplexity}, "overflow", "of evaluate()"),
        ({"callbacks": [Ratio()]}, "zero_over_zero", "of a callback"),
    ],
    ids=["evaluate", "callback"],
)
def test_a_metric_that_is_added_to_those_of_an_evaluation_has_its_line(make, options, cause, where):
    report = locate(make(**options), mode="eval")
    assert verdict(report) == (cause, "forward", line(where)), str(report)
    assert report.story[-1].startswith("It surfaced in the metric eval_")


def test_labels_that_are_missing_are_not_behind_a_nan_of_numpy(make):
    class Gaps(InOrder):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            scores, known = model(inputs["x"], inputs["x"] % 3)["logits"], ~inputs["labels"].isnan()
            loss = F.mse_loss(scores[known], inputs["labels"][known])
            return (loss, {"loss": loss, "logits": scores}) if return_outputs else loss

    trainer = make(Gaps, rows=[{"x": i, "labels": [1.0, NAN, 2.0]} for i in range(8)])
    trainer.compute_metrics = lambda p: {"pearson": float(np.mean(p.predictions) * NAN)}
    report = locate(trainer, mode="eval")
    assert not report.found, str(report)
    assert "no batch was to blame: eval_pearson." in report.explanation


@pytest.mark.parametrize("bound", [torch.nan_to_num, lambda t: t.clamp(-3e38, 3e38)], ids=["nan_to_num", "clamp"])
def test_an_inf_that_became_the_largest_number_is_told_where_that_overflows(make, bound):
    class Bounded(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            out = model(**inputs)
            scores = bound(out["logits"] / (inputs["x"] - 5)[:, None])  # one is 0
            return out["loss"] + scores.mul(2).square().mean()

    report = locate(make(Bounded))
    assert (*verdict(report), report.examples) == ("division_by_zero", "forward", line("one is 0"), [5]), str(report)
    assert "mul made inf" in str(report.story)


def test_an_overflow_is_its_own_beside_an_inf_that_was_made_small(make):
    class Bounded(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            out = model(**inputs)
            weights = (1 / (inputs["x"] - 5)).clamp(-10, 10)
            large = (inputs["x"] - 4).relu().mul(1e35)
            return (out["loss"] * weights).mean() + large.mul(1e5).mean()  # too large

    report = locate(make(Bounded))
    assert (*verdict(report), report.batch) == ("overflow", "forward", line("too large"), 2), str(report)


def test_a_bad_weight_is_no_fault_of_a_row_that_has_a_nan_of_its_own(make):
    """Row 1 of the weight is bad, and so is row 1 of a field of the batch that nobody uses."""

    class Spare(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            return model.head(model.emb(inputs["x"])).square().mean()

    model, rows = Net(), [{"x": i, "w": NAN if i % 3 == 1 else 1.0} for i in range(9)]
    model.head.weight.data[1, 0] = NAN
    report = locate(make(Spare, model=model, rows=rows, batch=3))
    assert (report.cause, report.rows, report.length) == ("bad_state", [1], 3), str(report)
    assert report.examples == []


def test_a_learning_rate_that_the_schedule_has_divided_by_0_has_its_line(make):
    class Noam(InOrder):
        def create_scheduler(self, num_training_steps, optimizer=None):
            factor = lambda step: torch.tensor(float(step)).rsqrt().item()  # the step is 0
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    report = locate(make(Noam, optim="sgd"))
    assert verdict(report) == ("division_by_zero", "forward", line("the step is 0")), str(report)
    assert report.story[1].startswith("lr of the optimizer was already inf")


def test_labels_that_a_collator_makes_nan_with_numpy_have_rows_of_the_dataset(make):
    class Regression(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            return F.mse_loss(model.head(model.emb(inputs["x"]))[:, 0], inputs["y"])

    def collate(rows):
        y = np.float32([0 if row["x"] in (4, 5) else row["x"] for row in rows])
        with np.errstate(invalid="ignore"):
            y = (y - y.mean()) / y.std()
        return {"x": torch.tensor([row["x"] for row in rows]), "y": torch.tensor(y)}  # through NumPy

    trainer = make(Regression, remove_unused_columns=False)
    trainer.data_collator = collate
    report = locate(trainer)
    assert verdict(report) == ("bad_input", "data", line("through NumPy")), str(report)
    assert (report.batch, report.rows, report.examples) == (2, [0, 1], [4, 5])


def test_a_transcript_that_does_not_fit_its_frames_is_told_so(make):
    class Speech(InOrder):
        def compute_loss(self, model, inputs, **kwargs):
            scores = model.head(model.emb(inputs["x"])).log_softmax(-1)[None].expand(4, -1, -1)
            lengths = torch.where(inputs["x"] == 5, 3, 1)
            return F.ctc_loss(scores, torch.ones(2, 3, dtype=torch.long), torch.full((2,), 4), lengths)  # 1 1 1

    report = locate(make(Speech))
    assert (*verdict(report), report.examples) == ("log_of_zero", "forward", line("1 1 1"), [5]), str(report)
    assert "more frames than there are" in report.explanation


def test_a_callback_may_read_what_was_logged_and_no_log_reaches_it(make):
    class Reads(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = control.should_evaluate = True
            if state.global_step > 1:
                assert state.log_history[-1]["loss"] > 0
                assert state.log_history[-1]["step"] == state.global_step - 1
                assert 0 < state.log_history[-1]["epoch"] < state.epoch
                assert state.log_history[-1]["num_input_tokens_seen"] >= 0

        def on_log(self, *args, **kwargs):
            raise AssertionError("it would write a file")

        on_save = on_evaluate = on_log

    trainer = make(callbacks=[Reads()], logging_strategy="steps", logging_steps=1)
    trainer.args.include_num_input_tokens_seen, trainer.model.main_input_name = "all", "x"
    trainer.args.metric_for_best_model = "loss"
    assert not (report := locate(trainer)).found
    assert report.exception is None, str(report)
    assert trainer.state.log_history == []
