"""Checks of the exercises. Each takes the reader's answer, prints why it is right or what is missing, returns a bool.

A check runs the answer on inputs and compares values with a reference of its own; it never looks at how it was written.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Mapping


def _verdict(problem: str, praise: str) -> bool:
    """Print one sentence; True if there is no problem."""
    print(f"Not yet: {problem}" if problem else f"Right. {praise}")
    return not problem


def _short(number) -> float:
    """Four significant digits: enough for a message, and no 0.8500000000000001."""
    return float(f"{float(number):.4g}")


def _shown(thing) -> str:
    """What the reader's function gave back, in one line of at most 100 characters."""
    text = " ".join(repr(thing).split())
    return text if len(text) <= 100 else text[:99] + "…"


def _told(error: Exception) -> str:
    """The error in one line: its kind and the first line of what it says."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _ask(answer, *given, read=lambda result: result, want="", nothing="is there a `return`?") -> tuple:
    """(what the reader's function gives back, as `read` reads it, "") or (None, what is wrong with it).

    Wrong is an error, None, what `read` cannot read, which is then called "no `want`", and a change of what was given.
    """
    before = _picture(given)
    try:
        result = answer(*given)
        result = list(result) if inspect.isgenerator(result) else result
    except Exception as error:
        return None, f"it raised {_told(error)}"
    if result is None:
        return None, f"it gives back None; {nothing}"
    try:
        found = read(result)
    except Exception:
        return None, f"it gives back {_shown(result)}, which is no {want}."
    if not _alike(before, _picture(given)):
        return None, "it changes what it was given, and the caller still needs that as it was: work on a copy."
    return found, ""


def _picture(thing):
    """A copy of tensors with their gradients, of models and optimizers, and of lists of such things, to compare."""
    import torch

    if isinstance(thing, torch.Tensor):
        return thing.detach().clone(), None if thing.grad is None else thing.grad.clone()
    if isinstance(thing, torch.nn.Module):
        return _picture([*thing.parameters(), *thing.buffers()])
    if isinstance(thing, torch.optim.Optimizer):
        return _picture(thing.param_groups)
    if isinstance(thing, dict):
        return {key: _picture(value) for key, value in thing.items()}
    return [_picture(one) for one in thing] if isinstance(thing, list | tuple) else thing


def _alike(one, other) -> bool:
    """Are two pictures the same? A NaN is like a NaN."""
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return one is other or one == other


# --- 01 inf and NaN -------------------------------------------------------------------------------------------------


def check_01_greedy(greedy) -> bool:
    """`greedy(logits [B, V])`: argmax of each row; ValueError naming a row without a most likely token."""
    return _verdict(_problem_01_greedy(greedy), "No exclamation marks without a word, and forbidden tokens still pass.")


def _problem_01_greedy(greedy) -> str:
    import torch

    inf, nan = float("inf"), float("nan")
    good = torch.tensor([[0.5, 2.0, 1.0], [5.0, -inf, 4.0]])
    tokens, trouble = _ask(greedy, good, read=lambda tokens: [int(token) for token in tokens], want="tensor of tokens")
    if trouble:
        return f"a row with a forbidden token (−inf) is fine, yet {trouble}"
    if tokens != [1, 0]:
        return f"for {good.tolist()} the most likely tokens are [1, 0], not {tokens}."
    cases = {"a NaN": [0.1, nan, 1.0], "a +inf": [0.1, inf, 1.0], "nothing but −inf": [-inf] * 3, "only NaN": [nan] * 3}
    for place, (what, row) in zip((2, 0, 3, 1), cases.items(), strict=True):
        rows = [[0.5, 7.5, 6.5]] * 5
        rows[place] = row
        try:
            tokens = greedy(torch.tensor(rows))
        except ValueError as error:
            if not _names_row(place, error):
                return f"the ValueError should name the row, {place}; it says {str(error)!r}."
            continue
        except Exception as error:
            return f"row {place} holds {what}: raise a ValueError; this came: {_told(error)}"
        try:
            token = int(tokens[place])
        except Exception:
            return f"row {place} holds {what}: raise a ValueError; {_shown(tokens)} came out without a word."
        return f"row {place} holds {what}, and its token came out as {token} without a word."
    return _problem_with_a_dead_model(greedy)


def _names_row(row: int, error: Exception) -> bool:
    """Is this a number of its own in the message, and no digit of 7.5?"""
    return bool(re.search(rf"(?<![\d.]){row}(?!\d|\.\d)", str(error)))


def _problem_with_a_dead_model(greedy) -> str:
    import torch

    try:
        greedy(torch.full((3, 4), float("nan")))
    except ValueError as error:
        named = any(_names_row(row, error) for row in range(3))
        return "" if named else f"a dead model, three rows of NaN: name one of the rows; the error says {str(error)!r}."
    except Exception as error:
        return f"a dead model, three rows of NaN: raise a ValueError; this came: {_told(error)}"
    return "a dead model, three rows of NaN, went through without a word."


def check_01_bad_gradients(bad_gradients) -> bool:
    """`bad_gradients(model)`: names of the parameters with a non-finite gradient."""
    praise = "Both inf and NaN are found, and large but finite gradients are left alone."
    return _verdict(_problem_01_bad_gradients(bad_gradients), praise)


def _problem_01_bad_gradients(bad_gradients) -> str:
    import torch

    inf, nan = float("inf"), float("nan")
    gradients = {  # the last is finite, though its sum overflows
        "fine": [1.0, 2.0, 3.0], "one_nan": [1.0, nan, 3.0], "all_nan": [nan] * 3, "one_inf": [1.0, 2.0, inf],
        "minus_inf": [1.0, -inf, 3.0], "opposite": [-inf, 0.0, inf], "unused": None, "large": [3e38, 3e38, 3e38],
    }  # fmt: skip
    model = torch.nn.Module()
    for name, gradient in gradients.items():
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        model.register_parameter(name, parameter)
    expected = ["one_nan", "all_nan", "one_inf", "minus_inf", "opposite"]
    found, trouble = _ask(bad_gradients, model, read=list, want="list of names")
    if trouble.startswith("it raised"):
        trouble += ". Compare nothing with nan, look at the elements, and mind parameters whose grad is None."
    if trouble:
        return trouble
    for name in gradients:
        if (name in found) != (name in expected):
            should = "is bad and was not found" if name in expected else "is not bad, but was reported"
            return f"the gradient {gradients[name]} {should}."
    return "" if found == expected else f"expected the names in the model's order, {expected}, got {found}."


# --- 02 zero std ----------------------------------------------------------------------------------------------------


def check_02_standardise(standardise) -> bool:
    """`standardise(rewards [groups, answers])`: (reward − mean) / std in each row, exactly 0 without spread."""
    praise = "Flat groups are exactly 0 and honest ones keep full size, at every scale."
    return _verdict(_problem_02_standardise(standardise), praise)


def _problem_02_standardise(standardise) -> str:
    import torch

    one_step_apart = torch.full((4,), 0.7)
    one_step_apart[1] = one_step_apart[0].nextafter(torch.tensor(1.0))
    flat = {
        "seven rewards of 1.0": [1.0] * 7,
        "seven rewards of 0.1": [0.1] * 7,
        "seven rewards of 0.0": [0.0] * 7,
        "seven rewards of −0.1": [-0.1] * 7,
        "seven rewards of 1000.7": [1000.7] * 7,
        "a single answer": [0.7],
        "0.7 added up in two orders, one rounding step apart": one_step_apart.tolist(),
    }
    honest = torch.tensor([
        [0.0, 0.5, 1.0, 0.1], [0.1, 0.1, 0.1, 1.0], [-1.0, -0.5, 0.5, 1.0],
        [0.7, 0.71, 0.7, 0.7], [1.0, 1.001, 1.0, 1.0], [1.0, 1.0001, 1.0, 1.0],
    ])  # fmt: skip
    for what, scale in {"": 1.0, " times 1e-6": 1e-6, " times 1000": 1000.0}.items():
        for name, row in flat.items():
            values, trouble = _tensor_of(standardise, torch.tensor([row]) * scale)
            if trouble:
                return f"{name}{what}: {trouble}"
            if values.numel() != len(row) or (values != 0).any():
                return f"{name}{what}: expected exactly 0 for each, got {[_short(v) for v in values.flatten()[:3]]}."
        if problem := _problem_of_groups(standardise, honest * scale, flat=[]):
            return problem
    rows = [[0.0, 0.5, 1.0, 0.1], [0.1] * 4, [0.7, 0.71, 0.7, 0.7], [1000.7] * 4, [0.3] * 4, [-1.0, -0.5, 0.5, 1.0]]
    mixed = torch.tensor(rows) * torch.tensor([1e-6, 1.0, 1000.0, 1.0, 1e-6, 1.0])[:, None]
    problem = _problem_of_groups(standardise, mixed, flat=[1, 3, 4])
    return problem and f"flat and honest groups together: {problem}"


def _problem_of_groups(standardise, rewards, flat: list[int]) -> str:
    """What is wrong with the advantages of several groups of four, of which those numbered in `flat` are flat."""
    values, trouble = _tensor_of(standardise, rewards.clone())
    if trouble:
        return trouble
    if values.shape != rewards.shape:
        return f"{len(rewards)} groups of 4: expected the shape {list(rewards.shape)}, got {list(values.shape)}."
    shown = lambda row: [_short(x) for x in row]
    for i in flat:
        if (values[i] != 0).any():
            return f"the flat group {shown(rewards[i])} should be exactly 0, got {shown(values[i])}."
    honest = [i for i in range(len(rewards)) if i not in flat]
    rewards, values = rewards[honest], values[honest]
    deviation = rewards.double() - rewards.double().mean(1, keepdim=True)
    allowed = [deviation / deviation.pow(2).sum(1, keepdim=True).div(n).sqrt() for n in (3, 4)]
    near = [((values.double() - a).abs() <= 2e-3).all(1) for a in allowed]  # fp32 has so much room at 1.001
    if any(n.all() for n in near):
        return ""
    i = int((~near[1]).nonzero()[0])
    row, wanted, got = shown(rewards[i]), shown(allowed[1][i]), shown(values[i])
    return f"the honest group {row} has advantages near {wanted} (a little smaller with n − 1), got {got}."


def check_02_total_reward(total_reward) -> bool:
    """`total_reward(per_function [answers, functions], weights [functions])`: weighted sum of what is not NaN."""
    praise = "Opinions add up, silence costs nothing, and an answer nobody scored has no reward."
    return _verdict(_problem_02_total_reward(total_reward), praise)


def _problem_02_total_reward(total_reward) -> str:
    import torch

    nan = float("nan")
    weights = torch.tensor([1.0, 0.5, 2.0])
    cases = {
        "all three functions scored": ([1.0, 2.0, 3.0], 8.0),
        "one function has no opinion": ([1.0, nan, 3.0], 7.0),
        "two functions have no opinion": ([nan, 2.0, nan], 1.0),
        "the scores are honest zeros": ([0.0, 0.0, 0.0], 0.0),
        "one honest zero, two without opinion": ([nan, 0.0, nan], 0.0),
        "nobody scored the answer": ([nan, nan, nan], nan),
    }
    table = torch.tensor([row for row, _ in cases.values()])
    totals, trouble = _tensor_of(total_reward, table.clone(), weights.clone())
    if trouble:
        return trouble
    if totals.shape != (len(cases),):
        return f"expected one number for each of the {len(cases)} answers, got shape {list(totals.shape)}."
    for (what, (row, expected)), total in zip(cases.items(), totals.tolist(), strict=True):
        if not (total == expected or (total != total and expected != expected)):
            hint = " A 0 would be a real, bad score." if expected != expected and total == 0 else ""
            return f"{what}: {row} with weights {weights.tolist()} is {expected}, got {_short(total)}.{hint}"
    return ""


def _tensor_of(answer, *given) -> tuple:
    """(the tensor that `answer` gives back, on the CPU, "") or (None, what went wrong)."""
    import torch

    result, trouble = _ask(answer, *given, nothing="expected a tensor.")
    if not trouble and not isinstance(result, torch.Tensor):
        trouble = f"expected a tensor, got {_shown(result)}."
    elif not trouble and result.is_complex():
        trouble = f"expected real numbers, got {result.dtype}."
    return (None, trouble) if trouble else (result.detach().cpu(), "")


# --- 03 empty batch -------------------------------------------------------------------------------------------------


def check_03_token_loss(token_loss) -> bool:
    """`token_loss(per_token [B, T], mask [B, T])`: mean where the mask is 1; over nothing NaN, with a gradient of 0."""
    praise = "The value is honest and the weights are safe."
    return _verdict(_problem_03_token_loss(token_loss), praise)


def _problem_03_token_loss(token_loss) -> str:
    import torch

    nan, inf = float("nan"), float("inf")
    usual, empty = [[1, 1, 0], [1, 0, 0]], [[0, 0, 0], [0, 0, 0]]
    cases = [  # what, per-token losses, mask, value
        ("a usual batch", [[1.0, 2.0, 7.0], [6.0, 7.0, 7.0]], usual, 3.0),
        ("inf and NaN on masked tokens", [[1.0, 2.0, inf], [6.0, nan, 7.0]], usual, 3.0),
        ("a NaN on a token that counts", [[1.0, nan, 7.0], [6.0, 7.0, 7.0]], usual, nan),
        ("an inf on a token that counts", [[1.0, 2.0, 7.0], [inf, 7.0, 7.0]], usual, inf),
        ("a batch without a token", [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], empty, nan),
        ("no token, and inf under the mask", [[1.0, 2.0, inf], [4.0, 5.0, 6.0]], empty, nan),
    ]
    for what, numbers, mask, expected in cases:
        per_token, mask = torch.tensor(numbers, requires_grad=True), torch.tensor(mask)
        loss, trouble = _ask(token_loss, per_token, mask)
        if not trouble and not isinstance(loss, torch.Tensor):
            trouble = f"give the loss as a tensor, so that backward() can start from it; got {_shown(loss)}."
        elif not trouble and loss.numel() != 1:
            trouble = f"the loss is one number, got the shape {list(loss.shape)}."
        if trouble:
            return f"{what}: {trouble}"
        try:
            if loss.requires_grad:
                loss.backward()
        except Exception as error:
            return f"{what}: backward() raised {_told(error)}"
        value, gradient = loss.item(), per_token.grad
        if gradient is None:
            return f"{what}: the loss is cut off from the model, no gradient arrives (DDP ranks then get out of step)."
        if not mask.any() and value == 0:
            return f"{what}: it reports 0.0, the best loss there is. Nothing was seen, so the value is NaN."
        if not (value == expected or abs(value - expected) < 1e-6 or (value != value and expected != expected)):
            return f"{what}: the value should be {expected}, got {_short(value)}."
        correct = mask / mask.sum().clamp(min=1)
        if not torch.allclose(gradient, correct):
            shown = [[[_short(x) for x in row] for row in tensor] for tensor in (correct, gradient)]
            return f"{what}: the gradient should be {shown[0]}, got {shown[1]}."
    return ""


def check_03_merge(merge) -> bool:
    """`merge([(mean_loss, tokens), …])` → (mean over all tokens, tokens left out because their loss is not finite)."""
    return _verdict(_problem_03_merge(merge), "Each token weighs the same, and what was left out is counted.")


def _problem_03_merge(merge) -> str:
    nan, inf = float("nan"), float("inf")
    cases = [
        ("batches of unequal size", [(0.8, 10), (0.9, 30)], (0.875, 0)),
        ("the same tokens in three batches", [(0.8, 10), (0.9, 10), (0.9, 20)], (0.875, 0)),
        ("an empty batch", [(0.8, 10), (nan, 0), (0.9, 30)], (0.875, 0)),
        ("an empty batch that says 0.0", [(0.8, 10), (0.0, 0), (0.9, 30)], (0.875, 0)),
        ("a batch of 5 tokens with loss NaN", [(0.8, 10), (nan, 5), (0.9, 30)], (0.875, 5)),
        ("a batch of 7 tokens with loss inf", [(inf, 7), (0.8, 10), (0.9, 30)], (0.875, 7)),
        ("a batch of 3 tokens with loss −inf", [(-inf, 3), (0.8, 10), (0.9, 30)], (0.875, 3)),
        ("an honest loss of 0", [(0.0, 10), (0.8, 10)], (0.4, 0)),
        ("only a NaN of 5 tokens", [(nan, 5)], (nan, 5)),
        ("only an empty batch that says 0.0", [(0.0, 0)], (nan, 0)),
        ("no batch at all", [], (nan, 0)),
    ]
    for what, batches, (mean, left_out) in cases:
        result, trouble = _ask(merge, list(batches), nothing="return a pair (loss, left_out).")
        if trouble:
            return f"{what}, {batches}: {trouble}"
        try:
            got_mean, got_left_out = map(float, result)
        except Exception:
            return f"{what}, {batches}: return a pair (loss, left_out), two numbers; got {_shown(result)}."
        if not (abs(got_mean - mean) < 1e-6 or (got_mean != got_mean and mean != mean)):
            hint = " Nothing was seen; 0.0 would crown a dead model." if mean != mean and got_mean == 0 else ""
            return f"{what}, {batches}: the mean is {mean}, got {_short(got_mean)}.{hint}"
        if got_left_out != left_out:
            return f"{what}, {batches}: {left_out} tokens were left out, got {got_left_out:g}."
    return ""


# --- 04 The log of zero ---------------------------------------------------------------------------------------------


def check_04_log1mexp(log1mexp) -> bool:
    """`log1mexp(x)`, x < 0: log(1 − e^x) in fp32, value and gradient, checked against fp64."""
    return _verdict(_problem_04_log1mexp(log1mexp), "Value and gradient are right on both sides, down to −1e-20.")


def _problem_04_log1mexp(log1mexp) -> str:
    import torch

    x = torch.tensor(
        [-80.0, -20.0, -16.5, -13.0, -9.7, -5.0, -0.7, -0.69, -0.5, -1e-4, -2e-8, -1e-8, -1e-20], requires_grad=True
    )
    exact = x.detach().double()
    value_64 = torch.where(exact > -0.5, (-exact.expm1()).log(), (-exact.exp()).log1p())
    slope_64 = -1 / (-exact).expm1()
    value, slope, trouble = _value_and_slope(log1mexp, x)
    if trouble:
        return trouble
    for what, got, expected in (("value", value.detach().cpu(), value_64), ("gradient", slope, slope_64)):
        if got.shape != expected.shape:
            return f"the {what} has shape {list(got.shape)}, expected {list(expected.shape)}."
        wrong = ~torch.isclose(got.double(), expected, rtol=1e-4, atol=0)
        if wrong.any():
            i = int(wrong.nonzero()[0])
            return f"at x = {exact[i]:.3g} the {what} is {got[i]:.4g}, and should be {expected[i]:.4g}."
    at_zero, trouble = _tensor_of(log1mexp, torch.zeros(1))
    if not trouble and not at_zero.isneginf().all():
        trouble = f"the value is {[_short(v) for v in at_zero.flatten()[:3]]}, and should be [-inf]."
    return f"at x = 0: {trouble}" if trouble else ""


def _value_and_slope(answer, x) -> tuple:
    """(value, gradient of its sum, "") of an answer at x, or (None, None, what went wrong)."""
    import torch

    value, trouble = _ask(answer, x)
    if not trouble and not isinstance(value, torch.Tensor):
        trouble = f"expected a tensor, got {_shown(value)}."
    elif not trouble and not value.requires_grad:
        trouble = "the result is cut off from its input, as by item() or detach(), so it has no gradient."
    if trouble:
        return None, None, trouble
    try:
        return value, *torch.autograd.grad(value.sum(), x), ""
    except Exception as error:
        return None, None, f"its gradient raised {_told(error)}"


def check_04_entropy(entropy) -> bool:
    """`entropy(logits [B, V])`: −Σ p log p, with forbidden tokens (−inf), value and gradient checked against fp64."""
    return _verdict(_problem_04_entropy(entropy), "Forbidden tokens add exactly nothing, forwards and backwards.")


def _problem_04_entropy(entropy) -> str:
    import torch

    cases = {
        "ordinary logits": [0.5, -1.0, 2.0, 0.0],
        "a forbidden token": [0.5, float("-inf"), 2.0, 0.0],
        "logits of 1000": [1000.0, 999.0, 0.0, 998.0],
        "one token left": [1.0, float("-inf"), float("-inf"), float("-inf")],
    }
    for name, row in cases.items():
        logits = torch.tensor([row, [0.0, 0.0, 1.0, 1.0]], requires_grad=True)
        log_p = logits.detach().double().log_softmax(-1)
        plogp = torch.where(log_p.isinf(), 0.0, log_p.exp() * log_p)
        expected = -plogp.sum(-1)
        slope_64 = -(plogp + log_p.exp() * expected[:, None])  # dH/dx = −p (log p + H)
        value, slope, trouble = _value_and_slope(entropy, logits)
        if trouble:
            return f"{name}: {trouble}"
        for what, got, right in (("value", value.detach().cpu(), expected), ("gradient", slope, slope_64)):
            if got.shape != right.shape:
                return f"{name}: the {what} has the shape {list(got.shape)}, and should have {list(right.shape)}."
            off = (~torch.isclose(got.double(), right, atol=1e-5)).reshape(len(right), -1).any(1)
            if off.any():
                i = int(off.nonzero()[0])
                shown = [[round(v, 6) for v in t[i].reshape(-1).tolist()] for t in (got, right)]
                return f"{name}, {logits[i].tolist()}: the {what} is {shown[0]}, and should be {shown[1]}."
    tail = torch.zeros(1, 150_001)
    tail[0, 0] = math.log(0.985 / 1e-7)  # beside one likely token a large share of the entropy lies in the small ones
    for what, logits in {
        "all equally likely": torch.zeros(1, 150_000),
        "one likely, the others 1e-7 each": tail,
    }.items():
        log_p = logits.double().log_softmax(-1)
        right = -(log_p.exp() * log_p).sum(-1)
        value, trouble = _tensor_of(entropy, logits)
        if not trouble and not torch.allclose(value.double(), right, rtol=0, atol=1e-3):
            trouble = f"the value is {[round(v, 4) for v in value.tolist()]}, and should be {right.item():.4f}."
        if trouble:
            return f"{logits.shape[1]:,} tokens, {what}: {trouble}"
    return ""


# --- 06 fp16 overflow -----------------------------------------------------------------------------------------------


def check_06_tune(tune) -> bool:
    """`tune(prompt fp16 [D], gradients: list of fp16 [D], lr)`: the fp16 prompt after AdamW steps without decay."""
    return _verdict(_problem_06_tune(tune), "The copy in fp32 keeps the small steps and the small squares.")


def _problem_06_tune(tune) -> str:
    import torch

    some, large = torch.tensor([0.0, 1e-4, 0.1]), torch.tensor([8.0, 4.0, 2.0])
    cases = {  # what: first value, gradients, learning rate
        "one step with gradients 0, 0.0001 and 0.1": (0.0, [some], 1e-2),
        "a gradient, then three of 0": (0.0, [some, some * 0, some * 0, some * 0], 1e-3),
        "200 small steps": (1.0, [some + 1e-3] * 200, 1e-4),
        "a large value, which a weight decay would shrink": (100.0, [some + 1e-3] * 100, 1e-2),
        "a large gradient, then 100 small ones": (0.0, [large, *[some + 0.1] * 100], 1e-3),
    }
    for what, (start, gradients, lr) in cases.items():
        exact = torch.full((3,), start, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.AdamW([exact], lr=lr, weight_decay=0.0)
        for gradient in gradients:
            exact.grad = gradient.half().double()
            optimizer.step()
        prompt = torch.full((3,), start, dtype=torch.float16)
        write = lambda gradients, lr, prompt=prompt: tune(prompt, gradients, lr)  # may write into it, as optimizers do
        got, trouble = _tensor_of(write, [gradient.half() for gradient in gradients], lr)
        if trouble:
            return f"{what}: {trouble}"
        shown = [_short(x) for x in got.flatten().tolist()[:3]]
        if not got.isfinite().all():
            return f"{what}: the prompt is {shown}. In fp16 the squares and eps are 0, so the step divides by 0."
        if got.dtype != torch.float16 or got.shape != (3,):
            return (
                f"{what}: expected fp16 of shape [3], as the model has it; got {got.dtype} of shape {list(got.shape)}."
            )
        if not torch.allclose(got.double(), exact.detach(), rtol=1e-3, atol=lr / 50):
            wanted = [_short(x) for x in exact.tolist()]
            return (
                f"{what}: finite, but not right. Float64 gives {wanted}, yours {shown}. What is rounded or forgotten?"
            )
    return ""


def check_06_step(step) -> bool:
    """`step(scaler, optimizer, loss)`: True if stepped, False if skipped; FloatingPointError if no scale can help."""
    return _verdict(_problem_06_step(step), "A skip is told from a step, and a hopeless run stops.")


def _problem_06_step(step) -> str:
    inf = float("inf")
    through_half = lambda w: w.half().float().sum()  # a gradient above 65504 becomes inf on its way back
    healthy = lambda w: w.sum()
    growing = [  # what, first scale, one (loss of the weight, expected result, weight after it) for each call
        ("two healthy steps", 1024.0, [(healthy, True, 0.75), (healthy, True, 0.5)]),
        ("a gradient that overflows once", 2.0**16, [(through_half, False, 1.0), (through_half, True, 0.75)]),
        ("a loss of inf", 1024.0, [(lambda w: w.sum() * inf, FloatingPointError, 1.0)]),
        ("a loss of NaN", 1024.0, [(lambda w: w.sum() * inf * 0, FloatingPointError, 1.0)]),
        ("a healthy loss at scale 0.5", 0.5, [(healthy, True, 0.75)]),
        ("an overflow that takes the scale to 1", 2.0, [(lambda w: through_half(w) * 1e5, False, 1.0)]),
        ("an overflow that takes the scale to 0.5", 1.0, [(lambda w: through_half(w) * 1e5, FloatingPointError, 1.0)]),
    ]
    steady = [  # torch's default: a healthy step leaves the scale as it is, but for one in 2000
        ("two healthy steps at an unchanged scale", 1024.0, [(healthy, True, 0.75), (healthy, True, 0.5)]),
        ("a healthy loss at scale 0.25", 0.25, [(healthy, True, 0.75)]),
    ]
    for growth_interval, sequences in ((1, growing), (2000, steady)):
        for what, scale, calls in sequences:
            if problem := _try_06_step(step, scale, calls, growth_interval):
                return f"{what}: {problem}"
    return ""


def _plain_bool(result):
    """A numpy bool or a tensor of one bool is as good an answer as a bool; anything else is left as it is."""
    import numpy as np
    import torch

    of_torch = isinstance(result, torch.Tensor) and result.dtype == torch.bool and result.numel() == 1
    return bool(result) if of_torch or isinstance(result, np.bool_) else result


def _yes_or_no(answer, *given) -> tuple:
    """(the bool that `answer` gives back, "") or (None, what went wrong)."""
    got, trouble = _ask(answer, *given, read=_plain_bool)
    if not trouble and not isinstance(got, bool):
        trouble = f"return True or False, not {_shown(got)}."
    return (None, trouble) if trouble else (got, "")


def _try_06_step(step, scale: float, calls: list, growth_interval: int) -> str:
    import torch

    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    for number, (loss, expected, after) in enumerate(calls, start=1):
        before = scaler.get_scale()
        try:
            result = _plain_bool(step(scaler, optimizer, loss(weight)))
        except FloatingPointError:
            result = FloatingPointError
        except Exception as error:
            return f"it raised {_told(error)}"
        if result is not expected:
            wanted, got = (getattr(r, "__name__", _shown(r)) for r in (expected, result))
            return f"expected {wanted}, got {got} (call {number}; scale {before:g}, now {scaler.get_scale():g})."
        if weight.item() != after:
            return (
                f"after call {number} the weight should be {after}, it is {weight.item()}; are the gradients cleared?"
            )
        if not loss(weight).isfinite() and scaler.get_scale() != before:
            return "raise before the scaler is touched: its scale has changed."
        if not loss(weight).isfinite() and weight.grad is not None and bool((weight.grad != 0).any()):
            return f"raise before backward: the gradient is {weight.grad.item()} now, and the next one is added to it."
    return ""


# --- 08 locate ------------------------------------------------------------------------------------------------------


def check_08_functions(answers: dict) -> bool:
    """Exercise 08.1: `log_sigmoid(x)`, `cosine(a, b)` and `kept_mean(log_probs, mask)` at the edge and away from it."""
    import torch

    t = lambda *values: torch.tensor(values, requires_grad=True)
    tasks = (  # (name, arguments, which of them gets the gradient, value, gradient), from float64 and pencil
        ("log_sigmoid", (t(-200.0, 1.0),), (-200.0, -0.31326169), (1.0, 0.26894142)),
        ("log_sigmoid", (t(-1000.0, -1.0),), (-1000.0, -1.31326169), (1.0, 0.73105858)),
        ("log_sigmoid", (t(200.0, 20.0),), (0.0, 0.0), (0.0, 0.0)),
        ("log_sigmoid", (t(torch.nan, 1.0),), (torch.nan, -0.31326169), None),
        ("cosine", (t(3.0, 0.0), torch.tensor([1.0, 1.0])), 0.70710678, (0.0, 0.23570226)),
        ("cosine", (torch.tensor([1.0, 1.0]), t(3.0, 0.0)), 0.70710678, (0.0, 0.23570226)),
        ("cosine", (t(0.0, 0.0), torch.tensor([1.0, 1.0])), 0.0, (0.0, 0.0)),
        ("cosine", (t(3.0, 0.0), torch.tensor([0.0, 0.0])), 0.0, (0.0, 0.0)),
        ("cosine", (t(1e-30, 0.0), torch.tensor([1.0, 1.0])), 0.70710678, None),  # its square is 0 in fp32
        ("cosine", (t(1.0, 1.0), torch.tensor([1e-30, 0.0])), 0.70710678, None),
        ("cosine", (t(1e30, 0.0), torch.tensor([1.0, 1.0])), 0.70710678, None),  # and the square of this is inf
        ("cosine", (t(torch.nan, 1.0), torch.tensor([1.0, 1.0])), torch.nan, None),
        ("kept_mean", (t(-1.0, -3.0, -torch.inf), torch.tensor([1.0, 1.0, 0.0])), -2.0, (0.5, 0.5, 0.0)),
        ("kept_mean", (t(-1.0, -3.0, -5.0), torch.tensor([1.0, 1.0, 0.0])), -2.0, (0.5, 0.5, 0.0)),
        ("kept_mean", (t(-1.0, -3.0, torch.nan), torch.tensor([1.0, 1.0, 0.0])), -2.0, (0.5, 0.5, 0.0)),
        ("kept_mean", (t(torch.nan, -3.0), torch.ones(2)), torch.nan, None),  # a NaN that counts must not be hidden
        ("kept_mean", (t(-torch.inf, -3.0), torch.ones(2)), -torch.inf, None),  # and no −inf
        ("kept_mean", (t(-1.0, -3.0), torch.zeros(2)), torch.nan, None),  # 0.0 would be an invented value
    )
    if not isinstance(answers, Mapping):
        return _verdict(f"give a dict of the three functions by name, not {_shown(answers)}.", "")
    for name, args, value, slope in tasks:
        if name not in answers:
            return _verdict(f"{name} is missing; there is {sorted(answers)}.", "")
        problem = _off(answers[name], args, value, slope)
        if problem:
            return _verdict(f"{name}({', '.join(str(_numbers(arg)) for arg in args)}) {problem}", "")
    return _verdict("", "All three are right at the edge and away from it, in value and in gradient.")


def _off(function, args, value, slope) -> str:
    """What is wrong with function(*args), in value or in the gradient of what requires one; "" if nothing is."""
    import torch

    expected, gradient = torch.tensor(value), None
    try:
        result = function(*args)
        if not isinstance(result, torch.Tensor) or result.is_complex():
            return f"gives {_shown(result)}, which is no tensor of real numbers."
        got = result.detach().float()
        same = got.numel() == expected.numel()
        if not same or not torch.allclose(got.view_as(expected), expected, atol=1e-5, equal_nan=True):
            return f"gives {_numbers(got)}, the right value is {_numbers(expected)}."
        if slope is None:
            return ""
        if result.requires_grad:
            (gradient,) = torch.autograd.grad(result.sum(), next(a for a in args if a.requires_grad), allow_unused=True)
    except Exception as error:
        return f"raises {_told(error)}"
    if gradient is None:
        return "has no gradient: on the way to its result it was cut off from its input, as by item() or detach()."
    if not torch.allclose(gradient, torch.tensor(slope), atol=1e-5):
        return f"has the gradient {_numbers(gradient)}, the right one is {_numbers(slope)}."
    return ""


def _numbers(values):
    """A number, or a flat list of them, in four digits."""
    import torch

    values = torch.as_tensor(values)
    return [_short(x) for x in values.flatten().tolist()] if values.dim() else _short(values)


def check_08_phases(answer: dict[str, str]) -> bool:
    """Exercise 08.2: the phase in which each first bad number that reached a loss, gradient or weight was born."""
    right = {"log1p": "backward", "adam": "optimizer", "row": "data"}
    hints = {
        "log1p": "log1p(−1) is −inf in forward, but the sigmoid swallows it: the loss is finite. The first bad number "
        "that reached anything is its gradient.",
        "adam": "losses and gradients were fine, and the weights were not after the step.",
        "row": "it was there before the first operation.",
    }
    phases = ("forward", "backward", "optimizer", "data")
    if not isinstance(answer, Mapping):
        return _verdict(f"give a dict with a phase for each of {', '.join(right)}, not {_shown(answer)}.", "")
    for name, phase in right.items():
        said = str(answer.get(name)).strip().lower()
        if said not in phases:
            return _verdict(f"{name}: {_shown(answer.get(name))} is none of {', '.join(phases)}.", "")
        if said != phase:
            return _verdict(f"{name} is not {answer.get(name)!r}: {hints[name]}", "")
    return _verdict("", "Three phases; each of the other tools misses at least one of them.")


# --- 07 learning rate and dirty data --------------------------------------------------------------------------------


def check_07_bad_tensors(bad_tensors) -> bool:
    """`bad_tensors(model)`: names of the parameters and buffers with a NaN or +inf; −inf alone is a mask."""
    return _verdict(_problem_07_bad_tensors(bad_tensors), "Parameters, buffers and those that no checkpoint holds.")


def _problem_07_bad_tensors(bad_tensors) -> str:
    import torch

    inf, nan = float("inf"), float("nan")
    why = {  # name: (values, kind, what to say if it is missed or reported)
        "fine": ([1.0, 2.0], "parameter", "it is fine."),
        "weight": ([1.0, nan], "parameter", "a parameter with a NaN."),
        "infinite": ([inf, 1.0], "parameter", "a parameter with an inf; an inf is no NaN, but as bad."),
        "large": ([3e38, 3e38], "parameter", "its numbers are large and finite; only a sum over them overflows."),
        "running_mean": ([nan, 1.0], "buffer", "a buffer, as BatchNorm's; parameters() does not name it."),
        "running_var": ([inf, 1.0], "buffer", "a buffer with an inf; an inf is as bad there."),
        "inv_freq": ([1.0, nan], "hidden", "a buffer that is not persistent; state_dict() does not hold it."),
        "count": ([3, 4], "buffer", "it is a count of integers."),
        "mask": ([0.0, -inf], "buffer", "its −inf is deliberate."),
        "offset": ([0.0, -inf], "parameter", "its −inf is deliberate, in a parameter too."),
        "bias": ([nan, -inf], "buffer", "its −inf may be deliberate, the NaN beside it is not."),
    }
    model = torch.nn.Module()
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor([nan])))  # of the model itself
    model.inner = torch.nn.Module()
    for name, (values, kind, _) in why.items():
        if kind == "parameter":
            model.inner.register_parameter(name, torch.nn.Parameter(torch.tensor(values)))
        else:
            model.inner.register_buffer(name, torch.tensor(values), persistent=kind != "hidden")
    found, trouble = _ask(bad_tensors, model, read=set, want="list of names")
    if trouble:
        return trouble
    bad = ("weight", "infinite", "running_mean", "running_var", "inv_freq", "bias")
    expected = {"scale", *(f"inner.{name}" for name in bad)}
    for name, (_, _, reason) in why.items():
        if (full := f"inner.{name}") in found ^ expected:
            return f"{full} {'was reported' if full in found else 'was missed'}: {reason}"
    return "" if found == expected else f"expected qualified names as {sorted(expected)}, got {sorted(found)}."


def check_07_clean_batch(clean_batch) -> bool:
    """`clean_batch(features [R, C], targets [R])`: (finite rows, their targets, number dropped); ValueError if none."""
    return _verdict(
        _problem_07_clean_batch(clean_batch), "Bad rows are out, good ones untouched, and you know how many."
    )


def _problem_07_clean_batch(clean_batch) -> str:
    import torch

    inf, nan = float("inf"), float("nan")
    rows = (  # features, target, good
        ([1.0, 2.0], 0.5, True),
        ([nan, 2.0], 0.5, False),
        ([3.0, -4.0], 1.0, True),
        ([inf, nan], 0.0, False),  # two bad numbers, one bad row
        ([5.0, 6.0], nan, False),
        ([3e38, 3e38], 0.0, True),  # finite, though a sum over the row is not
        ([-inf, inf], 1.0, False),
        ([0.0, 0.0], 0.0, True),
        ([7.0, 8.0], 1.0, True),
    )
    features, targets = torch.tensor([f for f, _, _ in rows]), torch.tensor([t for _, t, _ in rows])
    good = torch.tensor([g for _, _, g in rows])
    result, trouble = _ask(clean_batch, features.clone(), targets.clone())
    if trouble:
        return f"on a batch with five good rows: {trouble}"
    try:
        kept, labels, dropped = result
        dropped = int(dropped)
    except Exception:
        return f"return (features, targets, dropped), the last a number; got {_shown(result)}."
    if not (isinstance(kept, torch.Tensor) and isinstance(labels, torch.Tensor)):
        return f"give features and targets back as tensors, not as {type(kept).__name__} and {type(labels).__name__}."
    kept, labels = kept.cpu(), labels.cpu()
    if (kept.dim(), labels.dim()) != (2, 1):
        shapes = list(kept.shape), list(labels.shape)
        return f"features are [rows, columns] and targets [rows], as they came; yours are {shapes[0]} and {shapes[1]}."
    if kept.shape[0] != labels.shape[0]:
        return f"{kept.shape[0]} rows of features, but {labels.shape[0]} targets: they no longer belong together."
    if not (kept.isfinite().all() and labels.isfinite().all()):
        return "something that is not finite came through; look at inf as well as NaN, and at the targets too."
    if kept.shape[0] != int(good.sum()):
        return f"of these 9 rows 5 are good; you kept {kept.shape[0]}. Replace nothing, and drop whole rows only."
    if not (torch.equal(kept, features[good]) and torch.equal(labels, targets[good])):
        return "the rows kept are not the good ones, unchanged and in order."
    if dropped != 4:
        return f"4 rows were dropped, you report {dropped}."
    hopeless = [
        ([[nan, nan], [nan, nan]], [1.0, 1.0]),
        ([[nan, 2.0], [1.0, inf]], [1.0, 1.0]),
        ([[1.0, 2.0], [3.0, 4.0]], [nan, -inf]),
    ]
    for features, targets in hopeless:
        what = f"a batch without a good row (the features {features}, the targets {targets})"
        try:
            clean_batch(torch.tensor(features), torch.tensor(targets))
        except ValueError:
            continue
        except Exception as error:
            return f"{what} should raise ValueError, not {type(error).__name__}."
        return f"{what} came back empty; the mean of nothing is NaN (lesson 03). Raise ValueError."
    return ""


# --- 05 unk and pad -------------------------------------------------------------------------------------------------


def check_05_collate(collate) -> bool:
    """`collate(rows, pad_id)`: right-padded `input_ids`, `attention_mask`, `labels` [B, T]; −100 on padding only."""
    return _verdict(_problem_05_collate(collate), "Padding is known by its place, so every eos is learned.")


def _problem_05_collate(collate) -> str:
    import torch

    rows = [[5, 6, 7, 2], [8, 2], [5, 2, 6, 0, 2]]  # ids 2 and 0 are eos and unk, also inside a row
    for what, pad in {"a pad token of its own": 1, "pad = eos": 2, "pad = unk": 0}.items():
        width = max(map(len, rows))
        given, read = [list(row) for row in rows], lambda batch: dict(batch.items())
        batch, trouble = _ask(collate, given, pad, read=read, want="dict")
        if trouble:
            return f"{what}: {trouble}"
        fills = {"input_ids": pad, "attention_mask": 0, "labels": -100}
        for name, fill in fills.items():
            bodies = [[1] * len(row) for row in rows] if name == "attention_mask" else rows
            wanted = [body + [fill] * (width - len(body)) for body in bodies]
            if name not in batch:
                return f"{name} is missing; there is {sorted(batch)}."
            found = batch[name]
            if not isinstance(found, torch.Tensor):
                return f"{what}: {name} should be a tensor, not {_shown(found)}."
            if found.dim() != 2 or len(found) != len(rows):
                return f"{what}: {len(rows)} rows, but {name} has the shape {list(found.shape)}."
            if name != "attention_mask" and found.is_floating_point():
                return f"{what}: {name} holds floats; an embedding and a loss take integer ids."
            for row, got, want in zip(rows, found.tolist(), wanted, strict=True):
                if got != want:
                    return f"{what}: {name} of the row {row} should be {want}, got {got}."
    return ""


def check_05_causal_mask(causal_mask) -> bool:
    """`causal_mask(keep [B, T], dtype)`: additive mask [B, T, T] under which every row of a softmax is finite."""
    praise = "Real tokens see what they should, and padding does no harm."
    return _verdict(_problem_05_causal_mask(causal_mask), praise)


def _problem_05_causal_mask(causal_mask) -> str:
    import torch

    keep = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 1]])
    real = keep.bool()[:, :, None]  # queries that count
    allowed = torch.ones(5, 5).tril().bool() & keep.bool()[:, None, :]
    scores = torch.linspace(-1, 1, 100).reshape(4, 5, 5) + 200 * ~allowed  # what must not be seen is tempting
    scores[~allowed.any(-1)] = -32.0  # in fp16 the lowest number and this are -inf
    for dtype in (torch.float32, torch.float16):
        mask, trouble = _tensor_of(causal_mask, keep.clone(), dtype)
        if trouble:
            return f"{dtype}: {trouble}"
        if mask.dtype != dtype or mask.shape != (4, 5, 5):
            return f"expected {dtype} of shape [4, 5, 5], got {mask.dtype} of shape {list(mask.shape)}."
        moved = (mask != 0) & allowed & real
        if moved.any():
            row, query, key = moved.nonzero()[0].tolist()
            return (
                f"{dtype}: with keep {keep[row].tolist()} query {query} may see key {key}: the mask is 0 there, "
                f"yours holds {_short(mask[row, query, key])}."
            )
        weights = (scores.to(dtype) + mask).softmax(-1)
        if not weights.isfinite().all():
            row, query = (~weights.isfinite()).any(-1).nonzero()[0].tolist()
            lowest, score = mask[row, query].tolist(), scores[row, query, 0].item()
            return (
                f"{dtype}: with keep {keep[row].tolist()} query {query} gives NaN; its row of the mask is {lowest}, "
                f"and its scores are {score:g}."
            )
        seen = (weights > 1e-6) & real & ~allowed
        if seen.any():
            row, query, key = seen.nonzero()[0].tolist()
            weight, score = _short(weights[row, query, key]), scores[row, query, key].item()
            return (
                f"{dtype}: with keep {keep[row].tolist()} query {query} should not see key {key}: "
                f"its weight is {weight}, at a score of {score:.0f}."
            )
    return ""


# --- 10 case study: TPO's evaluate ----------------------------------------------------------------------------------


def check_10_nan_batches(nan_batches) -> bool:
    """`nan_batches(prompt_lengths, max_length, batch_size)`: numbers of the batches without one completion token."""
    praise = "A batch is NaN when all of its prompts fill max_length, and only then."
    return _verdict(_problem_10_nan_batches(nan_batches), praise)


def _problem_10_nan_batches(nan_batches) -> str:
    cases = [
        ([10, 12, 300, 11], 64, 1, [2]),
        ([10, 12, 300, 11], 64, 2, []),
        ([10, 12, 300, 400, 500, 11], 64, 2, [1]),
        ([10, 300], 64, 2, []),
        ([10, 63, 64, 65], 64, 1, [2, 3]),
        ([10, 11, 12, 13, 300], 64, 2, [2]),
        ([300, 400, 10, 11], 64, 4, []),
        ([300, 400], 64, 8, [0]),
        ([], 64, 2, []),
        ([20, 100, 15, 16], 16, 2, [0]),
        ([100, 200, 300], 128, 1, [1, 2]),
    ]
    for lengths, max_length, batch_size, expected in cases:
        what = f"prompts {lengths}, max_length={max_length}, batch_size={batch_size}"
        read = lambda numbers: [operator.index(number) for number in numbers]
        got, trouble = _ask(nan_batches, list(lengths), max_length, batch_size, read=read, want="list of numbers")
        if trouble:
            return f"{what}: {trouble}"
        if got != expected:
            return f"{what}: the NaN batches are {expected}, got {got}."
    return ""


def check_10_is_right(is_right) -> bool:
    """`is_right(average)`: a test of `average([(mean_loss, tokens), …])` that fails wrong ones, and only those."""
    return _verdict(
        _problem_10_is_right(is_right), "Your test lets every right function pass and catches every wrong one."
    )


def _problem_10_is_right(is_right) -> str:
    from nanlab.metrics import WeightedMean

    nan = float("nan")
    finite = lambda x: x - x == 0
    over = lambda total, count: total / count if count else nan

    def averages(kept, weight=lambda tokens: tokens, value=lambda loss: loss, nothing=nan):
        def average(batches):
            left = [(value(loss), weight(tokens)) for loss, tokens in batches if kept(loss, tokens)]
            total, count = sum(loss * w for loss, w in left), sum(w for _, w in left)
            return total / count if count else nothing

        return average

    def with_weighted_mean(batches):
        mean = WeightedMean()
        mean.update([loss for loss, _ in batches], [tokens for _, tokens in batches])
        return mean.compute()

    usual = lambda loss, tokens: finite(loss) and tokens > 0
    right = {"sums and counts": averages(usual), "WeightedMean": with_weighted_mean}
    wrong = {
        "guard (NaN becomes 0.0), then aggregate": averages(
            lambda loss, n: True, weight=lambda n: 1, value=lambda loss: loss if finite(loss) else 0.0
        ),
        "0.0 for an empty batch, all batches of one weight": lambda batches: over(
            sum(loss if n else 0.0 for loss, n in batches), len(batches)
        ),
        "0.0 for the failed batches, weighed by tokens": averages(
            lambda loss, n: True, value=lambda loss: loss if finite(loss) else 0.0
        ),
        "a mean of batch means": averages(usual, weight=lambda n: 1),
        "0.0 when nothing is left": averages(usual, nothing=0.0),
        "one that lets inf through": averages(lambda loss, n: loss == loss and n > 0),
        "one that lets −inf through": averages(lambda loss, n: loss < float("inf") and n > 0),
        "one that leaves honest zeros out": averages(lambda loss, n: usual(loss, n) and loss != 0),
        "one that counts the tokens of failed batches": lambda batches: over(
            sum(loss * n for loss, n in batches if finite(loss)), sum(n for _, n in batches)
        ),
        "one that is NaN as soon as one batch is": lambda batches: over(
            sum(loss * n for loss, n in batches), sum(n for _, n in batches)
        ),
        "one that only looks at the first batch": lambda batches: batches[0][0] if batches else nan,
        "0.0 where every batch failed": lambda batches: averages(usual, nothing=0.0 if batches else nan)(batches),
    }
    for functions, expected in ((right, True), (wrong, False)):
        for name, average in functions.items():
            got, trouble = _yes_or_no(is_right, average)
            if trouble:
                return f"for {name} your test is at fault: {trouble}"
            if got != expected:
                kind = "a right function" if expected else "a wrong function"
                return f"{kind} {'fails' if expected else 'passes'} your test: {name}."
    return ""


# --- 11 case study: DPO on Pythia-14m -------------------------------------------------------------------------------


def check_11_decides(decides) -> bool:
    """`decides(runs, factors)`: whether no two runs agree on all `factors` and differ in `run["nan"]`."""
    praise = "It finds a pair that only decides together, also where not every combination was run."
    return _verdict(_problem_11_decides(decides), praise)


def _problem_11_decides(decides) -> str:
    def table(rule, keep=lambda *levels: True):
        levels = [(a, b, c) for a in (16, 32) for b in ("adam", "sgd") for c in (0, 16, 32)]  # 16 is not always 16
        return [{"dtype": a, "optim": b, "pad": c, "nan": rule(a, b, c)} for a, b, c in levels if keep(a, b, c)]

    both = lambda a, b, c: a == 16 and b == "adam"
    either = lambda a, b, c: (a == 16) != (b == "adam")  # each alone has the same share of NaN everywhere
    tables = {
        "NaN where dtype is 16 and optim is adam": table(both),
        "NaN where exactly one of dtype 16 and optim adam": table(either),
        "NaN where dtype is 16": table(lambda a, b, c: a == 16),
        "NaN where dtype is 32 and optim is sgd": table(lambda a, b, c: a == 32 and b == "sgd"),
        "NaN everywhere": table(lambda a, b, c: True),
        "no NaN at all": table(lambda a, b, c: False),
        "half of the runs made, NaN where dtype is 16 and optim is adam": table(
            both, lambda a, b, c: (a // 16 + len(b) + c // 16) % 2 == 0
        ),
    }
    for what, runs in tables.items():
        for factors in (
            [],
            ["dtype"],
            ["optim"],
            ["pad"],
            ["dtype", "optim"],
            ["optim", "pad"],
            ["pad", "optim", "dtype"],
        ):
            expected = not any(
                one["nan"] != other["nan"] and all(one[f] == other[f] for f in factors)
                for one in runs
                for other in runs
            )
            got, trouble = _yes_or_no(decides, [dict(run) for run in runs], list(factors))
            if trouble:
                return f"{what}, factors {factors}: {trouble}"
            if got != expected:
                return f"{what}: do the factors {factors} decide? {expected}, and yours says {got}."
    return ""


def check_11_vanishing_eps(vanishing_eps) -> bool:
    """`vanishing_eps(optimizer)`: dtypes of weights in which the eps of their group is written as 0."""
    praise = "The eps is judged in the dtype it is added in, group by group."
    return _verdict(_problem_11_vanishing_eps(vanishing_eps), praise)


def _problem_11_vanishing_eps(vanishing_eps) -> str:
    import torch
    from torch.optim import SGD, Adam, AdamW

    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    weights = lambda *dtypes: [torch.zeros(2, dtype=dtype, requires_grad=True) for dtype in dtypes]
    groups = lambda **eps: [{"params": weights(getattr(torch, name)), "eps": value} for name, value in eps.items()]
    cases = {
        "AdamW, fp16, eps 1e-8": (AdamW(weights(half)), {half}),
        "Adam, fp16, eps 1e-8": (Adam(weights(half)), {half}),
        "AdamW, bf16, eps 1e-8": (AdamW(weights(brain)), set()),
        "AdamW, fp32, eps 1e-8": (AdamW(weights(single)), set()),
        "AdamW, fp16, eps 1e-4": (AdamW(weights(half), eps=1e-4), set()),
        "AdamW, fp16, eps 1e-6, below the smallest normal number and not 0": (AdamW(weights(half), eps=1e-6), set()),
        "AdamW, fp16, eps 4e-8, which rounds up": (AdamW(weights(half), eps=4e-8), set()),
        "AdamW, fp32, eps 1e-50": (AdamW(weights(single), eps=1e-50), {single}),
        "AdamW, fp16, eps 0 as given": (AdamW(weights(half), eps=0.0), set()),
        "AdamW, fused, fp16": (AdamW(weights(half), fused=True), set()),
        "SGD, fp16": (SGD(weights(half), lr=0.1), set()),
        "AdamW, weights in fp32 and fp16": (AdamW(weights(single, half)), {half}),
        "AdamW, the second of two groups": (AdamW(groups(float32=1e-8, float16=1e-8)), {half}),
        "AdamW, the first of two groups": (AdamW(groups(float16=1e-8, float32=1e-8)), {half}),
        "AdamW, two groups with an eps of their own": (AdamW(groups(float32=1e-8, float16=1e-4)), set()),
    }
    for what, (optimizer, expected) in cases.items():
        ask = {"read": set, "want": "list of dtypes", "nothing": "give a list of dtypes, which may be empty."}
        got, trouble = _ask(vanishing_eps, optimizer, **ask)
        if trouble:
            return f"{what}: {trouble}"
        if strange := [entry for entry in got if not isinstance(entry, torch.dtype)]:
            kind = type(strange[0]).__name__
            return f"{what}: give dtypes such as torch.float16; {_shown(strange[0])} is a {kind}."
        if got != expected:
            return f"{what}: expected {[str(d) for d in expected]}, got {[str(d) for d in got]}."
    return ""


# --- 09 guard -------------------------------------------------------------------------------------------------------


def check_09_step(step) -> bool:
    """`step(model, optimizer, micro_batches)`: one accumulated step, taken whole or not at all; returns which."""
    return _verdict(_problem_09_step(step), "Bit for bit as if the bad steps had never been.")


def _problem_09_step(step) -> str:
    import torch

    good = [(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5]])), (torch.tensor([[0.5, -1.0]]), torch.tensor([[1.0]]))]
    nan_row = (torch.tensor([[1.0, torch.nan]]), torch.tensor([[0.5]]))
    overflow = (torch.tensor([[1e-3, 1e21]]), torch.tensor([[1.0]]))  # weight 1e-3: loss 1e36, gradient beyond fp32
    minus = (torch.tensor([[1e-3, 1e21]]), torch.tensor([[3e18]]))  # the same with gradients of -2e15 and -inf
    large = (torch.tensor([[1.0, 1.0]]), torch.tensor([[-1.5e19]]))  # of one weight: the sum of the squares overflows
    twice = (torch.tensor([[1.5e19, 1.5e19]]), torch.tensor([[1.3e19]]))  # gradients of -2.5e38, whose sum is -inf
    pair = (torch.tensor([[0.5, -1.0], [2.0, 0.0]]), torch.tensor([[1.0], [0.0]]))
    cases = {  # micro-batches, taken
        "two good micro-batches": ([good[0], good[1]], True),
        "a NaN in the first of two": ([nan_row, good[0]], False),
        "a NaN in the last of two": ([good[0], nan_row], False),
        "a finite loss whose gradient overflows": ([good[0], overflow], False),
        "a finite loss with a gradient of -inf": ([good[0], minus], False),
        "a gradient that is finite, though its L2 norm overflows": ([good[0], large], True),
        "four good micro-batches": ([*good, *good], True),
        "gradients that are finite, though their sum overflows": ([twice], True),
        "micro-batches of one row and of two": ([good[0], pair], True),
    }
    for what, (micro_batches, taken) in cases.items():
        model, optimizer = _model_09(good)
        reference = {name: value.clone() for name, value in _state_09(model, optimizer).items()}
        if taken:
            twin, twin_optimizer = _model_09(good)
            _accumulate_09(twin, micro_batches)
            twin_optimizer.step()
            reference = _state_09(twin, twin_optimizer)
        act = lambda micro_batches, model=model, optimizer=optimizer: step(model, optimizer, micro_batches)
        result, trouble = _ask(act, micro_batches, nothing="return True or False.")
        if trouble:
            return f"{what}: {trouble}"
        result = _plain_bool(result)
        found = _state_09(model, optimizer)
        same = (lambda a, b: torch.allclose(a, b, rtol=1e-5)) if taken else torch.equal  # sums may come in any order
        if off := [n for n in reference if n not in found or not same(found[n], reference[n])]:
            should = "should be taken, as one plain step" if taken else "should leave no trace"
            got, wanted = (
                [float(f"{x:.4g}") for x in tensor.flatten().tolist()]
                for tensor in (found.get(off[0], torch.tensor(torch.nan)), reference[off[0]])
            )
            return f"{what}: the step {should}; {off[0]} is {got}, expected {wanted}."
        if any(p.grad is not None and bool((p.grad != 0).any()) for p in model.parameters()):
            return f"{what}: gradients are left over, and would be added to those of the next step."
        if result is not taken:
            return f"{what}: return {taken}, not {_shown(result)}."
    return ""


def _model_09(warm_up: list):
    """A linear model with a frozen parameter, and an AdamW with a past: one good step, then weights for the cases."""
    import torch

    model = torch.nn.Linear(2, 1)
    model.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)  # its grad is None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, -0.2]]))
        model.bias.zero_()
    _accumulate_09(model, warm_up)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, 1e-3]]))
    return model, optimizer


def _accumulate_09(model, micro_batches) -> None:
    for x, y in micro_batches:
        ((model(x) - y).square().mean() / len(micro_batches)).backward()


def _state_09(model, optimizer) -> dict:
    named = {name: p.detach() for name, p in model.named_parameters()}
    slots = {
        f"{slot} of {name}": value
        for name, p in model.named_parameters()
        for slot, value in optimizer.state.get(p, {}).items()
    }
    return named | slots


def check_09_log_entry(log_entry) -> bool:
    """`log_entry(losses)`: {"loss": mean of the finite ones (NaN without any), "not_finite": how many are not}."""
    return _verdict(_problem_09_log_entry(log_entry), "What is left out is counted, and nothing is invented.")


def _problem_09_log_entry(log_entry) -> str:
    inf, nan = float("inf"), float("nan")
    cases = [([2.0, 4.0], 3.0, 0), ([2.0, nan, 4.0], 3.0, 1), ([2.0, inf], 2.0, 1), ([-inf, 2.0, nan, 4.0], 3.0, 2)]
    cases += [([1.0, 2.0, nan, 6.0], 3.0, 1), ([-0.5, 1.0], 0.25, 0)]
    cases += [([nan, nan], nan, 2), ([inf], nan, 1), ([0.0], 0.0, 0)]
    for losses, mean, count in cases:
        entry, trouble = _ask(log_entry, list(losses), read=lambda entry: dict(entry.items()), want="dict")
        if trouble:
            return f"for {losses}: {trouble}"
        if missing := {"loss", "not_finite"} - entry.keys():
            return f"the entry lacks {sorted(missing)[0]!r}; without it nobody sees what the mean left out."
        try:
            loss, counted = float(entry["loss"] + 0), int(entry["not_finite"] + 0)  # "3.0" + 0 is an error
        except Exception:
            return f"for {losses} the entry is {_shown(entry)}; give a number for each, NaN if none is finite."
        if not (loss == mean or (loss != loss and mean != mean)):
            why = "leave out what is not finite" if count else "it is the mean of all that are finite"
            why = "an invented 0.0 would be the best loss ever" if mean != mean else why
            return f"for {losses} the loss should be {mean}, not {loss}: {why}."
        if counted != count:
            return f"in {losses} {count} are not finite, you count {counted}."
    return ""
