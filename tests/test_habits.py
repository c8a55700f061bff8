"""What surrounds the code says the same thing everywhere: hooks, issue form, citation, licences, the weekly test."""

import re
from pathlib import Path

import pytest
import yaml

from tools import large_files

ROOT = Path(__file__).resolve().parents[1]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_hook_is_local_and_uses_the_environment_that_is_there():
    repos = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    hooks = {hook["id"]: hook for hook in repos[0]["hooks"]}
    assert {"ruff", "ruff-format", "notebooks", "large-files"} <= set(hooks)
    assert {hook["language"] for hook in hooks.values()} == {"system"}
    for file in re.findall(r"\S+\.py\b", hooks["notebooks"]["entry"]):
        assert (ROOT / file).is_file()
    for changed in ("notebooks/00_start_here.ipynb", "tools/colab.json"):
        assert re.search(hooks["notebooks"]["files"], changed)


def test_a_large_file_is_named_and_refused(tmp_path, capsys):
    for name, size in (("small", 10), ("large", large_files.MAX_BYTES + 1)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert large_files.main([str(tmp_path / "small"), str(tmp_path / "gone")]) == 0
    assert large_files.main([str(tmp_path / "small"), str(tmp_path / "large")]) == 1
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [str(tmp_path / "large")]


def test_the_issue_form_asks_for_what_nanlab_check_prints():
    form = yaml.safe_load(read(".github/ISSUE_TEMPLATE/bug.yml"))
    first = form["body"][0]
    assert "nanlab check" in first["attributes"]["label"]
    assert first["validations"]["required"] is True
    assert {"name", "description", "body"} <= set(form)


def test_version_and_licences_agree():
    project = dict(re.findall(r'^(version|license) = "(.+)"', read("pyproject.toml"), re.MULTILINE))
    citation = yaml.safe_load(read("CITATION.cff"))
    assert str(citation["version"]) == project["version"]
    assert citation["license"] == ["MIT", "CC-BY-4.0"]
    assert project["license"] == "MIT"
    assert read("LICENSE").startswith("MIT License")
    for name in ("README.md", "CONTRIBUTING.md", "LICENSE-text"):
        assert "MIT" in read(name)
        assert "CC BY 4.0" in read(name)


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_that_is_named_exists(file):
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", read(file))) <= targets


def test_the_weekly_test_runs_what_contributing_says():
    recipe = read("Makefile").partition("\ndrift:\n")[2].partition("\n\n")[0]
    text = read("CONTRIBUTING.md").partition("## Every week: drift")[2]
    for test in re.findall(r"`(tests/\w+\.py)`", text):
        assert test in recipe
        assert (ROOT / test).is_file()
    numbers = re.search(r"closest to the libraries, (\d+), (\d+) and (\d+)", text).groups()
    assert set(numbers) == set(re.findall(r"notebooks/(\d+)_", recipe))
