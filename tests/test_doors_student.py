"""The student edition executed as a student finds it, and the newcomer's first minute."""

import time

import doors
import nbformat
import pytest

from tools import student

pytestmark = [pytest.mark.doors, pytest.mark.timeout(900)]
NOTEBOOKS = sorted((doors.ROOT / "notebooks").glob("*.ipynb"))
CHECK = "_ = exercises.check_"


@pytest.fixture(scope="module")
def editions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    assert student.main(folder) == 0
    return folder


@pytest.mark.parametrize("name", [path.name for path in NOTEBOOKS])
def test_every_starter_fails_its_check_with_a_sentence_and_stops_nothing(name, editions):
    edition = nbformat.read(editions / name, as_version=4)
    checks = [cell.source for cell in edition.cells if CHECK in cell.source]
    cells = []
    for cell in edition.cells:  # right after a check, `_` is what it returned
        cells += [cell, nbformat.v4.new_code_cell("assert _ is False")] if CHECK in cell.source else [cell]
    edition.cells = cells
    nbformat.write(edition, editions / f"probed_{name}")
    done = doors.run_notebook(editions / f"probed_{name}")
    said = [doors.output_of(cell) for cell in done.cells if CHECK in cell.source]
    assert len(said) == len(checks)
    assert all(text.startswith("Not yet: ") and len(text) > 30 for text in said), said


def test_from_opening_00_to_the_first_nan(tmp_path, capsys):
    """Starts a kernel and runs cells until one prints nan. The seconds are printed; the bound is a broken machine's."""
    notebook = nbformat.read(doors.ROOT / "notebooks" / "00_start_here.ipynb", as_version=4)
    first = next(
        i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and " nan" in doors.output_of(cell)
    )
    notebook.cells = notebook.cells[: first + 1]
    nbformat.write(notebook, tmp_path / "first.ipynb")
    begin = time.perf_counter()
    done = doors.run_notebook(tmp_path / "first.ipynb")
    seconds = time.perf_counter() - begin
    with capsys.disabled():
        print(f"\nfrom opening 00 to the first NaN: {seconds:.1f} s")
    assert "eval_loss:     nan" in doors.output_of(done.cells[-1])
    assert seconds < 120
