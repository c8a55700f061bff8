"""The student edition: no solutions, no outputs, the checks in place. `make student` writes it to `build/student`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbconvert.preprocessors import ClearOutputPreprocessor, TagRemovePreprocessor

ROOT = Path(__file__).resolve().parents[1]
REMARK = re.compile(r"\n*\(A solution stands folded[^)]*\)")  # true in the course, not in this edition


def student_edition(notebook):
    """A copy of `notebook` without cells tagged `solution`, outputs and counts."""
    edition, _ = TagRemovePreprocessor(remove_cell_tags={"solution"}).preprocess(nbformat.from_dict(notebook), {})
    edition, _ = ClearOutputPreprocessor().preprocess(edition, {})
    for cell in edition.cells:
        cell.source = REMARK.sub("", cell.source)
    return edition


def main(target: Path = ROOT / "build" / "student") -> int:
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.ipynb"):
        old.unlink()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        nbformat.write(student_edition(nbformat.read(path, as_version=4)), target / path.name)
    print(f"student edition: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
