"""What a report says: story, independent births, growth, the exception, the card; and the size of the code."""

import ast
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from marks import lines_of
from torch import nn

import nanlab.tracing
from nanlab import locate
from nanlab.errors import InputError
from nanlab.tracing import Report

line = lines_of(__file__)
FOLDER = Path(nanlab.tracing.__file__).parent


def test_the_story_goes_from_the_inf_to_the_nan_to_where_it_surfaced():
    w = nn.Parameter(torch.zeros(4))

    def step():
        logs = torch.log(w)  # story 1
        loss = (logs * torch.tensor([0.0, 1, 1, 1])).sum()  # story 2
        loss.backward()

    report = locate(step)
    assert (report.cause, report.kind, report.source) == ("log_of_zero", "inf", line("story 1"))
    assert ["log" in report.story[0], "mul" in report.story[1], "loss" in report.story[-1]] == [True] * 3
    assert line("story 2") in report.story[1]


def test_independent_births_are_counted_and_listed_and_the_earliest_is_the_verdict():
    a, b, c = (nn.Parameter(torch.zeros(3)) for _ in range(3))

    def step():
        first = (a / (a * 0)).sum()  # first birth
        second = torch.exp(b + 200).sum()  # second birth
        third = torch.log(c).sum()  # third birth
        (first + second + third).backward()

    report = locate(step)
    assert report.source == line("first birth")
    assert [(o.cause, o.source) for o in report.others] == [
        ("overflow", line("second birth")),
        ("log_of_zero", line("third birth")),
    ]
    assert "2 more" in str(report)


def test_what_follows_from_the_verdict_is_not_counted_as_another():
    w = nn.Parameter(torch.zeros(3))
    layer = nn.Linear(3, 3)

    def step():
        (layer(torch.log(w)).tanh() - layer(torch.log(w))).sum().backward()  # follows

    report = locate(step, model=layer)
    assert report.source == line("follows")
    assert report.others == []


def test_the_growth_of_the_parameters_is_shown_up_to_the_birth():
    w = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=1e10)

    def step():
        for _ in range(6):
            optimizer.zero_grad()
            (w**2).sum().backward()
            optimizer.step()

    report = locate(step)
    assert report.cause == "overflow"
    assert report.growth[0] == 1
    assert all(b > 1e9 * a for a, b in zip(report.growth, report.growth[1:], strict=False))
    assert "Largest |parameter|" in str(report)


def test_overflow_says_how_far_past_the_largest_number():
    report = locate(lambda: (torch.full((3,), 600.0).half() * 600).sum())
    assert report.cause == "overflow"
    factor = float(re.search(r"([\d.]+) times that", report.explanation)[1])
    assert factor == pytest.approx(600 * 600 / 65504, rel=0.01)
    assert "65504" in report.explanation


def test_underflow_of_the_optimizer_says_what_eps_became():
    w = nn.Parameter(torch.ones(3).half())
    optimizer = torch.optim.AdamW([w], eps=1e-8, foreach=False)

    def step():
        (w.float() * 1e-5).sum().backward()
        optimizer.step()

    report = locate(step)
    assert report.cause == "optimizer_underflow"
    assert "eps is 1e-08, which float16 holds as 0" in report.explanation


def test_a_step_that_raises_gives_the_report_up_to_there():
    def step():
        probs = torch.softmax(torch.full((2, 3), -math.inf), -1)  # before raising
        return torch.multinomial(probs, 1)

    report = locate(step)
    assert isinstance(report.exception, RuntimeError)
    assert (report.cause, report.source) == ("masked_row", line("before raising"))
    assert "RuntimeError" in str(report)


def test_an_exception_without_any_nan_is_reported_too():
    report = locate(lambda: torch.ones(2) @ torch.ones(3))
    assert not report.found
    assert "size mismatch" in str(report) or "inconsistent" in str(report)


def test_the_step_runs_once():
    calls = []
    locate(lambda: calls.append(1))
    assert calls == [1]


def test_hooks_and_patches_are_gone_afterwards():
    before = torch.autograd.backward
    locate(lambda: 1 / 0)
    assert torch.autograd.backward is before
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_step_under_locate_computes_what_it_computes_without():
    def train(watched: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.randn(16, 4)

        def step():
            for _ in range(3):
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                optimizer.step()

        locate(step) if watched else step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(True), train(False))


def test_the_card_is_self_contained_escaped_and_takes_its_colours_from_the_page():
    report = Report(True, "unknown", "nan", "forward", "<op>", "m", "a.py:1", story=["<script>alert(1)</script>"])
    card = report._repr_html_()
    assert "<script>" not in card
    assert "&lt;script&gt;" in card
    assert "color:inherit" in card
    assert "background:transparent" in card
    assert not re.search(r"(https?:|src=|<link)", card)
    assert card.count("<section") == card.count("</section>") == 1


def test_nothing_found_reads_so():
    report = locate(lambda: torch.ones(2).sum())
    assert not report.found
    assert "nothing found" in str(report)
    assert "nothing found" in report._repr_html_()


def test_a_failure_of_the_tracer_itself_does_not_break_the_step(monkeypatch):
    def broken(birth):
        raise KeyError("no such row")

    monkeypatch.setattr("nanlab.tracing.tracer.diagnose", broken)
    report = locate(lambda: torch.log(torch.zeros(2)).sum())  # not looked at
    assert report.exception is None
    assert (report.found, report.cause, report.op, report.source) == (True, "unknown", "log", line("not looked at"))
    assert "no such row" in report.explanation


def test_a_notebook_cell_has_a_readable_line():
    for file in ("<cell>", f"{tempfile.gettempdir()}/ipykernel_12/345.py", "<ipython-input-3-abc>"):
        scope = {"torch": torch}
        exec(compile("def step():\n    x = torch.zeros(2)\n    return (x / x).sum()", file, "exec"), scope)
        assert locate(scope["step"]).source == "cell:3"


def test_names_come_from_the_step_itself_when_none_are_given():
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"x": torch.full((2, 4), math.nan)}

    def step():
        return model(batch["x"]).sum()

    report = locate(step)
    assert report.module == "0"
    assert report.op == "batch['x']"


def test_a_dict_of_tensors_is_named_by_its_keys():
    batch = {"x": torch.tensor([[1.0, 2.0], [3.0, math.inf]])}
    report = locate(lambda: batch["x"].sum(), batch=batch)
    assert (report.cause, report.phase, report.op, report.rows) == ("bad_input", "data", "batch x", [1])


def test_what_is_neither_a_step_nor_a_trainer_is_refused_in_one_line():
    with pytest.raises(InputError, match="function without arguments") as error:
        locate(torch.ones(2))
    assert "\n" not in str(error.value)


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank lines, no comments, no docstrings."""
    text = path.read_text(encoding="utf-8")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(t.strip()) and not t.strip().startswith("#") and i not in docstrings for i, t in lines)


def test_the_code_does_not_grow_unnoticed():
    sizes = {path.name: code_lines(path) for path in FOLDER.glob("*.py")}
    assert sum(sizes.values()) <= 1562, sizes  # with the imports of thirteen files


def test_tracing_imports_nothing_of_ours_but_the_error():
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanlab"):
                assert node.module == "nanlab.errors" or node.module.startswith("nanlab.tracing"), (
                    path.name,
                    node.module,
                )


def test_importing_it_does_not_import_transformers():
    code = (
        "import sys, nanlab.tracing; print(sorted(m for m in ('transformers', 'trl', 'datasets') if m in sys.modules))"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_two_buffers_that_were_bad_alike_are_named_in_the_same_order_every_time():
    norm = nn.BatchNorm1d(4).eval()
    norm.running_mean[1] = norm.running_var[1] = torch.nan
    x = torch.randn(3, 4)
    assert {locate(lambda: norm(x).sum(), model=norm).op for _ in range(20)} == {"buffer running_mean"}


def test_a_failure_while_remembering_does_not_break_the_step_either(monkeypatch):
    def broken(*_):
        raise KeyError("no such storage")

    monkeypatch.setattr("nanlab.tracing.tracer.Tracer.remember", broken)
    report = locate(lambda: torch.log(torch.zeros(2)).sum())  # not remembered
    assert report.exception is None
    assert (report.found, report.source) == (True, line("not remembered"))


def test_what_an_operation_refused_is_forgotten_once_the_step_went_on():
    w = nn.Parameter(torch.zeros(2))

    def step():
        try:
            torch.log(w) @ torch.ones(3)
        except RuntimeError:
            (w + 1).sum().backward()
        raise LookupError("of another reason")

    report = locate(step)
    assert not report.found, str(report)
    assert isinstance(report.exception, LookupError)
