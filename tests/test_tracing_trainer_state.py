"""locate(trainer) puts back whatever can be reached from the trainer, bit for bit, and leaves nothing on disk."""

import copy
import functools
import random
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import test_tracing_trainer as one  # the same model, rows and comparisons
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback

from nanlab import locate, watch
from nanlab.tracing.undo import freeze, global_state

NAN = float("nan")


# -- the walk --------------------------------------------------------------------------------------------------------
class Slotted:
    __slots__ = ("count", "later")

    def __init__(self):
        self.count = 1


class Counter:
    def __init__(self):
        self.count = 1

    def up(self):
        self.count += 1
        return self.count


def closure():
    count = 0

    def up():
        nonlocal count
        count += 1
        return count

    return up


def parameter():
    p = nn.Parameter(torch.tensor([1.0, NAN, -0.0]))
    p.grad = torch.tensor([1.0, 2.0, 3.0])
    return p


def change_parameter(p):
    p.grad = None
    p.data = torch.zeros(2, dtype=torch.float16)
    if p.requires_grad:
        p.register_hook(print)
        p.requires_grad_(False)


def module():
    layer = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    layer[0].temperature = 2.0
    return layer


def change_module(m):
    m[0].running_mean = m[0].running_mean + 1  # another tensor, as EMA codebooks and rotary embeddings do
    m[0].temperature *= 0.5
    m[1].register_forward_hook(print)
    m.eval()
    m.extra = nn.Linear(1, 1)


def draw(generator):
    return generator.random() if hasattr(generator, "random") else float(torch.rand((), generator=generator))


def look_at_module(m):
    state = {k: v.tolist() for k, v in m.state_dict().items()}
    return state, m[0].temperature, len(m[1]._forward_hooks), [k.training for k in m.modules()], sorted(m._modules)


KINDS = {  # what it is: (make it, change it, what it looks like)
    "tensor": (
        lambda: torch.tensor([1.0, -0.0]),
        lambda t: t.abs_().add_(1),
        lambda t: (t.tolist(), t.signbit().tolist()),
    ),
    "expanded tensor": (lambda: torch.zeros(1).expand(3), lambda t: t[:1].add_(1), lambda t: t.tolist()),
    "resized tensor": (lambda: torch.zeros(3), lambda t: t.resize_(5).fill_(1), lambda t: t.tolist()),
    "parameter": (
        parameter,
        change_parameter,
        lambda p: (str(p.data), p.dtype, p.requires_grad, str(p.grad), bool(p._backward_hooks)),
    ),
    "array": (lambda: np.ones(3), lambda a: a.__iadd__(1), lambda a: a.tolist()),
    "read-only array": (lambda: np.broadcast_to(np.ones(1), 3), lambda a: None, lambda a: a.tolist()),
    "list": (lambda: [1, [2]], lambda x: (x[1].append(3), x.append(4)), copy.deepcopy),
    "dict, in its order": (lambda: {"a": 1, "b": {}}, lambda d: (d["b"].update(c=1), d.update(a=d.pop("a"))), str),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda d: d.move_to_end("a"), str),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda d: d.append(3), str),
    "set": (lambda: {1, 2}, lambda s: s.add(3), set),
    "tuple of lists": (lambda: ([1],), lambda t: t[0].clear(), str),
    "object": (Counter, Counter.up, lambda c: dict(vars(c))),
    "object with slots": (
        Slotted,
        lambda s: (setattr(s, "count", 2), setattr(s, "later", 3)),
        lambda s: (s.count, hasattr(s, "later")),
    ),
    "object of a bound method": (lambda: Counter().up, lambda f: f(), lambda f: f.__self__.count),
    "closure": (closure, lambda f: f(), lambda f: f.__closure__[0].cell_contents),
    "argument of a partial": (lambda: functools.partial(max, [1]), lambda f: f.args[0].append(2), lambda f: f()),
    "module": (module, change_module, look_at_module),
    "random": (lambda: random.Random(1), draw, lambda g: draw(copy.copy(g))),
    "numpy, old": (lambda: np.random.RandomState(1), draw, lambda g: draw(copy.deepcopy(g))),
    "numpy, new": (lambda: np.random.default_rng(1), draw, lambda g: draw(copy.deepcopy(g))),
    "torch": (lambda: torch.Generator().manual_seed(1), draw, lambda g: g.get_state().tolist()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_object_holds_is_put_back(kind):
    make, change, look = KINDS[kind]
    value = make()
    holder = SimpleNamespace(held=value)
    before, undo = look(value), freeze([holder])
    change(value)
    holder.held, holder.more = None, 1
    assert kind == "read-only array" or look(value) != before
    undo()
    assert (holder.held is value, hasattr(holder, "more")) == (True, False)
    assert look(value) == before
    change(value)
    undo()  # as often as one likes
    assert look(value) == before


def test_the_global_generators_are_put_back():
    draws = lambda: (random.random(), np.random.rand(), float(torch.rand(())))
    undo = freeze(global_state())
    first = draws()
    undo()
    assert draws() == first


def test_loops_and_depth_are_no_trouble():
    chain = bottom = []
    for _ in range(5000):
        chain = [chain]
    bottom.append(chain)
    undo = freeze([chain])
    bottom.clear()
    undo()
    assert bottom == [chain]


def test_rows_of_a_data_set_are_left_alone_but_not_its_generator():
    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.rows, self.table, self.rng = [[1]], torch.zeros(2), random.Random(1)

    holder = SimpleNamespace(anything=Rows(), train_dataset=[[1]])
    state, undo = holder.anything.rng.getstate(), freeze([holder])
    holder.anything.rng.random()
    for rows in (holder.anything.rows, holder.train_dataset):
        rows.append([2])
    holder.anything.table.add_(1)
    undo()
    assert holder.anything.rng.getstate() == state
    assert len(holder.anything.rows) == len(holder.train_dataset) == 2
    assert holder.anything.table.sum() == 2


def test_parameters_and_optimizers_are_left_alone_where_that_was_asked_for():
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    undo = freeze([layer, optimizer], (nn.Parameter, torch.optim.Optimizer))
    layer.weight.grad = torch.ones(1, 1)
    with torch.no_grad():
        layer.weight.fill_(5)
    optimizer.param_groups[0]["lr"] = 2.0
    undo()
    assert (layer.weight.item(), optimizer.param_groups[0]["lr"]) == (5.0, 2.0)
    assert layer.weight.grad is None


# -- a trainer -------------------------------------------------------------------------------------------------------
class Lookahead(torch.optim.Optimizer):
    """Fast steps by another optimizer, then half of the way back."""

    def __init__(self, base):
        self.base, self.count = base, 0
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        for p, slow in zip((p for g in self.param_groups for p in g["params"]), self.slow, strict=True):
            p.copy_(slow.lerp_(p, 0.5)) if self.count % 2 == 0 else None


class Head(nn.Module):
    """A temperature that anneals with each forward, and a buffer that is assigned anew."""

    def __init__(self):
        super().__init__()
        self.linear, self.temperature = nn.Linear(32, 64), 2.0
        self.register_buffer("centre", torch.zeros(64))

    def forward(self, x):
        x = self.linear(x)
        if self.training:
            self.temperature *= 0.9
            self.centre = self.centre * 0.9 + x.detach().mean((0, 1)) * 0.1
        return (x - self.centre) / self.temperature


class Average(TrainerCallback):
    """An average of the weights, which pulls at the weights."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        for mean, p in zip(self.model.parameters(), model.parameters(), strict=True):
            p.lerp_(mean.lerp_(p, 0.5), 0.1)


class Augmented(torch.utils.data.Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        ids = torch.as_tensor(self.rng.integers(3, 60, 6))
        return {"input_ids": ids, "labels": ids}


class Everything(Trainer):
    """Own generators, a meter, an array, heads in a dict, a critic with an optimizer of its own."""

    def compute_loss(self, model, inputs, **kwargs):
        out = model(**inputs)
        self.meter.up()
        self.seen[inputs["input_ids"][:, 0].numpy()] += 1
        mixed = float(self.rng.beta(0.4, 0.4)) * torch.rand((), generator=self.noise)
        return out.loss * mixed + self.heads["a"](out.logits).square().mean() / self.meter.count + self.seen.mean()

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.critics.zero_grad()
        self.critic(torch.ones(1)).square().sum().backward()
        self.critics.step()
        with torch.no_grad():
            next(model.parameters()).add_(1e-3 * self.critic.weight.sum())
        return loss


def everything(folder):
    model = one.make_model()
    model.lm_head = Head()
    heads = {"a": nn.Linear(64, 1)}
    optimizer = Lookahead(torch.optim.AdamW([*model.parameters(), *heads["a"].parameters()], lr=1e-2))
    phases = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 6)]
    tokenizer = one.make_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<unk>"})
    trainer = Everything(
        model, one.arguments(folder, max_steps=3), train_dataset=Augmented(), callbacks=[Average(model)],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4, seed=3),
        optimizers=(optimizer, SequentialLR(optimizer, phases, [2])),
    )  # fmt: skip
    trainer.heads, trainer.meter, trainer.seen = heads, Counter(), np.ones(64)
    trainer.rng, trainer.noise = np.random.default_rng(0), torch.Generator().manual_seed(0)
    trainer.critic = nn.Linear(1, 1)
    trainer.critics = torch.optim.Adam(trainer.critic.parameters(), lr=1e-2)
    return trainer


def trained(trainer):
    """Its weights after train()."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    trainer.train()
    return [p.detach().clone() for p in (*trainer.model.parameters(), *trainer.heads["a"].parameters())]


def test_training_after_locate_is_the_training_it_would_have_been(tmp_path):
    plain, watched = everything(tmp_path), everything(tmp_path)
    report = locate(watched)
    assert (report.found, report.exception) == (False, None)
    assert watched.meter.count == 1
    assert one.same(trained(plain), trained(watched))


class Hook(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output * 0.9)


def test_hooks_flags_and_methods_are_gone_although_training_broke_off(tmp_path):
    options = one.arguments(tmp_path, neftune_noise_alpha=5.0, gradient_checkpointing=True)
    trainer = Trainer(one.make_model(), options, train_dataset=one.rows(empty=tuple(range(8))), callbacks=[Hook()])
    look = lambda m: (len(m._forward_hooks), getattr(m, "gradient_checkpointing", None), m.training, sorted(vars(m)))
    before = [look(m) for m in trainer.model.modules()]
    assert one.located(trainer).cause == "empty_mean"
    assert [look(m) for m in trainer.model.modules()] == before
    assert "call_event" not in vars(trainer.callback_handler)


def test_an_evaluation_in_half_precision_does_not_leave_half_a_model(tmp_path):
    options = one.arguments(tmp_path, bf16_full_eval=True)
    trainer = Trainer(one.make_model(), options, eval_dataset=one.rows())
    assert not one.located(trainer, "eval").found  # the fingerprint compares bits and dtypes
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_an_interrupt_puts_everything_back_and_goes_on(tmp_path):
    class Impatient(Trainer):
        def training_step(self, *args, **kwargs):
            super().training_step(*args, **kwargs)
            if self.state.global_step == 1:
                raise KeyboardInterrupt
            return torch.zeros(())

    trainer = Impatient(one.make_model(), one.arguments(tmp_path), train_dataset=one.rows())
    before = one.fingerprint(trainer)
    with pytest.raises(KeyboardInterrupt):
        locate(trainer)
    assert one.same(before, one.fingerprint(trainer))


class Save(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = control.should_log = control.should_evaluate = True
        return control


def test_nothing_is_saved_logged_or_evaluated(tmp_path):
    class Loud(Trainer):
        def evaluate(self, *args, **kwargs):
            raise AssertionError("evaluated")

        def log(self, logs, *args, **kwargs):
            (tmp_path / "log.txt").write_text(str(logs))

    steps = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    options = one.arguments(tmp_path, eval_on_start=True, **steps)
    trainer = Loud(one.make_model(), options, train_dataset=one.rows(), eval_dataset=one.rows(), callbacks=[Save()])
    assert not one.located(trainer).found
    trainer.evaluate = functools.partial(Trainer.evaluate, trainer)
    assert not one.located(trainer, "eval").found
    assert list(tmp_path.iterdir()) == []
    assert trainer.args.eval_on_start


def test_a_guard_looks_away_and_keeps_its_events(tmp_path):
    options = one.arguments(tmp_path, per_device_train_batch_size=1, max_steps=8)
    trainer = Trainer(one.make_model(), options, train_dataset=one.rows(empty=(5,)))
    guard = watch(trainer, policy="skip")
    for events in (0, 1):  # before training, and after it, when the guard knows model and optimizer
        report = one.located(trainer)
        assert (report.cause, report.examples, len(guard.events)) == ("empty_mean", [5], events)
        trainer.train()
    assert len(guard.events) == 2


def test_the_schedule_does_not_run_beyond_its_end(tmp_path):
    model = one.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    schedule = LambdaLR(optimizer, lambda step: 1.0 if step < 4 else NAN)
    options = one.arguments(tmp_path, max_steps=3)
    trainer = Trainer(model, options, train_dataset=one.rows(20), optimizers=(optimizer, schedule))
    assert not one.located(trainer).found
