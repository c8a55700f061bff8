"""What the tests of the doors share: the course in a repository of its own, environments, notebooks run in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
LOCAL = shutil.ignore_patterns(".*", "build", "dist", "kit", "runs", "node_modules", "*.egg-info", "__pycache__")


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what pytest adds to it and what would lead another Python astray."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def shell(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """Runs a command; its output, or an assertion error that holds it."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean_environment(**environment), text=True, timeout=1200,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def course_repository(folder: Path) -> str:
    """The working tree as the only commit of a new repository in `folder`; its hash."""
    shutil.copytree(ROOT, folder, ignore=LOCAL)
    shell("git", "init", "--quiet", cwd=folder)
    return commit(folder)


def commit(folder: Path) -> str:
    shell("git", "add", "--all", cwd=folder)
    author = ("-c", "user.name=NaN Lab", "-c", "user.email=nobody@example.invalid")
    shell("git", *author, "commit", "--quiet", "-m", "The course", cwd=folder)
    return shell("git", "rev-parse", "HEAD", cwd=folder).strip()


def new_environment(folder: Path) -> Path:
    """A virtual environment with pip alone; its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def site_packages(python: Path) -> Path:
    return Path(shell(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def kernel(python: Path, folder: Path) -> str:
    """A kernel named "door" of that Python, described in `folder`; the value for JUPYTER_PATH."""
    spec = folder / "kernels" / "door"
    spec.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "door", "language": "python"}))
    return str(folder)


def run_notebook(path: Path, kernel_name: str = "python3", **options):
    """Execute a notebook in its own folder without writing it; a cell that fails raises."""
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=600, kernel_name=kernel_name, resources=place, **options).execute()
    return notebook


def output_of(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def this_python() -> Path:
    return Path(sys.executable)
