"""The table "what you see on your version": it says what the installed set does now, and both case studies show it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import nbformat
import pytest

from nanlab.course import versions

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # bench is no part of the package
bench = importlib.import_module("bench.versions")
probe = importlib.import_module("bench.versions_probe")
TABLE = versions.load_versions()
PINNED = TABLE["columns"][-1]
NAMES = ("transformers", "trl")


def test_the_pinned_column_is_what_the_installed_set_says_now():
    answer = bench.probe()
    if any(answer["versions"][name] != PINNED[name] for name in NAMES):
        pytest.skip(f"the table has no column of {answer['versions']}")
    assert answer["seen"] == PINNED["seen"]


def test_the_columns_are_those_of_the_script_and_the_last_is_the_pinned_set():
    pinned = bench.pins()
    pairs = [tuple(column[name] for name in NAMES) for column in TABLE["columns"]]
    assert pairs == [*bench.OLDER, tuple(pinned[name] for name in NAMES)]
    assert {column["torch"] for column in TABLE["columns"]} == {pinned["torch"]}


def test_the_rows_are_those_of_the_script_and_every_column_answers_them():
    described = {row["id"]: (row["run"], row["shown"], row["lessons"]) for row in TABLE["rows"]}
    assert described == bench.ROWS
    for column in TABLE["columns"]:
        assert set(column["seen"]) == set(bench.ROWS)


def test_the_table_shows_what_the_lessons_say_about_older_releases():
    """Since transformers 5.23 the filter hides a bad batch from eval_loss; since TRL 1.9 DPO drops the row."""
    first, *_, last = (column["seen"] for column in TABLE["columns"])
    assert (first["tpo_eval_loss"], last["tpo_eval_loss"]) == ("nan", "finite")
    assert (first["dpo_rows"], last["dpo_rows"][:6]) == ("8 of 8", "7 of 8")
    assert {column["seen"]["tpo_eval_loss_unfiltered"] for column in TABLE["columns"]} == {"nan"}


def test_the_page_is_what_the_data_says():
    assert (ROOT / "docs" / "versions.md").read_text(encoding="utf-8") == bench.render(TABLE)


@pytest.mark.parametrize("name", ["10_case_tpo_evaluate", "11_case_dpo_pythia"])
def test_the_case_studies_show_their_rows(name):
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and "show_versions(" in cell.source)
    (output,) = cell.outputs
    pinned = {name: PINNED[name] for name in NAMES}
    assert output.data["text/plain"] == versions.as_text(TABLE, name[:2], pinned)
    assert output.data["text/html"] == versions.as_html(TABLE, name[:2], pinned)


# --- how it is shown ------------------------------------------------------------------------------------------------

SMALL = {
    "rows": [
        {"id": "a", "run": "one", "shown": "loss < 1", "lessons": ["10"]},
        {"id": "b", "run": "two", "shown": "rows", "lessons": []},
    ],
    "columns": [
        {"transformers": "5.0", "trl": "1.3", "torch": "2", "seen": {"a": "nan", "b": "8"}},
        {"transformers": "5.1", "trl": "1.3", "torch": "2", "seen": {"a": "finite", "b": "7"}},
    ],
}


def test_the_reader_s_column_is_marked_in_words():
    text = versions.as_text(SMALL, "10", {"transformers": "5.1", "trl": "1.3"})
    assert text.splitlines() == [
        "Yours: transformers 5.1 and trl 1.3.",
        "one: loss < 1",
        "  transformers 5.0, trl 1.3    nan",
        "  * transformers 5.1, trl 1.3  finite",
    ]
    html = versions.as_html(SMALL, "10", {"transformers": "5.1", "trl": "1.3"})
    assert "5.1<br>trl 1.3<br>yours</th>" in html
    assert "loss &lt; 1" in html
    assert "two" not in html


def test_a_reader_whose_releases_were_not_measured_is_told_how_to():
    text = versions.as_text(SMALL, None, {"transformers": "5.1", "trl": "1.4"})
    assert "transformers 5.1 and trl 1.4, is none of these" in text
    assert "*" not in text
    assert "two: rows" in text


def test_outside_a_notebook_it_is_printed(capsys):
    versions.show_versions("11")
    assert "accuracies" in capsys.readouterr().out


# --- the probe ------------------------------------------------------------------------------------------------------


def test_a_reproduction_that_fails_says_so_in_each_of_its_rows(capsys):
    def fails():
        raise AttributeError("no such kernel")

    assert probe.answers(fails, ("a", "b")) == dict.fromkeys("ab", "does not run (AttributeError)")
    assert "fails: AttributeError: no such kernel" in capsys.readouterr().err
    assert probe.answers(lambda: {"a": "nan"}, ("a",)) == {"a": "nan"}
    assert sorted(row for rows in probe.GROUPS.values() for row in rows) == sorted(bench.ROWS)


@pytest.mark.parametrize(
    ("value", "word"), [(float("nan"), "nan"), (float("-inf"), "-inf"), (0.0, "0.0"), (0.7, "finite"), (None, "absent")]
)
def test_a_number_becomes_a_word(value, word):
    assert probe.word(value) == word


def test_the_data_travels_with_the_package():
    assert json.loads(versions.VERSIONS.read_text(encoding="utf-8")) == TABLE
    assert "course/versions.json" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
