"""Keywords that notebooks, package and benches pass to transformers or TRL are known to the installed version.

Read from the source, nothing is run. A call is checked when its target resolves through the file's own imports (or a
class statement) to a class or function of these libraries, or to one of ours that stands on theirs. Keywords also reach
it through `**{"name": …}`, a named dict of string keys, and through a function of the file that hands its `**more` on.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
import pytest
import trl
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
FILES = [*sorted((ROOT / "notebooks").glob("*.ipynb")), *sorted((ROOT / "src").rglob("*.py"))]
FILES += sorted((ROOT / "bench").glob("*.py"))
PINNED = re.search(r"^trl==(.+)$", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE)[1]
LIBRARIES = ("transformers", "trl")


def source_of(path: Path) -> str:
    if path.suffix == ".py":
        return path.read_text(encoding="utf-8")
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return "\n".join(line for cell in cells for line in cell.splitlines() if not line.lstrip().startswith(("%", "!")))


def names_in(tree: ast.Module) -> dict[str, object]:
    """What the imports bind, as far as they lead to the libraries or to us; a subclass counts as its base."""
    names: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in LIBRARIES:
                    module = importlib.import_module(alias.name)
                    top = importlib.import_module(alias.name.split(".")[0])
                    names[alias.asname or alias.name.split(".")[0]] = module if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in (*LIBRARIES, "nanlab"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                names[alias.asname or alias.name] = member(module, alias.name)
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.bases):
        own_init = any(isinstance(f, ast.FunctionDef) and f.name == "__init__" for f in node.body)
        if not own_init and (base := resolve(node.bases[0], names)) is not None:
            names.setdefault(node.name, base)
    return names


def member(module, name: str):
    try:
        return getattr(module, name)
    except AttributeError:
        return importlib.import_module(f"{module.__name__}.{name}")


def resolve(node: ast.expr, names: dict[str, object]) -> object | None:
    """The object that a name or a dotted name stands for; None if that cannot be read off the file."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := resolve(node.value, names)) is not None:
        return getattr(owner, node.attr, None)
    return None


@cache
def known_keywords(target: object) -> frozenset[str] | None:
    """Keywords that a class or function takes; None if it is not of the libraries, or takes any.

    `**kwargs` of a class are followed to its bases. A model's config keeps what it does not know without a word, so
    there the attributes of a default one count.
    """
    lineage = inspect.getmro(target) if inspect.isclass(target) else (target,)
    if not callable(target) or not any((getattr(c, "__module__", "") or "").startswith(LIBRARIES) for c in lineage):
        return None
    if any(getattr(c, "__name__", "") == "PreTrainedConfig" for c in lineage):
        return frozenset({*dir(target()), *inspect.signature(target).parameters, "attn_implementation"})
    known: set[str] = set()
    functions = [step.__dict__.get("__init__") for step in lineage] if inspect.isclass(target) else [target]
    for function in filter(None, functions):
        parameters = inspect.signature(function).parameters.values()
        known |= {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            return frozenset(known - {"self"})
    return None


def string_keys(node: ast.expr, dicts: dict[str, set[str]]) -> set[str]:
    """Keys that an expression after `**` brings, as far as they can be read: dict displays, unions, named dicts."""
    if isinstance(node, ast.Dict):
        keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        inner = [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
        return keys.union(*(string_keys(value, dicts) for value in inner))
    if isinstance(node, ast.BinOp):
        return string_keys(node.left, dicts) | string_keys(node.right, dicts)
    return dicts.get(node.id, set()) if isinstance(node, ast.Name) else set()


def nodes_of(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or of the file itself, without those of the functions inside it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef):
            yield from nodes_of(node)


def dicts_of(scope: ast.AST) -> dict[str, set[str]]:
    """The string keys of dicts that a scope gives a name; a parameter is a name without known keys."""
    found: dict[str, set[str]] = {}
    if isinstance(scope, ast.FunctionDef):
        found = {node.arg: set() for node in ast.walk(scope.args) if isinstance(node, ast.arg)}
    for node in nodes_of(scope):
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in getattr(node, "targets", None) or [node.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, set()).update(string_keys(node.value, found))
    return found


def functions_in(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def handed_on(tree: ast.Module, names: dict[str, object]) -> dict[str, tuple[set[str], str]]:
    """Functions of the file that pass their `**more` to a target: name → (keywords that may be given, the target)."""
    found = {}
    for function in (function for function in functions_in(tree) if function.args.kwarg):
        for call in (node for node in nodes_of(function) if isinstance(node, ast.Call)):
            known = known_keywords(resolve(call.func, names))
            expanded = [k.value for k in call.keywords if k.arg is None]
            used = {node.id for value in expanded for node in ast.walk(value) if isinstance(node, ast.Name)}
            if known is not None and function.args.kwarg.arg in used:
                own = {a.arg for a in [*function.args.args, *function.args.kwonlyargs]}
                found[function.name] = (known | own, ast.unparse(call.func))
    return found


def unknown_keywords(source: str) -> tuple[list[str], int]:
    """Keywords that the installed version does not know, "Target(keyword=…), line n"; and how many were looked at."""
    tree = ast.parse(source)
    names = names_in(tree)
    through = handed_on(tree, names)
    unknown, looked_at = [], 0
    for scope in (tree, *functions_in(tree)):
        dicts = dicts_of(tree) | dicts_of(scope)
        for call in (node for node in nodes_of(scope) if isinstance(node, ast.Call)):
            known, target = known_keywords(resolve(call.func, names)), ast.unparse(call.func)
            if known is None and target in through:
                known, via = through[target]
                target = f"{via} through {target}"
            if known is None:
                continue
            given = {k.arg for k in call.keywords if k.arg}
            given = given.union(*(string_keys(k.value, dicts) for k in call.keywords if k.arg is None))
            looked_at += len(given)
            unknown += [f"{target}({name}=…), line {call.lineno}" for name in sorted(given - known)]
    return unknown, looked_at


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_keyword_is_known_to_the_installed_version(path):
    if path.parent.name == "bench" and Version(trl.__version__) < Version(PINNED):
        pytest.skip("a bench compares with the pinned TRL, and may use what is new in it")
    unknown, _ = unknown_keywords(source_of(path))
    assert unknown == []


def test_it_looks_at_most_of_what_the_course_uses():
    looked_at = {path.stem: unknown_keywords(source_of(path))[1] for path in FILES}
    assert looked_at["10_case_tpo_evaluate"] > 15
    assert looked_at["11_case_dpo_pythia"] > 30
    assert looked_at["materials"] > 5
    assert sum(looked_at.values()) > 300


PLANTED = [
    "from trl import DPOConfig\nDPOConfig('runs', evaluation_strategy='no')",
    "import trl\ntrl.DPOTrainer(model, tokenizer=tokenizer)",
    "from trl.experimental import tpo\ntpo.TPOConfig('runs', **{'max_prompt_length': 8})",
    "from trl.experimental.tpo import TPOTrainer as TRL\nclass Own(TRL):\n    pass\nOwn(model, tokenizer=None)",
    "from nanlab.trainers import TokenTPOConfig as C\nsizes = {'max_steps': 1, 'no_cuda': 1}\nC('r', **sizes)",
    "from nanlab.trainers import DPOTrainer\nDPOTrainer(model, tokenizer=tokenizer)",
    "from transformers import TrainingArguments\ndef args(**more):\n    TrainingArguments(**more)\nargs(no_cuda=1)",
    "from transformers import GPTNeoXConfig\nGPTNeoXConfig(hidden_sizes=8)",
    "from trl.trainer.utils import selective_log_softmax\nselective_log_softmax(logits, labels=labels)",
]


@pytest.mark.parametrize("source", PLANTED)
def test_a_planted_wrong_keyword_is_found(source):
    (found,) = unknown_keywords(source)[0]
    assert found.split("(")[1].split("=")[0] in source


def test_what_cannot_be_read_off_the_file_is_left_alone():
    source = "from transformers import AutoModelForCausalLM as A\nA.from_pretrained(x, dtype=y)\nother(tokenizer=1)"
    assert unknown_keywords(source) == ([], 0)
