"""Time and peak memory of `nanlab.numerics.token_logps` beside TRL's `selective_log_softmax`.

    python bench/token_logps.py

Forward and backward on the same logits. Times: both run in turn, median of the runs. Memory: a fresh process each, the
growth of its peak resident memory (on CUDA: of the allocator's peak) over what it held before the call; the gradient
of the logits, which both must return, is part of it. Once with every token used, once with the first half masked, as a
prompt is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# batch, tokens, vocabulary: a Pythia batch, a SmolLM2 batch, the course's tiny model
SHAPES = {"warm-up": (1, 2, 8), "pythia": (4, 256, 50304), "smollm2": (6, 128, 49152), "tiny": (12, 64, 1024)}
MASKED = {"all": 0.0, "half": 0.5}  # how many tokens are used: the share that is masked
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def ours() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from nanlab.numerics import token_logps

    return token_logps


def theirs() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from trl.trainer.utils import selective_log_softmax

    return lambda logits, labels, mask: selective_log_softmax(logits, labels, row_mask=mask)


SIDES = {"nanlab": ours, "trl": theirs}


class Case(NamedTuple):
    shape: str
    dtype: str
    used: str
    device: str


def batch(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    shape, device = SHAPES[case.shape], case.device
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(shape, dtype=DTYPES[case.dtype], device=device).normal_(generator=generator).requires_grad_()
    labels = torch.randint(shape[-1], shape[:-1], generator=generator, device=device)
    mask = torch.ones(shape[:-1], dtype=torch.bool, device=device)
    mask[:, : int(MASKED[case.used] * shape[1])] = False
    return logits, labels, mask


def step(function: Callable, logits: Tensor, labels: Tensor, mask: Tensor) -> float:
    """One forward and backward; seconds."""
    logits.grad = None
    start = time.perf_counter()
    function(logits, labels, mask).sum().backward()
    if logits.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def times(case: Case, runs: int) -> dict[str, float]:
    """Median seconds a step for each side, run in turn so that a slow moment hits both."""
    functions = {side: make() for side, make in SIDES.items()}
    inputs = batch(case)
    seconds = {side: [] for side in functions}
    for run in range(runs + 1):
        for side, function in functions.items():
            taken = step(function, *inputs)
            if run:  # the first one warms up
                seconds[side].append(taken)
    return {side: statistics.median(values) for side, values in seconds.items()}


def peak_growth(side: str, case: Case) -> float:
    """MiB by which the peak of this process grows over what it held before the call."""
    function = SIDES[side]()
    step(function, *batch(case._replace(shape="warm-up")))  # lazy initialisation is not what we measure
    inputs = batch(case)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(function, *inputs)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts over from what is held now
    before = _status("VmRSS")
    step(function, *inputs)
    return (_status("VmHWM") - before) / 2**10


def _status(field: str) -> int:
    """A field of this process's memory status, in KiB (Linux)."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def peak_in_new_process(side: str, case: Case, threads: int) -> float:
    command = [sys.executable, __file__, "--threads", str(threads), "--peak", side, *case]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def compare(case: Case, runs: int, threads: int) -> str:
    """One line of the table."""
    ms = {side: 1e3 * seconds for side, seconds in times(case, runs).items()}
    mib = {side: peak_in_new_process(side, case, threads) for side in SIDES}
    line = f"{case.shape:10}{case.dtype:6}{case.used:6}"
    for nanlab, trl in (ms.values(), mib.values()):
        line += f"{nanlab:12.1f}{trl:10.1f}{nanlab / trl:8.2f}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)  # this process measures memory for another
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        side, *case = args.peak
        print(json.dumps(peak_growth(side, Case(*case))))
        return
    print(f"token log-probs, forward and backward, {args.device}, {args.threads} threads, median of {args.runs}")
    print(f"{'':22}{'ms: nanlab':>12}{'trl':>10}{'ratio':>8}{'MiB: nanlab':>12}{'trl':>10}{'ratio':>8}")
    for shape, dtype, used in itertools.product(list(SHAPES)[1:], DTYPES, MASKED):
        print(compare(Case(shape, dtype, used, args.device), args.runs, args.threads), flush=True)


if __name__ == "__main__":
    main()
