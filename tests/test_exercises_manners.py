"""Whatever an answer gives back, a check says one sentence; and an answer may not change what it was given."""

from __future__ import annotations

import math

import pytest
import torch

from nanlab.course import exercises

OF_DICTS = ("check_08_functions", "check_08_phases")
NAMES = [name for name in dir(exercises) if name.startswith("check_") and name not in OF_DICTS]
CHECKS = {name: getattr(exercises, name) for name in NAMES}
CHECKS |= {"check_08_functions": lambda answer: exercises.check_08_functions({"log_sigmoid": answer})}


class Odd:
    def refuse(self, *_):
        raise RuntimeError("no\nway")

    __iter__ = __float__ = __bool__ = __eq__ = __len__ = __getitem__ = refuse
    __hash__ = object.__hash__


def of_two_lines(*_):
    raise RuntimeError("the first line\nand a second one")


def not_written_yet(*_):
    raise NotImplementedError


ANSWERS = {
    "None": lambda *_: None,
    "text": lambda *_: "nan",
    "a number": lambda *_: 0.5,
    "a list": lambda *_: [1.0, 2.0],
    "a list of None": lambda *_: [None, None, None],
    "nothing": lambda *_: [],
    "a dict": lambda *_: {},
    "a function": lambda *_: print,
    "a tensor of three dimensions": lambda *_: torch.zeros(2, 3, 4),
    "a list of it": lambda *_: [torch.zeros(2, 3, 4)],
    "an empty tensor": lambda *_: torch.zeros(0),
    "a complex number": lambda *_: torch.tensor([1j]),
    "something odd": lambda *_: Odd(),
    "a generator that fails": lambda *_: (1 / 0 for _ in range(3)),
    "an error of two lines": of_two_lines,
    "an error without a word": not_written_yet,
    "too few arguments": lambda: None,
    "no function": None,
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("check", CHECKS)
def test_a_check_says_one_sentence_whatever_it_gets(check, answer, capsys):
    assert CHECKS[check](ANSWERS[answer]) is False
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Not yet: ")
    assert len(line) < 400


@pytest.mark.parametrize("answers", [None, [], "backward", ["backward", "optimizer", "data"], {}, {"log1p": [1]}])
def test_a_dict_is_asked_for_in_one_sentence(answers, capsys):
    assert not exercises.check_08_phases(answers)
    assert not exercises.check_08_functions(answers)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["Not yet"] * 2


def test_a_row_without_a_word_is_told_also_where_nothing_comes_back(capsys):
    assert not exercises.check_01_greedy(lambda x: x.argmax(-1) if x.amax(-1).isfinite().all() else None)
    assert capsys.readouterr().out == "Not yet: row 2 holds a NaN: raise a ValueError; None came out without a word.\n"


# --- what was given stays as it was -----------------------------------------------------------------------------------


def fill(rewards):
    nobody = rewards.isnan().all(1)
    rewards[rewards.isnan()] = 0.0
    return nobody


def total_reward(per_function, weights):
    nobody = fill(per_function)
    return (per_function @ weights).masked_fill(nobody, torch.nan)


def standardise(rewards):
    flat = (rewards.amax(1) - rewards.amin(1)) <= 1e-6 * rewards.abs().amax(1)
    rewards -= rewards.mean(1, keepdim=True)
    return torch.where(flat[:, None], 0.0, rewards / rewards.std(1, keepdim=True, correction=0))


def collate(rows, pad_id):
    lengths = torch.tensor([len(row) for row in rows])
    for row in rows:
        row += [pad_id] * (int(lengths.max()) - len(row))
    ids, keep = torch.tensor(rows), torch.arange(lengths.max()) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": keep.long(), "labels": ids.masked_fill(~keep, -100)}


def clean_batch(features, targets):
    good = features.isfinite().all(1) & targets.isfinite()
    if not good.any():
        raise ValueError("no row is finite")
    features.nan_to_num_(0.0)
    return features[good], targets[good], int((~good).sum())


def bad_gradients(model):
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    model.zero_grad()
    return bad


def bad_tensors(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    bad = [name for name, tensor in tensors if tensor.isnan().any() or (tensor == math.inf).any()]
    for _, tensor in tensors:
        tensor.data.masked_fill_(tensor.isnan(), 0)
    return bad


def merge(batches):
    left_out = 0
    for batch in list(batches):
        if not math.isfinite(batch[0]):
            left_out += batch[1]
            batches.remove(batch)
    seen = sum(n for _, n in batches)
    return (sum(loss * n for loss, n in batches) / seen if seen else math.nan), left_out


def vanishing_eps(optimizer):
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if group.get("eps") and not group.get("fused") and torch.tensor(group["eps"], dtype=p.dtype) == 0:
                found.append(p.dtype)
                group["eps"] = 1e-4
    return found


CHANGING = {
    "check_01_bad_gradients": bad_gradients,
    "check_02_standardise": standardise,
    "check_02_total_reward": total_reward,
    "check_03_merge": merge,
    "check_05_collate": collate,
    "check_07_bad_tensors": bad_tensors,
    "check_07_clean_batch": clean_batch,
    "check_11_vanishing_eps": vanishing_eps,
}


@pytest.mark.parametrize("check", CHANGING)
def test_a_right_value_is_not_enough_where_the_input_is_changed(check, capsys):
    assert not CHECKS[check](CHANGING[check])
    assert "it changes what it was given" in capsys.readouterr().out


def test_an_input_that_becomes_another_thing_is_noticed_too(capsys):
    def log_entry(losses):
        finite = [loss for loss in losses if math.isfinite(loss)]
        entry = {"loss": sum(finite) / len(finite) if finite else math.nan, "not_finite": len(losses) - len(finite)}
        losses[0] = entry
        return entry

    assert not exercises.check_09_log_entry(log_entry)
    assert "it changes what it was given" in capsys.readouterr().out


def test_a_prompt_may_be_written_into_and_gradients_may_not(capsys):
    def tune(prompt, gradients, lr, spoil=False):
        master = prompt.float().requires_grad_()
        optimizer = torch.optim.AdamW([master], lr=lr, weight_decay=0.0)
        for gradient in gradients:
            master.grad = gradient.float()
            optimizer.step()
            if spoil:
                gradient.zero_()
        return prompt.copy_(master.detach())

    assert exercises.check_06_tune(tune)
    assert not exercises.check_06_tune(lambda *given: tune(*given, spoil=True))
    assert "it changes what it was given" in capsys.readouterr().out
