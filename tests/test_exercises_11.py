"""The checks of the case study on DPO: the right answer passes, answers that people write do not."""

from __future__ import annotations

import pytest
import torch

from nanlab.course import exercises

# --- decides: which factors determine the outcome ---------------------------------------------------------------------


def decides(runs, factors):
    ends = {}
    for run in runs:
        ends.setdefault(tuple(run[factor] for factor in factors), set()).add(run["nan"])
    return all(len(seen) == 1 for seen in ends.values())


def decides_by_pairs(runs, factors):
    return not any(a["nan"] != b["nan"] and all(a[f] == b[f] for f in factors) for a in runs for b in runs)


def each_factor_on_its_own(runs, factors):
    return all(decides(runs, [factor]) for factor in factors)


def some_factor_on_its_own(runs, factors):
    return any(decides(runs, [factor]) for factor in factors)


def some_level_is_always_nan(runs, factors):
    levels = {tuple(run[f] for f in factors) for run in runs}
    return any(all(r["nan"] for r in runs if tuple(r[f] for f in factors) == level) for level in levels)


def shares_differ(runs, factors):  # the table of shares: blind for two factors that only act together
    def share(factor, level):
        ends = [run["nan"] for run in runs if run[factor] == level]
        return sum(ends) / len(ends)

    return all(len({share(f, run[f]) for run in runs}) > 1 for f in factors)


def neighbours_only(runs, factors):
    pairs = ((runs[i], runs[i + 1]) for i in range(len(runs) - 1))
    return not any(a["nan"] != b["nan"] and all(a[f] == b[f] for f in factors) for a, b in pairs)


def compares_with_the_first(runs, factors):
    first = runs[0]
    return not any(run["nan"] != first["nan"] and all(run[f] == first[f] for f in factors) for run in runs)


def compares_sets_of_levels(runs, factors):  # dtype 16 and pad 32 are not dtype 32 and pad 16
    ends = {}
    for run in runs:
        ends.setdefault(frozenset(run[factor] for factor in factors), set()).add(run["nan"])
    return all(len(seen) == 1 for seen in ends.values())


@pytest.mark.parametrize("right", [decides, decides_by_pairs])
def test_decides_right(right, capsys):
    assert exercises.check_11_decides(right)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize(
    "wrong",
    [
        each_factor_on_its_own, some_factor_on_its_own, some_level_is_always_nan, shares_differ, neighbours_only,
        compares_with_the_first, lambda runs, factors: all(run["nan"] for run in runs), lambda runs, factors: None,
        lambda runs, factors: decides(runs, factors or ["dtype"]), compares_sets_of_levels,
        lambda runs, factors: [1] if decides(runs, factors) else [],
    ],
)  # fmt: skip
def test_decides_wrong(wrong, capsys):
    assert not exercises.check_11_decides(wrong)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Not yet: ")


# --- vanishing_eps ----------------------------------------------------------------------------------------------------


def vanishing_eps(optimizer, groups=slice(None)):
    found = set()
    for group in optimizer.param_groups[groups]:
        for p in group["params"]:
            eps = group.get("eps", 0.0)
            if eps and torch.tensor(eps, dtype=p.dtype) == 0 and not group.get("fused"):
                found.add(p.dtype)
    return list(found)


def every_fp16(optimizer):
    return {p.dtype for group in optimizer.param_groups for p in group["params"] if p.dtype == torch.float16}


def below_the_smallest_normal(optimizer):
    dtypes = {(p.dtype, g.get("eps", 0.0)) for g in optimizer.param_groups for p in g["params"] if not g.get("fused")}
    return [dtype for dtype, eps in dtypes if 0 < eps < torch.finfo(dtype).tiny]


def below_the_smallest_number(optimizer):  # from half of that on it is rounded up
    pairs = {(p.dtype, g.get("eps", 0.0)) for g in optimizer.param_groups for p in g["params"] if not g.get("fused")}
    return [dtype for dtype, eps in pairs if 0 < eps < torch.finfo(dtype).tiny * torch.finfo(dtype).eps]


def forgets_fused(optimizer):
    pairs = {(p.dtype, g.get("eps", 0.0)) for g in optimizer.param_groups for p in g["params"]}
    return [dtype for dtype, eps in pairs if eps and torch.tensor(eps, dtype=dtype) == 0]


def needs_an_eps(optimizer):
    return [p.dtype for g in optimizer.param_groups for p in g["params"] if torch.tensor(g["eps"]).to(p.dtype) == 0]


def needs_a_key_of_its_own(optimizer):  # SGD has no eps
    pairs = {(p.dtype, g["eps"]) for g in optimizer.param_groups for p in g["params"] if not g.get("fused")}
    return [dtype for dtype, eps in pairs if eps and torch.tensor(eps, dtype=dtype) == 0]


def one_weight_a_group(optimizer):
    pairs = {(g["params"][0].dtype, g.get("eps", 0.0)) for g in optimizer.param_groups if not g.get("fused")}
    return [dtype for dtype, eps in pairs if eps and torch.tensor(eps, dtype=dtype) == 0]


def last_group_wins(optimizer):
    for group in optimizer.param_groups:
        found = set(vanishing_eps(optimizer, slice(None))) & {p.dtype for p in group["params"]}
    return found


def test_vanishing_eps_right(capsys):
    assert exercises.check_11_vanishing_eps(vanishing_eps)
    assert capsys.readouterr().out.startswith("Right.")


@pytest.mark.parametrize(
    "wrong",
    [
        every_fp16, below_the_smallest_normal, below_the_smallest_number, forgets_fused, needs_an_eps,
        needs_a_key_of_its_own, one_weight_a_group, last_group_wins,
        lambda optimizer: vanishing_eps(optimizer, slice(1)), lambda optimizer: [],
    ],
)  # fmt: skip
def test_vanishing_eps_wrong(wrong, capsys):
    assert not exercises.check_11_vanishing_eps(wrong)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Not yet: ")


def test_vanishing_eps_wants_dtypes_and_says_so(capsys):
    assert not exercises.check_11_vanishing_eps(lambda optimizer: [str(dtype) for dtype in vanishing_eps(optimizer)])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "Not yet: AdamW, fp16, eps 1e-8: give dtypes such as torch.float16; 'torch.float16' is a str."
    assert not exercises.check_11_vanishing_eps(lambda optimizer: None)
    assert "a list of dtypes" in capsys.readouterr().out
