"""Findings: a sequence that reads well as text, as HTML and as JSON."""

import json
from array import array

import pytest

from nanlab.findings import Finding, Findings, amount

ROWS = Finding(
    "truncated_away", 7, "7 rows: no answer < is left.", "Drop them.", "03_empty_batch", array("q", range(7))
)
SETTING = Finding("nan_filter_on", 1, "The filter is on.", "Turn it off.", "09_guard", confidence="possible")


@pytest.fixture
def findings():
    return Findings([ROWS, SETTING], subject="20 rows")


def test_is_a_sequence_and_true_only_when_something_was_found(findings):
    assert findings
    assert len(findings) == 2
    assert findings[0] is ROWS
    assert list(findings[1:]) == [SETTING]
    assert findings.codes == ["truncated_away", "nan_filter_on"]
    assert not Findings([], subject="20 rows")


def test_text_names_each_finding_once_with_its_first_rows(findings):
    text = str(findings)
    assert text.startswith("2 findings in 20 rows\n")
    for word in ("truncated_away", "0, 1, 2, 3, 4, …", "7 rows: no answer < is left.", "→ Drop them.", "possible"):
        assert text.count(word) == 1
    assert str(Findings([], subject="20 rows")) == "Nothing found in 20 rows."
    assert str(Findings([SETTING], subject="20 rows")).startswith("1 finding in 20 rows")


def test_columns_of_the_table_are_aligned(findings):
    head, *lines = str(findings).splitlines()[2:]
    for line in lines:
        start = head.index("what")
        assert line[start - 2 : start] == "  "
        assert line[start:].strip()


def test_html_is_escaped_and_has_one_row_a_finding(findings):
    page = findings._repr_html_()
    assert page.count("<tr>") == 3
    assert "no answer &lt; is left" in page
    assert "<table" not in Findings([], subject="<b>")._repr_html_()


def test_json_keeps_every_row_in_plain_types(findings):
    back = json.loads(json.dumps(findings.to_dict(), allow_nan=False))
    assert back["unit"] == "row"
    assert back["findings"][0]["rows"] == list(range(7))
    assert back["findings"][1] == {
        "code": "nan_filter_on",
        "count": 1,
        "rows": [],
        "message": "The filter is on.",
        "fix": "Turn it off.",
        "lesson": "09_guard",
        "confidence": "possible",
    }


def test_the_unit_heads_the_column_of_places():
    assert "steps" in str(Findings([ROWS], subject="a log", unit="step"))


def test_an_amount_has_the_right_form_of_its_word():
    assert [amount(n, "row") for n in (0, 1, 2, 12_345)] == ["0 rows", "1 row", "2 rows", "12,345 rows"]
    assert [amount(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]
