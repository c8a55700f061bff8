"""The student edition executed as a student finds it, and the newcomer's first minute."""

import re
import time

import doors
import nbformat
import pytest

from tools import student

pytestmark = [pytest.mark.doors, pytest.mark.timeout(900)]
NOTEBOOKS = sorted((doors.ROOT / "notebooks").glob("*.ipynb"))
CHECK = re.compile(r"^_ = (exercises\.check_|paper\.check\()", re.MULTILINE)  # of a lesson, of the exam
# Where there is no exercise the edition is the course without its outputs, which nbval runs anyway.
WITH_EXERCISES = [
    path.name for path in NOTEBOOKS if any(CHECK.search(cell.source) for cell in nbformat.read(path, 4).cells)
]


@pytest.fixture(scope="module")
def editions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    assert student.main(folder) == 0
    return folder


@pytest.mark.parametrize("name", WITH_EXERCISES)
def test_every_starter_fails_its_check_with_a_sentence_and_stops_nothing(name, editions):
    edition = nbformat.read(editions / name, as_version=4)
    checks = [cell.source for cell in edition.cells if CHECK.search(cell.source)]
    cells = []
    for cell in edition.cells:  # right after a check, `_` is what it returned
        cells += [cell, nbformat.v4.new_code_cell("assert _ is False")] if CHECK.search(cell.source) else [cell]
    edition.cells = cells
    nbformat.write(edition, editions / f"probed_{name}")
    done = doors.run_notebook(editions / f"probed_{name}")
    said = [doors.output_of(cell) for cell in done.cells if CHECK.search(cell.source)]
    assert len(said) == len(checks)
    assert all(re.match(r"Not yet: .{20}|Case \d+: not answered yet", text) for text in said), said


def test_from_opening_00_to_the_first_nan(tmp_path, capsys):
    """Starts a kernel and runs cells until one prints nan. The seconds are printed; the bound is a broken machine's."""
    notebook = nbformat.read(doors.ROOT / "notebooks" / "00_start_here.ipynb", as_version=4)
    code = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    first = next(i for i in code if re.search(r"\bnan\b", doors.output_of(notebook.cells[i])))
    notebook.cells = notebook.cells[: first + 1]
    nbformat.write(notebook, tmp_path / "first.ipynb")
    begin = time.perf_counter()
    done = doors.run_notebook(tmp_path / "first.ipynb")
    seconds = time.perf_counter() - begin
    with capsys.disabled():
        print(f"\nfrom opening 00 to the first NaN: {seconds:.1f} s")
    assert "eval_loss:     nan" in doors.output_of(done.cells[-1])
    assert seconds < 120
