"""Checks of the exercises. Each takes the reader's answer, prints why it is right or what is missing, returns a bool.

A check runs the answer on inputs and compares values with a reference of its own; it never looks at how it was written.
"""

from __future__ import annotations


def _verdict(problem: str, praise: str) -> bool:
    """Print one sentence; True if there is no problem."""
    print(f"Not yet: {problem}" if problem else f"Right. {praise}")
    return not problem


# --- 01 inf and NaN -------------------------------------------------------------------------------------------------


def check_01_greedy(greedy) -> bool:
    """`greedy(logits [B, V])`: argmax of each row; ValueError naming a row without a most likely token."""
    return _verdict(_problem_01_greedy(greedy), "No exclamation marks without a word, and forbidden tokens still pass.")


def _problem_01_greedy(greedy) -> str:
    import torch

    inf, nan = float("inf"), float("nan")
    good = torch.tensor([[0.1, 2.0, 1.0], [5.0, -inf, 4.0]])
    try:
        tokens = [int(token) for token in greedy(good.clone())]
    except Exception as error:
        return f"a row with a forbidden token (−inf) is fine, yet this came: {type(error).__name__}: {error}"
    if tokens != [1, 0]:
        return f"for {good.tolist()} the most likely tokens are [1, 0], not {tokens}."
    cases = {"a NaN": [0.1, nan, 1.0], "a +inf": [0.1, inf, 1.0], "nothing but −inf": [-inf] * 3, "only NaN": [nan] * 3}
    for what, row in cases.items():
        try:
            tokens = greedy(torch.tensor([[0.1, 2.0, 1.0], [0.3, 0.2, 0.1], row]))
        except ValueError as error:
            if "2" not in str(error):
                return f"the ValueError should name the row, 2; it says {str(error)!r}."
        except Exception as error:
            return f"row 2 holds {what}: raise a ValueError; this came: {type(error).__name__}: {error}"
        else:
            return f"row 2 holds {what}, and its token came out as {int(tokens[2])} without a word."
    return ""


def check_01_bad_gradients(bad_gradients) -> bool:
    """`bad_gradients(model)`: names of the parameters with a non-finite gradient."""
    praise = "inf and NaN are both found, and large but finite gradients are left alone."
    return _verdict(_problem_01_bad_gradients(bad_gradients), praise)


def _problem_01_bad_gradients(bad_gradients) -> str:
    import torch

    inf, nan = float("inf"), float("nan")
    gradients = {  # the last is finite, though its sum overflows
        "fine": [1.0, 2.0, 3.0], "one_nan": [1.0, nan, 3.0], "all_nan": [nan] * 3, "one_inf": [1.0, 2.0, inf],
        "opposite": [-inf, 0.0, inf], "unused": None, "large": [3e38, 3e38, 3e38],
    }  # fmt: skip
    model = torch.nn.Module()
    for name, gradient in gradients.items():
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        model.register_parameter(name, parameter)
    expected = ["one_nan", "all_nan", "one_inf", "opposite"]
    try:
        found = list(bad_gradients(model))
    except Exception as error:
        return (
            f"it raised {type(error).__name__}: {error}. Compare nothing with nan, look at the elements, and mind "
            "parameters whose grad is None."
        )
    for name in gradients:
        if (name in found) != (name in expected):
            should = "is bad and was not found" if name in expected else "is not bad, but was reported"
            return f"the gradient {gradients[name]} {should}."
    return "" if found == expected else f"expected the names in the model's order, {expected}, got {found}."


# --- 02 zero std ----------------------------------------------------------------------------------------------------


def check_02_standardise(standardise) -> bool:
    """`standardise(rewards [groups, answers])`: (reward − mean) / std in each row, exactly 0 without spread."""
    praise = "flat groups are exactly 0 and honest ones keep full size, at every scale."
    return _verdict(_problem_02_standardise(standardise), praise)


def _problem_02_standardise(standardise) -> str:
    import torch

    one_step_apart = torch.tensor([0.7] * 4).view(torch.int32).add(torch.tensor([0, 1, 0, 0], dtype=torch.int32)).view(torch.float32)
    flat = {
        "seven rewards of 1.0": [1.0] * 7,
        "seven rewards of 0.1": [0.1] * 7,
        "seven rewards of 0.0": [0.0] * 7,
        "seven rewards of 1000.7": [1000.7] * 7,
        "a single answer": [0.7],
        "0.7 added up in two orders, one rounding step apart": one_step_apart.tolist(),
    }
    honest = torch.tensor([[0.0, 0.5, 1.0, 0.1], [0.1, 0.1, 0.1, 1.0]])
    for what, scale in {"": 1.0, " times 1e-6": 1e-6, " times 1000": 1000.0}.items():
        for name, row in flat.items():
            values, trouble = _tensor_of(lambda row=row, scale=scale: standardise(torch.tensor([row]) * scale))
            if trouble:
                return f"{name}{what}: {trouble}"
            if values.numel() != len(row) or (values != 0).any():
                return f"{name}{what}: expected exactly 0 for each, got {values.flatten().tolist()[:3]}."
        values, trouble = _tensor_of(lambda scale=scale: standardise(honest * scale))
        if trouble:
            return trouble
        deviation = (honest - honest.mean(1, keepdim=True)).double()
        allowed = [deviation / deviation.pow(2).sum(1, keepdim=True).div(n).sqrt() for n in (3, 4)]
        if values.shape != honest.shape or not any((values.double() - a).abs().max() < 1e-3 for a in allowed):
            wanted = [round(x, 2) for x in allowed[1][0].tolist()]
            return (
                f"the honest group {honest[0].tolist()}{what} has advantages near {wanted} "
                f"(a little smaller with n − 1), got {[round(x, 2) for x in values.flatten().tolist()[:4]]}."
            )
    return ""


def check_02_total_reward(total_reward) -> bool:
    """`total_reward(per_function [answers, functions], weights [functions])`: weighted sum of what is not NaN."""
    praise = "opinions add up, silence costs nothing, and an answer nobody scored has no reward."
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
    totals, trouble = _tensor_of(lambda: total_reward(table.clone(), weights.clone()))
    if trouble:
        return trouble
    if totals.shape != (len(cases),):
        return f"expected one number for each of the {len(cases)} answers, got shape {list(totals.shape)}."
    for (what, (row, expected)), total in zip(cases.items(), totals.tolist(), strict=True):
        if not (total == expected or (total != total and expected != expected)):
            hint = " A 0 would be a real, bad score." if expected != expected and total == 0 else ""
            return f"{what}: {row} with weights {weights.tolist()} is {expected}, got {total}.{hint}"
    return ""


def _tensor_of(call) -> tuple:
    """(what `call` returns as a tensor, "") or (None, what went wrong)."""
    import torch

    try:
        result = call()
    except Exception as error:
        return None, f"it raised {type(error).__name__}: {error}"
    return (result.detach(), "") if isinstance(result, torch.Tensor) else (None, f"expected a tensor, got {result!r}")


# --- 03 empty batch -------------------------------------------------------------------------------------------------


def check_03_token_loss(token_loss) -> bool:
    """`token_loss(per_token [B, T], mask [B, T])`: mean where the mask is 1; over nothing NaN, with a gradient of 0."""
    praise = "the value is honest and the weights are safe."
    return _verdict(_problem_03_token_loss(token_loss), praise)


def _problem_03_token_loss(token_loss) -> str:
    import torch

    nan, inf = float("nan"), float("inf")
    usual, empty = [[1, 1, 0], [1, 0, 0]], [[0, 0, 0], [0, 0, 0]]
    cases = [  # what, per-token losses, mask, value
        ("a usual batch", [[1.0, 2.0, 7.0], [6.0, 7.0, 7.0]], usual, 3.0),
        ("inf and NaN on masked tokens", [[1.0, 2.0, inf], [6.0, nan, 7.0]], usual, 3.0),
        ("a batch without a token", [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], empty, nan),
        ("no token, and inf under the mask", [[1.0, 2.0, inf], [4.0, 5.0, 6.0]], empty, nan),
    ]
    for what, numbers, mask, expected in cases:
        per_token, mask = torch.tensor(numbers, requires_grad=True), torch.tensor(mask)
        try:
            loss = token_loss(per_token, mask)
            loss.backward()
        except Exception as error:
            return f"{what}: it raised {type(error).__name__}: {error}"
        value, gradient = loss.item(), per_token.grad
        if gradient is None:
            return f"{what}: the loss is cut off from the model, no gradient arrives (under DDP that stops the run)."
        correct = mask / mask.sum().clamp(min=1)
        if not torch.allclose(gradient, correct):
            return f"{what}: the gradient should be {correct.tolist()}, got {gradient.tolist()}."
        if expected != expected and value == 0:
            return f"{what}: it reports 0.0, the best loss there is. Nothing was seen, so the value is NaN."
        if not (abs(value - expected) < 1e-6 or (value != value and expected != expected)):
            return f"{what}: the value should be {expected}, got {value}."
    return ""


def check_03_merge(merge) -> bool:
    """`merge([(mean_loss, tokens), …])` → (mean over all tokens, tokens left out because their loss is not finite)."""
    return _verdict(_problem_03_merge(merge), "each token weighs the same, and what was left out is counted.")


def _problem_03_merge(merge) -> str:
    nan, inf = float("nan"), float("inf")
    cases = [
        ("batches of unequal size", [(0.8, 10), (0.9, 30)], (0.875, 0)),
        ("the same tokens in three batches", [(0.8, 10), (0.9, 10), (0.9, 20)], (0.875, 0)),
        ("an empty batch", [(0.8, 10), (nan, 0), (0.9, 30)], (0.875, 0)),
        ("an empty batch that says 0.0", [(0.8, 10), (0.0, 0), (0.9, 30)], (0.875, 0)),
        ("a batch of 5 tokens with loss NaN", [(0.8, 10), (nan, 5), (0.9, 30)], (0.875, 5)),
        ("a batch of 7 tokens with loss inf", [(inf, 7), (0.8, 10), (0.9, 30)], (0.875, 7)),
        ("an honest loss of 0", [(0.0, 10), (0.8, 10)], (0.4, 0)),
        ("only a NaN of 5 tokens", [(nan, 5)], (nan, 5)),
        ("no batch at all", [], (nan, 0)),
    ]
    for what, batches, (mean, left_out) in cases:
        try:
            got_mean, got_left_out = merge(list(batches))
        except Exception as error:
            return f"{what}, {batches}: {type(error).__name__}: {error}"
        if not (abs(got_mean - mean) < 1e-9 or (got_mean != got_mean and mean != mean)):
            hint = " Nothing was seen; 0.0 would crown a dead model." if mean != mean and got_mean == 0 else ""
            return f"{what}, {batches}: the mean is {mean}, got {got_mean}.{hint}"
        if got_left_out != left_out:
            return f"{what}, {batches}: {left_out} tokens were left out, got {got_left_out}."
    return ""
