"""What you see on your version: the same reproductions under several releases of transformers and TRL.

    python -m bench.versions          # every column anew, then docs/versions.md; needs a network and 3 GB of disk
    python -m bench.versions --here   # the releases that are installed, beside nothing else

One throw-away environment holds the pinned torch, datasets, accelerate and numpy; each column gets a small one on top
of it (a .pth file) with its own transformers and TRL, in which `versions_probe.py` runs. All are deleted. The table
goes to `src/nanlab/course/versions.json`, which the package carries so that notebooks can show it, and, to be read, to
`docs/versions.md`. Everything runs on the CPU: what needs a GPU is not in it. Not part of `python -m bench`: it
downloads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from nanlab.course.versions import VERSIONS, version_rows

ROOT = Path(__file__).resolve().parents[1]
PROBE = Path(__file__).with_name("versions_probe.py")
PAGE = ROOT / "docs" / "versions.md"
# transformers, trl; the pinned pair comes last. 1.14.2 is beside 1.15.0 because that one's DPO wants Triton.
OLDER = [("5.0.0", "1.3.0"), ("5.13.1", "1.9.2"), ("5.22.2", "1.14.2"), ("5.22.2", "1.15.0")]

LONG = "one row's prompt fills max_length"
# id: what was run (the reader's words), what is shown, notebooks that show the row
ROWS = {
    "tpo_eval_loss": (f"TPO, evaluate(), {LONG}", "eval_loss", ["10"]),
    "tpo_eval_loss_unfiltered": ("the same with logging_nan_inf_filter=False", "eval_loss", ["10"]),
    "tpo_eval_entropy": ("the same", "eval_entropy", ["10"]),
    "tpo_rows": ("the same", "rows evaluated", ["10"]),
    "tpo_train_loss": ("TPO trained on that row alone, with the filter / without", "loss in the log", ["10"]),
    "tpo_train_weights": ("the same", "weights afterwards", ["10"]),
    "dpo_rows": (f"DPO, evaluate(), {LONG}", "rows evaluated", ["10", "11"]),
    "dpo_eval_loss": ("the same, loss sigmoid", "eval_loss", ["10", "11"]),
    "dpo_sft_eval_loss": ("the same, loss sigmoid + sft", "eval_loss", ["10", "11"]),
    "dpo_metrics_returned": ("DPO, evaluate()", "returns eval_rewards/… and the like", ["10", "11"]),
    "dpo_fp16_adamw_torch": (
        "DPO, weights in fp16, pad = unk, adamw_torch",
        "loss, grad_norm of the last step; eval_loss, margins, accuracies",
        ["11"],
    ),
    "dpo_fp16_default": ("the same with the default optimizer", "these five", ["11"]),
    "dpo_script_gone": (
        "the script of trl#1789; evaluation_strategy is from the article's repair",
        "arguments that are gone",
        ["11"],
    ),
    "orpo_sure": ("ORPO's odds ratio, chosen answer of log-prob 0", "loss, gradient", []),
    "masked_row_library": ("left padding, mask made by transformers", "logits", []),
    "masked_row_own": ("left padding, own mask with −inf", "logits", []),
    "resume_head": ("GPT-NeoX, run resumed from a checkpoint", "weights", ["11"]),
}


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def probe(python: str | Path = sys.executable) -> dict:
    """What `versions_probe.py` says under an interpreter: `versions` and `seen`."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([python, PROBE], stdout=subprocess.PIPE, text=True, env=environment, check=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


SHARED = ("torch", "datasets", "accelerate", "numpy")


def new_environment(folder: Path, packages: dict[str, str], below: Path | None = None) -> Path:
    """A virtual environment with `packages` (name: release), on top of the one `below`. Returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if below:
        (site_packages(python) / "below.pth").write_text(f"{site_packages(below)}\n", encoding="utf-8")
    wanted = [f"{name}=={release}" for name, release in packages.items()]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", *wanted], check=True)
    return python


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


def render(table: dict) -> str:
    """`docs/versions.md`."""
    columns = table["columns"]
    head = [f"transformers {column['transformers']}<br>trl {column['trl']}" for column in columns]
    lines = [
        "# What you see on your version",
        "",
        "The same reproductions under several releases, on the CPU with torch "
        f"{columns[-1]['torch']}. Written by `python -m bench.versions`; do not edit by hand.",
        "`python -m bench.versions --here` prints what your own installation says.",
        "",
        "| what was run | shown | " + " | ".join(head) + " |",
        "|" + "---|" * (len(head) + 2),
        *("| " + " | ".join(row) + " |" for row in version_rows(table)),
        "",
        "One row of 8 has a prompt longer than `max_length`; batches of one row. Numbers of an evaluation are read",
        "from the trainer's log. *does not run*: the trainer raised this error. DPO in trl 1.15.0 computes its",
        "log-probs with a Triton kernel, which a torch for the CPU does not bring.",
        "",
    ]
    return "\n".join(lines)


def measure() -> dict:
    pinned = pins()
    columns = []
    with tempfile.TemporaryDirectory() as scratch:
        below = new_environment(Path(scratch) / "shared", {name: pinned[name] for name in SHARED})
        for transformers, trl in [*OLDER, (pinned["transformers"], pinned["trl"])]:
            print(f"transformers {transformers}, trl {trl} …", file=sys.stderr, flush=True)
            pair = {"transformers": transformers, "trl": trl}
            answer = probe(new_environment(Path(scratch) / f"{transformers}-{trl}", pair, below))
            assert {name: answer["versions"][name] for name in pair} == pair
            columns.append({**answer["versions"], "seen": answer["seen"]})
    rows = [dict(zip(("id", "run", "shown", "lessons"), (name, *row), strict=True)) for name, row in ROWS.items()]
    return {"rows": rows, "columns": columns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="ask the installed releases only, and write nothing")
    if parser.parse_args().here:
        answer = probe()
        print(", ".join(f"{name} {release}" for name, release in answer["versions"].items()))
        for name, (run, shown, _) in ROWS.items():
            print(f"{answer['seen'][name]:45} {shown}: {run}")
        return
    table = measure()
    VERSIONS.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(render(table), encoding="utf-8")
    print(f"wrote {VERSIONS.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
