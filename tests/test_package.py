"""The package as a whole: light imports, the public surface, arrows that point one way, ranges that hold the pins."""

import ast
import json
import subprocess
import sys
from importlib import import_module as load
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "src" / "nanlab"
# A module may import those below its own floor. `errors` and `findings` (what a report looks like) are for everyone.
FLOORS = (
    {"files", "numerics", "rows", "snapshots", "tracing"},
    {"logs", "losses", "metrics", "post_mortem"},
    {"models"},
    {"trainers", "guard", "inspection", "history"},
    {"course", "full_run", "cli", "__main__"},
)
EVERYWHERE = {"errors", "findings"}
TOP = FLOORS[-1]
SURFACE = {
    "nanlab": ["locate", "watch", "preflight", "autopsy", "WeightedMean"],
    "nanlab.trainers": ["DPOTrainer", "TPOTrainer", "TokenTPOTrainer"],
    "nanlab.course": ["load_model", "load_preferences", "exercises", "cases", "plots"],
    "nanlab.course.cases": ["CASES", "Case", "exam"],
    "nanlab.numerics": ["masked_mean", "group_advantages", "token_logps"],
    "nanlab.full_run": ["train_and_evaluate"],
}


def modules():
    """Dotted name: file, of every module in the package."""
    names = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(path):
    """Modules of ours that a file imports, also inside functions and for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: write the whole name of the module"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in modules()}


def subject(module):
    return [*module.split("."), "nanlab"][1]


def test_every_module_has_a_floor():
    known = {*EVERYWHERE, *set().union(*FLOORS), "nanlab"}
    assert {subject(name) for name in modules()} == known


@pytest.mark.parametrize("module", [name for name in modules() if name != "nanlab"])
def test_imports_point_downwards(module):
    own = subject(module)
    floor = next((i for i, names in enumerate(FLOORS) if own in names), -1)
    below = set().union(*FLOORS[:floor]) if floor > 0 else set()
    allowed = below | EVERYWHERE | {own, "nanlab"} | (TOP if own in TOP else set())
    assert {subject(name) for name in imports_of(modules()[module])} <= allowed


def test_the_package_itself_imports_on_first_use_only():
    """What `nanlab/__init__.py` imports at once is nothing of ours; its names for type checkers are the lazy ones."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    at_once = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert {alias.name for node in at_once for alias in node.names} == {"importlib", "TYPE_CHECKING"}


def loaded_after(statement):
    code = f"import sys\n{statement}\nimport json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, timeout=120)
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {"torch", "transformers", "trl", "datasets", "matplotlib", "numpy", "accelerate", "peft"}


@pytest.mark.parametrize(
    ("statement", "may_load"),
    [
        ("import nanlab; dir(nanlab)", set()),
        ("import nanlab.course", set()),
        ("import nanlab.cli", set()),
        ("import nanlab.numerics, nanlab.losses, nanlab.metrics, nanlab.models", {"torch", "numpy"}),
        ("from nanlab import locate, WeightedMean", {"torch", "numpy"}),
    ],
)
def test_heavy_imports_wait(statement, may_load):
    assert loaded_after(statement) & HEAVY <= may_load


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in SURFACE for name in SURFACE[module]])
def test_the_public_surface_is_there(module, name):
    assert getattr(load(module), name) is not None


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones():
    for module in ("nanlab", "nanlab.course"):
        with pytest.raises(AttributeError, match="it has "):
            getattr(load(module), "lokate")  # noqa: B009
    assert set(SURFACE["nanlab"]) <= set(dir(load("nanlab")))


def test_no_function_shares_its_name_with_a_module_beside_it():
    """`nanlab.guard` must stay the module: a function `guard` would hide it, once it is imported lazily."""
    clashes = []
    for module, path in modules().items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        clashes += [f"{module}.{name}" for name in defined if f"{package}.{name}" in modules()]
    assert not clashes


def test_every_module_and_every_public_name_says_what_it_is():
    bare = [name for name, path in modules().items() if not ast.get_docstring(ast.parse(path.read_text()))]
    things = {f"{module}.{name}": (module, name) for module in SURFACE for name in SURFACE[module]}
    bare += [where for where, (module, name) in things.items() if not getattr(load(module), name).__doc__]
    assert not bare


def pins():
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line[:1].isalnum()]
    assert all(str(need.specifier).startswith("==") for need in found)
    return {need.name.lower(): str(need.specifier)[2:] for need in found}


def ranges():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(t for group in project["optional-dependencies"].values() for t in group)]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("need", ranges(), ids=lambda need: need.name)
def test_a_range_contains_its_pin_and_forces_nothing(need):
    assert need.specifier.contains(pins()[need.name.lower()])
    assert {spec.operator for spec in need.specifier} == {">="}  # what is installed stays where it is


def test_conda_users_get_the_same_set():
    text = (REPOSITORY / "environment.yml").read_text()
    listed = dict(line.strip(" -").split("==") for line in text.splitlines() if "==" in line)
    assert "-r requirements.txt" in text or listed == pins()
