"""Write `claims.md` from `claims.json`: what the three articles claim, what a run showed, and where it can be seen.

    python docs/make_claims.py

A proof is either a test, or words in the stored output of a notebook's section. The notebooks are executed and compared
by the tests, so such a proof is as alive as the cell that prints it. `dead_proofs` says which are not.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
ARTICLES = {
    "A": "`TPOTrainer.evaluate()` returns NaN while training is finite",
    "B": "All DPO metrics NaN after tuning Pythia-14m",
    "C": "inf and NaN in PyTorch",
}
UNSAID = "(Unsaid.) "
VERDICTS = ("true", "partly", "false", "open")
HEAD = """# What the articles claim, and what a run showed

Three public articles explain NaN in PyTorch and in preference training. This is every claim in them that the course
has found, put to a test. A claim has a verdict only where a cell or a test shows it; the others are *open*.
*(Unsaid.)* marks what no article says, and a reader of its numbers may take for granted. (There is no C26.)

Written by `python docs/make_claims.py` from `claims.json`; do not edit by hand.
"""


def load(path: Path = DOCS / "claims.json") -> dict:
    """The data file: `versions` by name, and `claims` with id, claim, verdict, reason, run_on and proofs."""
    return json.loads(path.read_text(encoding="utf-8"))


def dead_proofs(claims: list[dict], root: Path = ROOT) -> list[str]:
    """One line for each claim that breaks the rule: a verdict has a living proof, an open claim has none."""
    problems = []
    for claim in claims:
        if claim["verdict"] not in VERDICTS:
            problems.append(f"{claim['id']}: the verdict is one of {', '.join(VERDICTS)}, not {claim['verdict']!r}")
        if (claim["verdict"] == "open") == bool(claim["proofs"]):
            problems.append(f"{claim['id']}: is {claim['verdict']} and has {len(claim['proofs'])} proofs")
        problems += [f"{claim['id']}: {why}" for proof in claim["proofs"] if (why := _why_dead(proof, root))]
    return problems


def _why_dead(proof: dict, root: Path) -> str:
    """Why a proof is none; "" if it lives."""
    if "test" in proof:
        path, _, name = proof["test"].partition("::")
        if not (root / path).is_file():
            return f"no file {path}"
        return "" if name in _functions(root / path) else f"no test {name} in {path}"
    path = _notebook(proof, root)
    if not path.is_file():
        return f"no notebook {path.name}"
    sections = _outputs_by_section(path)
    if proof["section"] not in sections:
        return f"no section '{proof['section']}' in {path.name}"
    return (
        "" if _plain(proof["shows"]) in sections[proof["section"]] else f"{path.name} does not show '{proof['shows']}'"
    )


def _notebook(proof: dict, root: Path) -> Path:
    return root / "notebooks" / f"{proof['notebook']}.ipynb"


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _outputs_by_section(path: Path) -> dict[str, str]:
    """Text that the cells under each `##` heading print, with all white space as single blanks."""
    sections: dict[str, list[str]] = {}
    texts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            for heading in re.findall(r"^## +(.*)$", "".join(cell["source"]), flags=re.MULTILINE):
                texts = sections.setdefault(heading, [])
        for output in cell.get("outputs", []):
            texts.append("".join(output.get("text") or output.get("data", {}).get("text/plain") or ""))
    return {heading: _plain(" ".join(texts)) for heading, texts in sections.items()}


def _plain(text: str) -> str:
    return " ".join(text.split())


def render(data: dict) -> str:
    """The whole of `claims.md`."""
    parts = [HEAD, _counts(data["claims"])]
    for letter, title in ARTICLES.items():
        rows = [_row(claim) for claim in data["claims"] if claim["id"].startswith(letter)]
        parts.append(
            f"## {letter}. {title}\n\n| id | claim | verdict | why | see | on |\n|---|---|---|---|---|---|\n"
            + "\n".join(rows)
        )
    versions = (
        f"- **{name}**: " + ", ".join(f"{k} {v}" for k, v in on.items()) for name, on in data["versions"].items()
    )
    parts.append("## Versions\n\n" + "\n".join(versions))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _counts(claims: list[dict]) -> str:
    counts = {verdict: sum(claim["verdict"] == verdict for claim in claims) for verdict in VERDICTS}
    unsaid = sum(claim["claim"].startswith(UNSAID) for claim in claims)
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{len(claims)} claims, {unsaid} of them unsaid: {found}."


def _row(claim: dict) -> str:
    see = ", ".join(dict.fromkeys(_link(proof) for proof in claim["proofs"]))  # two proofs may share a section
    cells = (
        claim["id"],
        claim["claim"],
        f"**{claim['verdict']}**",
        claim["reason"],
        see,
        claim["run_on"] if see else "",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _link(proof: dict) -> str:
    if "test" in proof:
        path, _, name = proof["test"].partition("::")
        return f"[{name}](../{path})"
    anchor = proof["section"].replace(" ", "-")
    return f"[{proof['notebook'][:2]} {proof['section']}](../notebooks/{proof['notebook']}.ipynb#{anchor})"


def main() -> int:
    data = load()
    problems = dead_proofs(data["claims"])
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    (DOCS / "claims.md").write_text(render(data), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
