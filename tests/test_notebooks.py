"""The form of the notebooks: what nbval cannot see. A notebook without outputs would pass nbval unread."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import nbformat
import pytest

from tools import colab

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES, MAX_LINES, MAX_CELLS = 1_000_000, 25, 75
# Folders of the machine a notebook was executed on: home, the checkout, temporary files.
FOREIGN = re.compile(
    "|".join(re.escape(str(path)) for path in {Path.home(), ROOT, Path(tempfile.gettempdir())})
    + r"|/(home|Users|tmp)/\w|[A-Z]:\\\\Users"
)
BEATS = ["Symptom", "Predict", "Reproduce", "Locate", "Explain", "Fix", "Exercise", "Take home"]
LESSONS = [path for path in NOTEBOOKS if path.stem[:2] in {"01", "02", "03", "04", "05", "06", "07"}]


def load(path: Path):
    return nbformat.read(path, as_version=4)


def code_cells(path: Path):
    return [cell for cell in load(path).cells if cell.cell_type == "code"]


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def headings(path: Path) -> list[str]:
    text = "\n".join(cell.source for cell in load(path).cells if cell.cell_type == "markdown")
    return re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)


each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks():
    assert {"00_start_here", "13_full_run"} <= {path.stem for path in NOTEBOOKS}


@each
def test_is_valid_small_and_has_a_plain_kernel(path):
    nbformat.validate(json.loads(path.read_text(encoding="utf-8")), relax_add_props=True)
    assert path.stat().st_size < MAX_BYTES
    notebook = load(path)
    assert "widgets" not in notebook.metadata, "metadata.widgets breaks some viewers"
    assert notebook.metadata.kernelspec.name == "python3"
    assert len(notebook.cells) <= MAX_CELLS


@each
def test_was_executed_in_one_clean_run(path):
    counts = [cell.execution_count for cell in code_cells(path) if cell.source.strip()]
    assert counts == list(range(1, len(counts) + 1))


@each
def test_shows_no_error_and_no_warning(path):
    for number, cell in enumerate(code_cells(path), start=1):
        for output in cell.outputs:
            expected = "raises-exception" in tags(cell)
            assert output.output_type != "error" or expected, f"code cell {number} ends in an error"
            assert output.get("name") != "stderr" or expected, (
                f"code cell {number} writes to stderr: {output.text[:90]}"
            )


@each
def test_names_no_path_of_the_machine_it_ran_on(path):
    for number, cell in enumerate(load(path).cells):
        outputs = json.dumps([{k: v for k, v in o.items() if k != "data"} for o in cell.get("outputs", [])])
        texts = [t for o in cell.get("outputs", []) for k, t in o.get("data", {}).items() if not k.startswith("image/")]
        for text in (cell.source, outputs, json.dumps(texts)):
            found = FOREIGN.search(text)
            assert found is None, f"cell {number}: {found.group()}"


@each
def test_cells_are_short(path):
    for number, cell in enumerate(code_cells(path), start=1):
        lines = len(cell.source.splitlines())
        assert lines <= MAX_LINES or "solution" in tags(cell), f"code cell {number} has {lines} lines"


@each
def test_opens_with_what_it_is_for(path):
    first = load(path).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# {path.stem[:2]} "), "the title carries the number of the file"
    for word in ("Minutes", "Prerequisites"):
        assert word in first.source, f"the first cell does not say {word}"


@each
def test_starts_with_the_same_set_up(path):
    assert [tags(cell) for cell in code_cells(path)[:2]] == [["colab"], ["setup"]], "`make colab` puts its cell there"
    assert [c.source for c in code_cells(path)[:2]] == [c.source for c in code_cells(NOTEBOOKS[0])[:2]]


@each
def test_carries_the_cell_and_the_badge_that_the_settings_ask_for(path):
    """What `make colab` would write is what is there, so no notebook installs another commit or has a broken badge."""
    stamped = load(path)
    colab.stamp(stamped, **json.loads((ROOT / "tools" / "colab.json").read_text()), path=f"notebooks/{path.name}")
    assert stamped == load(path), "run `make colab`"
    assert not code_cells(path)[0].outputs


@each
def test_every_figure_has_alt_text(path):
    for number, cell in enumerate(code_cells(path), start=1):
        for output in cell.outputs:
            if any(kind.startswith("image/") for kind in output.get("data", {})):
                alts = [data.get("alt", "") for data in output.metadata.values() if isinstance(data, dict)]
                assert any(len(alt) > 20 for alt in alts), f"code cell {number}: a figure without alt text"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_keeps_the_beats_in_order(path):
    beats = [b for h in headings(path) for b in BEATS if h.startswith(b)]
    first = sorted(set(beats), key=beats.index)
    assert first == BEATS


@each
def test_a_solution_is_folded(path):
    for cell in code_cells(path):
        if "solution" in tags(cell):
            assert cell.metadata.get("jupyter", {}).get("source_hidden") is True


# --- the rules by which nbval forgives differences ------------------------------------------------------------------

SAMPLES = {"seconds": ("took 1.25 s and 30 ms", "took SECONDS and SECONDS")}


def test_every_sanitize_rule_parses_and_matches_a_sample():
    text = (ROOT / "tests" / "sanitize.cfg").read_text()
    assert "\r" not in text
    rules = re.findall(r"^\[(\w+)\]\nregex: (.+)\nreplace: (.*)$", text, flags=re.MULTILINE)
    assert len(rules) == text.count("regex:") == text.count("["), "nbval drops a rule silently if its form is off"
    for name, pattern, replacement in rules:
        sample, expected = SAMPLES[name]
        assert re.sub(pattern, replacement, sample) == expected
