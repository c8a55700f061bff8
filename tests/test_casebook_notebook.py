"""The exam: what the paper says to answers of every kind, and the notebook with the right answers filled in."""

from __future__ import annotations

import ast
import html
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from nanlab.course import exam as paper_module
from nanlab.course.cases import CASES, EXAMPLE, TRAPS, exam
from nanlab.course.exam import CHOICES, HINTS, PARTS, Note, Paper, grade, statement, truths
from nanlab.errors import InputError
from nanlab.tracing.causes import CAUSES

PATH = Path(__file__).resolve().parents[1] / "notebooks" / "12_casebook.ipynb"
OVERFLOW = "miles-1363"  # overflow, forward, line 7


def right_answer(case):
    return {"cause": case.trap or case.cause, "phase": case.phase, "line": case.number}


def flat(text):
    return " ".join(text.split())


@pytest.fixture
def paper():
    return Paper([case for case in CASES if case.id == OVERFLOW])


@pytest.fixture
def says(paper, capsys):
    """What the check prints to an answer, where right is: overflow, forward, line 7."""

    def say(**answer):
        passed = paper.check(1, answer)
        text = capsys.readouterr().out
        assert passed == text.startswith("Case 1: Right")
        assert text.count("\n") == 1, "one line"
        return text.removeprefix("Case 1: ").strip()

    return say


# --- what is said to an answer --------------------------------------------------------------------------------------


def test_a_right_answer_is_right_and_spelling_is_taken_kindly(says):
    assert says(cause="overflow", phase="forward", line=7) == "Right: overflow, forward, line 7."
    assert says(cause=" Overflow", phase="FORWARD", line="7") == "Right: overflow, forward, line 7."


def test_an_open_answer_is_no_failure_and_no_answer(says, paper):
    assert says(cause="", phase="", line=0) == says() == "not answered yet."
    assert says(cause="overflow", phase="", line=0) == "still open: phase and line."
    assert says(cause="finite and wrong", phase="", line=0) == "still open: line.", "a trap needs no phase"
    assert not paper.first


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (("overflow", "forward", 9), "The cause and the phase are right. Not line 9: look further up."),
        (("overflow", "forward", 2), "The cause and the phase are right. Not line 2: look further down."),
        (("overflow", "backward", 7), "The cause and the line are right. The phase is another one."),
        (("bad_input", "forward", 7), "The phase and the line are right. The cause is another one."),
        (("bad_input", "data", 7), "The line is right. The cause is another one. The phase is another one."),
        (("bad_input", "data", 2), "No part is right. Not line 2: look further down."),
        (
            ("zero_times_inf", "forward", 9),
            "The phase is right. The cause is another one. That may come later; where does the inf come from? "
            "Not line 9: look further up.",
        ),
        (("finite and wrong", "", 7), "The line is right. The cause is another one. The phase is another one."),
    ],
)
def test_a_wrong_answer_hears_which_parts_are_right(says, answer, expected):
    said = says(**dict(zip(PARTS, answer, strict=True)))
    assert said == f"Not yet. {expected}"
    wrong = {"overflow", "forward", "line 7"} - {str(answer[0]), str(answer[1]), f"line {answer[2]}"}
    assert not any(truth in said for truth in wrong), "and not the answer"


def test_a_slip_is_named_with_what_is_possible(says, paper):
    said = says(cause="zero_over_zer", phase="forward", line=7)
    assert said.startswith("'zero_over_zer' is not on the list of causes. Did you mean 'zero_over_zero'? The list: ")
    assert all(cause in said for cause in (*CAUSES.keys() - {"unknown"}, *TRAPS))
    assert says(cause="something else", phase="forward", line=7).startswith("'something else' is not on the list")
    assert says(cause="overflow", phase="fwd", line=7).endswith("The list: data, state, forward, backward, optimizer.")
    for line in (14, -1, 7.5, "seven", "²", None):
        assert says(cause="overflow", phase="forward", line=line) == f"line is a number from 1 to 13, not {line!r}."
    assert "'lines' is none of them" in says(cause="overflow", phase="forward", lines=7)
    assert not paper.check(1, "overflow")
    assert not paper.first


def test_any_line_of_a_statement_is_its_line():
    code = "def f(x):\n    y = g(\n        x,\n    )\n    if y:\n        return (\n            y)\n"
    assert [list(statement(code, n)) for n in (1, 2, 4, 5, 7)] == [[1], [2, 3, 4], [2, 3, 4], [5], [6, 7]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_right_answer_of_every_case_is_accepted(case):
    assert grade(case, right_answer(case)) == dict.fromkeys(PARTS, True)
    assert right_answer(case)["cause"] in CHOICES["cause"]
    if case.trap:
        assert grade(case, {"cause": case.trap, "line": case.number}) == dict.fromkeys(PARTS, True)
        if case.phase:  # a wrong one is wrong all the same
            wrong = next(p for p in CHOICES["phase"] if p and p not in {phase for _, phase, _ in truths(case)})
            assert not grade(case, {"cause": case.trap, "phase": wrong, "line": case.number})["phase"]
        others = [trap for trap in TRAPS if trap != case.trap]
        assert not any(grade(case, {"cause": trap, "line": case.number})["cause"] for trap in others)
    accepted = statement(case.code, case.number)
    assert case.number in accepted
    assert len(accepted) <= 8
    assert not grade(case, {**right_answer(case), "line": 1})["line"], "the first line only opens the code"
    for cause, phase, number in truths(case):
        assert grade(case, {"cause": cause or case.trap, "phase": phase, "line": number}) == dict.fromkeys(PARTS, True)


@pytest.mark.parametrize(
    ("name", "lines"),
    [("trl-4501", {4, 7, 12}), ("espnet-3237", {10, 11, 12, 14})],  # where it is made, used, and shown
)
def test_a_harmless_nan_may_be_named_where_it_is_made_or_first_used(name, lines):
    case = next(case for case in CASES if case.id == name)
    numbers = range(1, len(case.code.splitlines()) + 1)
    for answer in ({"cause": case.trap}, {"cause": case.cause, "phase": case.phase}):
        accepted = {n for n in numbers if all(grade(case, {**answer, "line": n}).values())}
        assert accepted == lines


def test_a_number_that_the_code_makes_is_not_in_the_data():
    """hf-13758: the loss in the log is made where a metric is computed."""
    case = next(case for case in CASES if case.id == "hf-13758")
    assert paper_module.truth(case)[0] == ("", "prose", "finite and wrong: forward, line 11")
    assert all(grade(case, {"cause": case.trap, "line": 11}).values())


@pytest.mark.parametrize(
    ("name", "answer", "lines"),
    [
        ("deepethogram-15", {"cause": "log_of_zero", "phase": "state"}, {4, 9}),  # where it is made, and first used
        ("deepethogram-15", {"cause": "bad_state", "phase": "state"}, {4, 9}),
        ("nemo-rl-4161", {"cause": "finite and wrong"}, {6, 9}),  # the noise, and the quotient of thousands
    ],
)
def test_a_number_may_be_named_where_it_is_made_or_where_it_does_harm(name, answer, lines):
    case = next(case for case in CASES if case.id == name)
    numbers = range(1, len(case.code.splitlines()) + 1)
    assert {n for n in numbers if all(grade(case, {**answer, "line": n}).values())} == lines


def test_the_other_paper_of_the_notebook_has_no_case_of_the_first(notebook):
    seeds = {int(m) for cell in notebook.cells for m in re.findall(r"^seed = (\d+)$", cell.source, re.M)}
    assert len(seeds) == 1
    assert not {case.id for case in exam(0)} & {case.id for case in exam(*seeds)}


def test_the_hints_are_about_causes_that_exist():
    for answers, causes, text in HINTS:
        assert answers <= set(CAUSES)
        assert causes <= set(CHOICES["cause"])
        assert text


def test_a_hint_names_no_category():
    """What it asks holds for any case; the words of one cause or trap would give it away."""
    told = re.compile(r"finite|slope|harmless|reach|in the log|gradient|weight", re.I)
    for _, causes, text in HINTS:
        if causes & {*TRAPS, "gradient_at_edge"}:
            assert not told.search(text), text


def test_a_hint_is_true_where_a_count_of_n_minus_1_is_zero():
    """stable-baselines3-325: the std of one number divides by n − 1 = 0, and nothing was selected away."""
    case = next(case for case in CASES if case.id == "stable-baselines3-325")
    said = paper_module.sentence(case, {"cause": "empty_mean", "phase": "forward", "line": 9})
    assert "0/0 it is, but no mean runs over nothing." in said


# --- the paper ------------------------------------------------------------------------------------------------------


def test_a_number_that_is_not_on_the_paper_is_named(paper):
    for call in (paper.post, paper.reveal, lambda number: paper.check(number, {})):
        with pytest.raises(InputError, match="no case 2: this paper has cases 1 to 1"):
            call(2)
    assert paper.case(1.0) is paper.case(1)


def test_nothing_is_revealed_before_an_answer(paper, capsys):
    case = paper.case(1)
    paper.reveal(1)
    assert capsys.readouterr().out == (
        "Case 1: answer first. Stuck? Add give_up=True to this call; it counts as no answer.\n"
    )
    paper.check(1, {"cause": "bad_input", "phase": "forward", "line": 7})
    capsys.readouterr()
    paper.reveal(1)
    said = flat(capsys.readouterr().out)
    for part in ("overflow in forward, line 7", case.line, "locate: overflow", "at line 7", case.story, case.link):
        assert flat(part) in said
    assert flat(case.fix_code) in said
    assert ".py:" not in said, "lines are those that the reader sees"
    paper.check(1, {"cause": "overflow", "phase": "forward", "line": 7})
    assert "the score keeps the answer you had" in capsys.readouterr().out
    assert list(paper.states()) == [
        ("overflow", "missed"),
        ("overflow", "right at once"),
        ("overflow", "right at once"),
    ]


def test_first_and_later_answers_are_told_apart(paper):
    assert list(paper.states()) == [("open, difficulty 2", "open")] * 3
    paper.check(1, {"cause": "overflow", "phase": "backward", "line": 9})
    assert list(paper.states()) == [("open, difficulty 2", "open")] * 3, "the cause would give the case away"
    paper.check(1, {"cause": "overflow", "phase": "forward", "line": 7})
    assert [state for _, state in paper.states()] == ["right at once", "right later", "right later"]


def test_giving_up_reveals_and_counts_as_nothing(paper, capsys):
    paper.reveal(1, give_up=True)
    assert "The story" in capsys.readouterr().out
    assert list(paper.states()) == [("overflow", "missed")] * 3


def test_the_score_names_the_weak_cause_and_its_lesson(monkeypatch, capsys):
    alts = []
    monkeypatch.setattr(paper_module.plots, "show", lambda fig, alt: alts.append((fig, alt)))
    paper = Paper(exam(0))
    paper.score()
    assert "0 of 36 parts right at once, 0 later, 0 missed, 36 open." in capsys.readouterr().out
    for number, case in enumerate(paper.cases, 1):
        paper.check(number, right_answer(case))
    capsys.readouterr()
    paper.score()
    assert capsys.readouterr().out == "36 of 36 parts right at once, 0 later, 0 missed, 0 open.\n"
    paper.first[1] = {**paper.first[1], "line": False}
    paper.score()
    case = paper.case(1)
    said = capsys.readouterr().out
    assert "35 of 36 parts right at once, 1 later" in said
    assert re.search(rf"^  {case.trap or case.cause}: \d of \d at once; read .*{case.lesson}\.ipynb", said, re.M)
    figure, alt = alts[-1]
    assert figure.axes[0].get_yticklabels()[0].get_text() == (case.trap or case.cause), "the weakest comes first"
    assert "where known" in figure.axes[0].get_ylabel(), "open cases stand there by their difficulty"
    assert "1 right later" in alt
    assert sum(bar.get_width() for bar in figure.axes[0].patches) == 36


def test_a_note_reads_well_in_both_forms():
    note = Note((("Log", "text", "a < b"), ("", "prose", "see https://x.org/a-b or notebooks/04_log_of_zero.ipynb")))
    assert repr(note) == "Log\n    a < b\n\nsee https://x.org/a-b or notebooks/04_log_of_zero.ipynb"
    page = note._repr_html_()
    assert "a &lt; b</pre>" in page
    assert (
        "<a href='https://x.org/a-b'>https://x.org/a-b</a> or <a href='04_log_of_zero.ipynb'>04_log_of_zero</a>" in page
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_post_numbers_the_lines_and_has_no_colours(case):
    note = Note((("Code", "numbered", case.code),))
    assert f"{case.number:7}  " in repr(note).splitlines()[case.number]
    assert case.line.strip() in repr(note).splitlines()[case.number]
    page = note._repr_html_()
    assert f">{case.number:3}  </span>" in page.splitlines()[case.number - 1]
    text = html.unescape(re.sub(r"<[^>]+>", "", page)).removeprefix("Code").splitlines()
    assert text == [f"{n:3}  {line}" for n, line in enumerate(case.code.splitlines(), 1)]
    styles = " ".join(re.findall(r"style=['\"]([^'\"]*)", page))
    assert not re.search(r"\bcolor|background", styles), "a dark page would hide them"


# --- the draw -------------------------------------------------------------------------------------------------------


def test_every_seed_draws_twelve_of_mixed_difficulty_with_traps():
    drawn = [exam(seed) for seed in range(200)]
    for cases in drawn:
        assert len({case.id for case in cases}) == 12
        difficulties = [case.difficulty for case in cases]
        assert len(set(difficulties)) >= 2, "easy ones and others"
        assert difficulties == sorted(difficulties)
        assert sum(bool(case.trap) for case in cases) >= 2
    papers = [frozenset(case.id for case in cases) for cases in drawn]
    assert len(set(papers)) > 190
    assert not any(EXAMPLE in paper for paper in papers), "it is worked out in the notebook"
    assert {case.id for case in CASES} - frozenset().union(*papers) <= {EXAMPLE}, "every case is drawn by some seed"
    assert [c.id for c in exam(3)] == [c.id for c in exam(3)]


# --- the notebook ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(PATH, as_version=4)


def printed(cell) -> str:
    return flat("".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") + "\n" for o in cell.outputs))


def cells(notebook, form):
    return {int(m[1]): cell for cell in notebook.cells if (m := re.search(form, cell.source))}


def test_it_is_the_exam_of_seed_0_and_gives_nothing_away(notebook):
    titles = {n: cell.source for n, cell in cells(notebook, r"^### Case (\d+): ").items()}
    assert titles == {n: f"### Case {n}: {case.title}" for n, case in enumerate(exam(0), 1)}
    answers = cells(notebook, r"^answer_(\d+) = ")
    assert len(answers) == 12
    for number, cell in answers.items():
        assert (
            cell.source
            == f'answer_{number} = {{"cause": "", "phase": "", "line": 0}}\n_ = paper.check({number}, answer_{number})'
        )
        assert printed(cell) == f"Case {number}: not answered yet."
    for number, cell in cells(notebook, r"^paper\.reveal\((\d+)\)$").items():
        assert printed(cell).startswith(f"Case {number}: answer first.")
    shown = " ".join(printed(cell) for cell in notebook.cells if cell.cell_type == "code")
    assert not [case.id for case in exam(0) if flat(case.story) in shown or flat(case.link) in shown]


def test_it_lists_every_cause_phase_and_trap(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for name in (*CHOICES["cause"], *CHOICES["phase"]):
        assert text.count(f"| `{name}` |") == 1, name


def test_every_helper_that_a_post_does_not_show_is_explained(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for case in CASES:
        names = {node.id for node in ast.walk(ast.parse(case.code)) if isinstance(node, ast.Name)}
        for name in names & case.broken.__globals__.keys():
            ours = getattr(case.broken.__globals__[name], "__module__", "").startswith("nanlab.course.")
            shown = re.search(rf"^\s*(def|class) {name}\b", case.code, re.M)
            assert not ours or shown or f"`{name}`" in text, f"{case.id} uses {name}"


def test_with_the_right_answers_it_scores_in_full_and_tells_every_story(notebook):
    filled = nbformat.from_dict(notebook)
    drawn = exam(0)
    for number, cell in cells(filled, r"^answer_(\d+) = ").items():
        cell.source = cell.source.replace(
            '{"cause": "", "phase": "", "line": 0}', repr(right_answer(drawn[number - 1]))
        )
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    client = NotebookClient(filled, timeout=300, kernel_name="python3", resources={"metadata": {"path": PATH.parent}})
    client.execute(env=environment)
    for number, cell in cells(filled, r"^answer_(\d+) = ").items():
        assert printed(cell).startswith(f"Case {number}: Right: ")
    reveals = cells(filled, r"^paper\.reveal\((\d+)\)$")
    assert len(reveals) == 12
    for number, cell in reveals.items():
        case = drawn[number - 1]
        for part in (
            case.story,
            case.fix_code,
            case.link,
            "→ the same within",
            case.line,
            paper_module.SAID[case.tool],
        ):
            assert flat(part) in printed(cell), (case.id, part)
    score = next(cell for cell in filled.cells if cell.source == "paper.score()")
    assert "36 of 36 parts right at once, 0 later, 0 missed, 0 open." in printed(score)
    assert any("image/png" in output.get("data", {}) for output in score.outputs)
