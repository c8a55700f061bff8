"""The student edition: nothing of a solution left, and with the solutions back it is the course again."""

import json
from pathlib import Path

import nbformat
import pytest

from tools.student import REMARK, student_edition

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def is_solution(cell):
    return "solution" in cell.metadata.get("tags", [])


def source(cell):
    return REMARK.sub("", cell.source)


@each
def test_solutions_and_outputs_are_gone_and_the_checks_are_there(path):
    course = nbformat.read(path, as_version=4)
    edition = student_edition(course)
    nbformat.validate(edition)
    assert course == nbformat.read(path, as_version=4), "the course itself is left as it was"
    code = [cell for cell in edition.cells if cell.cell_type == "code"]
    assert not any(is_solution(cell) or cell.outputs or cell.execution_count for cell in code)
    checks = [cell.source for cell in course.cells if "_ = exercises.check_" in cell.source]
    assert [cell.source for cell in code if "_ = exercises.check_" in cell.source] == checks
    text = json.dumps(edition).lower()
    assert "solution" not in text.replace("resolution", "")


@each
def test_with_the_solutions_put_back_it_is_the_course(path):
    """nbval runs the course with its solutions, and each ends in an assertion: so filling them in makes it pass."""
    course = nbformat.read(path, as_version=4).cells
    rest = iter(student_edition(nbformat.read(path, as_version=4)).cells)
    filled = [cell if is_solution(cell) else next(rest) for cell in course]
    assert next(rest, None) is None
    assert [(c.cell_type, c.id, source(c)) for c in filled] == [(c.cell_type, c.id, source(c)) for c in course]
    for cell in filter(is_solution, course):
        assert "assert " in cell.source, "a solution proves itself"
