"""The casebook: each case fails as described and is right with its fix; the tool that sees it says the truth."""

import ast
import io
import json
import re
import time
import tokenize
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from test_tracing_models import MODELS, batch, make, stepper

from nanlab import autopsy, locate
from nanlab.course.cases import CASES, EXAMPLE, PHASES, TOOLS, TRAPS, Case, exam
from nanlab.tracing.causes import CAUSES

REPOSITORY = Path(__file__).resolve().parents[1]
CASEBOOK = REPOSITORY.parent / "shared" / "casebook.jsonl"
HOSTS = r"https://(github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|discuss\.pytorch\.org/t/[\w-]+/\d+)"
NOT_FINITE = re.compile(r"(?<![\w/])-?(nan|inf)(?!\w)|Error: ")
GIVES_AWAY = re.compile(
    r"\b(nan|inf|infinite|zero|empty|over\w*flow\w*|underflow\w*|bugs?|wrong|faults?|broken|bad|mistake|missing)\b",
    re.I,
)

OLD = Version(transformers.__version__) < Version("5.22")  # before it a head was found again on resume
marks = lambda case: pytest.mark.skipif(OLD and case.id == "transformers-43701", reason="no fault in this release")
every_case = pytest.mark.parametrize("case", [pytest.param(c, id=c.id, marks=marks(c)) for c in CASES])
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_loaded():
    """Their import is not part of any case's time."""
    import trl.experimental.tpo  # noqa: F401

    from nanlab.course import load_model

    assert transformers.Trainer
    load_model("tiny")


def harmless(case: Case) -> bool:
    return case.trap == "NaN and harmless"


# -- it fails, and the fix is right ----------------------------------------------------------------------------------
@every_case
def test_it_fails_without_the_fix(case):
    try:
        right = case.right(case.value())
    except Exception:  # a step that raises has failed
        right = False
    assert right == harmless(case)


@every_case
def test_the_fix_is_right(case):
    assert case.right(case.value(fixed=True)), f"{case.value(fixed=True)} is not {case.reference()}"


@every_case
def test_its_log_shows_the_symptom_in_three_seconds_and_again_the_same(case):
    start = time.process_time()
    log = case.log()
    assert time.process_time() - start < 3
    assert log == case.log()
    shown = bool(NOT_FINITE.search(log))
    assert shown == (case.trap != "finite and wrong"), log


def test_nan_is_never_right_and_the_tolerance_is_relative():
    case = CASES[0]
    made = lambda reference: Case(**{**vars(case), "reference": reference})
    assert not made(lambda: float("nan")).right(float("nan"))
    assert made(lambda: 1e6).right(1e6 + 1)
    assert not made(lambda: 1.0).right(1.001)
    assert not made(lambda: {"loss": 1.0}).right({"loss": torch.ones(2)})


# -- what the tools say ----------------------------------------------------------------------------------------------
@every_case
def test_its_tool_says_the_truth(case):
    said = case.see()
    assert case.exact(said), f"{case.cause}, {case.phase}, {case.source}, {case.finding} is true; it said:\n{said}"
    for name in ("op", "module") if case.tool == "locate" and said.found else ():
        wanted = getattr(case, name)
        assert not wanted or getattr(said, name) == wanted, str(said)


@every_case
def test_a_fixed_step_is_no_false_alarm(case):
    report = locate(case.fresh(fixed=True))
    assert not report.found, str(report)
    assert report.exception is None
    if case.tool == "autopsy":
        assert case.finding not in autopsy(case.value(fixed=True)["log"]).codes


def test_forty_eight_are_the_business_of_locate_and_each_other_one_says_why_not():
    """With the test above: locate is exact in all of them. The others are finite, or a log long after the step."""
    assert sum(case.tool == "locate" for case in CASES) >= 48
    assert all(case.trap == "finite and wrong" or case.finding for case in CASES if case.tool != "locate")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sixteen_healthy_steps_of_real_models_are_no_false_alarm(name, attention, dtype):
    model = make(name, attention).to(dtype)
    report = locate(stepper(model, batch(), eps=1e-8), model=model)
    assert not report.found, str(report)


# -- what the reader sees --------------------------------------------------------------------------------------------
@every_case
def test_its_code_is_short_and_gives_nothing_away(case):
    assert len(case.code.splitlines()) < 40
    tokens = tokenize.generate_tokens(io.StringIO(case.code).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    nodes = [n for n in ast.walk(ast.parse(case.code)) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    words = comments + [node.name.replace("_", " ") for node in nodes] + [ast.get_docstring(n) or "" for n in nodes]
    assert not [word for word in words if GIVES_AWAY.search(word)]
    assert "nanlab.course.cases" not in case.code


@every_case
def test_its_line_is_where_it_says(case):
    name, _, number = case.source.partition(":")
    file = REPOSITORY / "src" / "nanlab" / "course" / "cases" / name
    assert file.read_text(encoding="utf-8").splitlines()[int(number) - 1].strip() == case.line.strip()
    assert case.code.splitlines()[case.number - 1].strip() == case.line.strip()


@every_case
def test_it_is_complete(case):
    assert case.cause in CAUSES if case.cause else case.trap
    assert case.phase in PHASES
    assert case.trap in ("", *TRAPS)
    assert case.tool in TOOLS
    assert bool(case.finding) == (case.tool in ("autopsy", "preflight"))
    assert case.difficulty in (1, 2, 3)
    assert re.fullmatch(HOSTS, case.link), case.link
    assert (REPOSITORY / "notebooks" / f"{case.lesson}.ipynb").exists()
    assert 80 < len(case.symptom) < 400
    assert 80 < len(case.story) < 500
    assert case.fix_code != case.code


def test_a_line_that_is_not_there_is_an_error():
    case = Case(**{**vars(CASES[0]), "line": "x = 1"})
    with pytest.raises(ValueError, match="0 lines 'x = 1'"):
        _ = case.number
    with pytest.raises(ValueError, match="no line 'x = 1'"):
        _ = case.source


def test_grading_takes_the_three_parts_one_by_one():
    plain = next(case for case in CASES if not case.trap)
    trap = next(case for case in CASES if case.trap and case.cause)
    assert plain.grade(plain.cause, plain.phase, plain.number) == {"cause": True, "phase": True, "line": True}
    assert plain.grade() == {"cause": False, "phase": False, "line": False}
    assert plain.grade(line=plain.number + 1)["line"] is False
    assert trap.grade(trap.trap)["cause"]
    assert trap.grade(trap.cause)["cause"]


@every_case
def test_an_answer_that_can_be_defended_is_right_too(case):
    for cause, phase, line in case.also:
        assert cause in CAUSES if cause else case.trap
        assert phase in PHASES
        assert all(case.grade(cause or case.trap, phase, case.number_of(line)).values())
        assert (cause, phase, line) != (case.cause, case.phase, case.line)


# -- the book as a whole ---------------------------------------------------------------------------------------------
def test_it_has_forty_cases_and_two_in_ten_are_traps():
    assert len(CASES) >= 40
    assert len({case.id for case in CASES}) == len({case.title for case in CASES}) == len(CASES)
    assert 0.15 <= sum(bool(case.trap) for case in CASES) / len(CASES) <= 0.27
    assert {case.trap for case in CASES} == {"", *TRAPS}
    assert {case.difficulty for case in CASES} == {1, 2, 3}
    assert {case.phase for case in CASES} == set(PHASES)


def test_every_report_and_every_class_of_the_casebook_file_is_here():
    if not CASEBOOK.exists():
        pytest.skip(f"{CASEBOOK.name} is not here")
    rows = [json.loads(text) for text in CASEBOOK.read_text(encoding="utf-8").splitlines()]
    links = {case.id: case.link for case in CASES}
    assert not {row["id"] for row in rows} - set(links)
    assert all(links[row["id"]] == row["link"] for row in rows)
    assert not {row["class"] for row in rows} - {case.family for case in CASES}


def test_an_exam_is_twelve_cases_by_difficulty_the_same_for_a_seed():
    for seed in range(20):
        drawn = exam(seed)
        assert len({case.id for case in drawn}) == 12
        assert [case.id for case in exam(seed)] == [case.id for case in drawn]
        assert 2 <= sum(bool(case.trap) for case in drawn) <= 3
        assert max(Counter(case.family for case in drawn).values()) <= 2
        assert [case.difficulty for case in drawn] == sorted(case.difficulty for case in drawn)
    assert len({tuple(case.id for case in exam(seed)) for seed in range(20)}) == 20
    assert {case.id for seed in range(200) for case in exam(seed)} == {case.id for case in CASES} - {EXAMPLE}


def test_trl_still_has_the_form_that_a_story_names():
    """pt-68425: a finite value and a NaN slope where exp(x) rounds to 1."""
    orpo = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    x = torch.tensor([-1e-8], requires_grad=True)
    value = orpo.log1mexp(x)
    value.sum().backward()
    assert value.isfinite().all()
    assert x.grad.isnan().all()


def test_a_mean_over_nothing_is_the_most_frequent_birth():
    """As lesson 03 says."""
    births = Counter(case.cause for case in CASES)
    assert (len(CASES), births.most_common(1)) == (61, [("empty_mean", 12)])
