"""Instructor guide and cheat sheet speak of what is there: every lesson, real calls, plans whose minutes add up."""

import inspect
import re
from pathlib import Path

import pytest

import nanlab
from nanlab import cli, inspection, numerics

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "instructor.md").read_text(encoding="utf-8")
SHEET = (ROOT / "docs" / "cheatsheet.md").read_text(encoding="utf-8")
LESSONS = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]


def section(title):
    return re.search(rf"^## {title}.*?$(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL).group(1)


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_guide_has_something_to_say_at_every_lesson(lesson):
    said = re.search(rf"^\*\*{lesson[:2]}\.\*\* (.+)", section("At each Predict"), re.MULTILINE)
    assert said
    assert len(said.group(1)) > 60


@pytest.mark.parametrize("text", [GUIDE, SHEET], ids=["guide", "sheet"])
def test_links_lead_somewhere(text):
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize("title", ["Half a day", "A full day"])
def test_the_minutes_of_a_plan_join_and_add_up(title):
    hours, minutes = map(int, re.search(rf"## {title} \((\d+) h (\d+) min\)", GUIDE).groups())
    spans = [tuple(map(int, span)) for span in re.findall(r"^\| (\d+)–(\d+) \|", section(title), re.MULTILINE)]
    assert spans[0][0] == 0
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    assert spans[-1][1] == 60 * hours + minutes


def test_every_command_and_target_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for text in (GUIDE, SHEET):
        assert set(re.findall(r"`nanlab (\w+)", text)) <= {command.name for command in cli.COMMANDS}
        assert all(f"\n{target}:" in makefile for target in re.findall(r"`make (\w+)", text))


def test_the_sheet_is_one_page_of_symptoms_with_real_calls_and_lessons():
    rows = [row.split(" | ") for row in SHEET.splitlines() if row.startswith("| ")][1:]
    assert 10 <= len(rows) <= 18  # what fits on a page
    for symptom, birth, call, lessons in rows:
        assert min(map(len, (symptom, birth, call))) > 5
        assert all(any(name.startswith(number) for name in LESSONS) for number in re.findall(r"\d\d", lessons))
    for name in re.findall(r"`(locate|preflight|autopsy|watch|WeightedMean)\b", SHEET):
        assert getattr(nanlab, name)
    for name in re.findall(r"`nanlab\.numerics\.(\w+)`", SHEET):
        assert getattr(numerics, name)
    for code in re.findall(r"`(\w+_lost)`", SHEET):
        assert f'"{code}"' in inspect.getsource(inspection)
