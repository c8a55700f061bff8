"""The ledger of claims: none is called true or false without a cell or a test that shows it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "claims.md"


def _load_script():
    spec = importlib.util.spec_from_file_location("make_claims", ROOT / "docs" / "make_claims.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ledger = _load_script()
DATA = ledger.load()
CLAIMS = DATA["claims"]


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim["id"] for claim in CLAIMS])
def test_a_verdict_has_a_living_proof(claim):
    assert ledger.dead_proofs([claim]) == []


def test_the_page_is_what_the_data_says():
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    assert page == ledger.render(DATA), "run: python docs/make_claims.py"


def test_the_page_links_a_section_once_a_claim():
    proof = {"notebook": "01_title", "section": "Fix", "shows": "1"}
    claim = {"id": "A1", "claim": "x", "verdict": "true", "reason": "y", "run_on": "torch"}
    row = ledger._row({**claim, "proofs": [proof, {**proof, "shows": "2"}, {**proof, "section": "Locate"}]})
    assert row.count("#Fix)") == row.count("#Locate)") == 1
    for line in ledger.render(DATA).splitlines():
        links = re.findall(r"\[[^]]+\]\([^)]+\)", line)
        assert len(links) == len(set(links)), line


def test_a_claim_that_no_article_makes_is_counted_and_marked():
    unsaid = [claim["id"] for claim in CLAIMS if claim["claim"].startswith("(Unsaid.) ")]
    assert unsaid == ["B10", "B11"], "the article shows these numbers, and does not say what they mean"
    assert f"{len(CLAIMS)} claims, {len(unsaid)} of them unsaid: " in ledger.render(DATA)


def test_ids_are_unique_and_every_claim_says_what_it_was_run_on():
    ids = [claim["id"] for claim in CLAIMS]
    assert len(ids) == len(set(ids))
    assert {claim["run_on"] for claim in CLAIMS} <= set(DATA["versions"])


@pytest.mark.skipif(not SHARED.is_file(), reason="shared/claims.md is not here")
def test_no_claim_of_the_list_is_missing():
    listed = re.findall(r"^\| ([ABC]\d+) \|", SHARED.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(listed) > 50
    assert set(listed) <= {claim["id"] for claim in CLAIMS}


# --- claims that no cell shows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eps", "log", "slope", "quotient"),  # of log(0 + eps), and of 1 / (0 + eps): finite?
    [(1e-8, False, False, False), (1e-7, True, False, False), (1e-5, True, False, False), (1.6e-5, True, True, True)],
)
def test_in_fp16_an_eps_of_1e5_is_more_than_a_log_needs_and_less_than_a_quotient_does(eps, log, slope, quotient):
    """C32. The largest fp16 number is 65504, so 1 / eps is finite from 1 / 65504 = 1.53e-5 on."""
    eps = torch.tensor(eps, dtype=torch.float16)
    x = torch.zeros((), dtype=torch.float16, requires_grad=True)
    value = (x + eps).log()
    (gradient,) = torch.autograd.grad(value, x)
    assert [t.isfinite().item() for t in (value, gradient, 1 / (0 * x + eps))] == [log, slope, quotient]


# --- the check itself: each way in which a proof can die is seen ------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    """A checkout with one notebook and one test file, and a claim that both prove."""
    cells = [
        {"cell_type": "markdown", "source": ["# 01 Title\n", "\n", "## Explain"]},
        {"cell_type": "code", "source": "", "outputs": [{"text": ["0 / 0    nan\n"]}]},
        {"cell_type": "markdown", "source": "## Fix"},
        {"cell_type": "code", "source": "", "outputs": [{"data": {"text/plain": "0.85"}}]},
    ]
    for folder in ("notebooks", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notebooks" / "01_title.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "tests" / "test_it.py").write_text("def test_one():\n    pass\n# def test_two(): once there\n")
    proofs = [
        {"notebook": "01_title", "section": "Explain", "shows": "0 / 0 nan"},
        {"notebook": "01_title", "section": "Fix", "shows": "0.85"},
        {"test": "tests/test_it.py::test_one"},
    ]
    return tmp_path, {"id": "A1", "verdict": "false", "proofs": proofs}


def test_living_proofs_pass(small):
    root, claim = small
    assert ledger.dead_proofs([claim], root) == []
    assert ledger.dead_proofs([{"id": "A2", "verdict": "open", "proofs": []}], root) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"notebook": "02_title", "section": "Explain", "shows": "0 / 0 nan"}, "no notebook"),
        ({"notebook": "01_title", "section": "Locate", "shows": "0 / 0 nan"}, "no section"),
        ({"notebook": "01_title", "section": "Fix", "shows": "0 / 0 nan"}, "does not show"),
        ({"notebook": "01_title", "section": "Explain", "shows": "0 / 0 inf"}, "does not show"),
        ({"test": "tests/test_that.py::test_one"}, "no file"),
        ({"test": "tests/test_it.py::test_two"}, "no test"),
    ],
)
def test_a_dead_proof_is_named(small, change, why):
    root, claim = small
    (problem,) = ledger.dead_proofs([{**claim, "proofs": [*claim["proofs"], change]}], root)
    assert problem.startswith("A1: ")
    assert why in problem


@pytest.mark.parametrize(
    "change", [{"proofs": []}, {"verdict": "open"}, {"verdict": "true", "proofs": []}, {"verdict": "obvious"}]
)
def test_a_verdict_without_proof_is_refused(small, change):
    root, claim = small
    (problem,) = ledger.dead_proofs([{**claim, **change}], root)
    assert problem.startswith("A1: ")
