"""Time and peak memory of `nanlab.numerics.token_logps` beside TRL's `selective_log_softmax`.

    python bench/token_logps.py

Forward and backward on the same logits. Times: both run in turn, median of the runs. Memory: a fresh process each, the
growth of its peak resident memory (on CUDA: of the allocator's peak) over what it held before the call; the gradient
of the logits, which both must return, is part of it. Half of the tokens are masked, as prompts are.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

# batch, tokens, vocabulary: a Pythia batch, a SmolLM2 batch, the course's tiny model
SHAPES = {"pythia": (4, 256, 50304), "smollm2": (6, 128, 49152), "tiny": (12, 64, 1024)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def ours() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from nanlab.numerics import token_logps

    return token_logps


def theirs() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from trl.trainer.utils import selective_log_softmax

    return lambda logits, labels, mask: selective_log_softmax(logits, labels, row_mask=mask)


SIDES = {"nanlab": ours, "trl": theirs}


def batch(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator).requires_grad_()
    labels = torch.randint(shape[-1], shape[:-1], generator=generator, device=device)
    mask = torch.zeros(shape[:-1], dtype=torch.bool, device=device)
    mask[:, shape[1] // 2 :] = True
    return logits, labels, mask


def step(function: Callable, logits: Tensor, labels: Tensor, mask: Tensor) -> float:
    """One forward and backward; seconds."""
    logits.grad = None
    start = time.perf_counter()
    function(logits, labels, mask).sum().backward()
    if logits.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def times(shape: tuple[int, int, int], dtype: torch.dtype, device: str, runs: int) -> dict[str, float]:
    """Median seconds a step for each side, run in turn so that a slow moment hits both."""
    functions = {side: make() for side, make in SIDES.items()}
    inputs = batch(shape, dtype, device)
    seconds = {side: [] for side in functions}
    for run in range(runs + 1):
        for side, function in functions.items():
            taken = step(function, *inputs)
            if run:  # the first one warms up
                seconds[side].append(taken)
    return {side: statistics.median(values) for side, values in seconds.items()}


def peak_growth(side: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> float:
    """MiB by which the peak of this process grows over what it held before the call."""
    function = SIDES[side]()
    step(function, *batch((1, 2, 8), dtype, device))  # lazy initialisation is not what we measure
    inputs = batch(shape, dtype, device)
    if device == "cuda":
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


def peak_in_new_process(side: str, shape_name: str, dtype_name: str, device: str, threads: int) -> float:
    command = [sys.executable, __file__, "--peak", side, shape_name, dtype_name, device, "--threads", str(threads)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        side, shape_name, dtype_name, device = args.peak
        print(json.dumps(peak_growth(side, SHAPES[shape_name], DTYPES[dtype_name], device)))
        return
    print(f"token log-probs, forward and backward, {args.device}, {args.threads} threads, median of {args.runs}")
    print(f"{'':14}{'time, ms':>20}{'':8}{'peak over logits, MiB':>26}")
    print(f"{'shape, dtype':14}{'nanlab':>10}{'trl':>10}{'ratio':>8}{'nanlab':>13}{'trl':>13}{'ratio':>8}")
    for shape_name, shape in SHAPES.items():
        for dtype_name, dtype in DTYPES.items():
            ms = {side: 1e3 * value for side, value in times(shape, dtype, args.device, args.runs).items()}
            mib = {
                side: peak_in_new_process(side, shape_name, dtype_name, args.device, args.threads) for side in SIDES
            }
            print(
                f"{shape_name + ' ' + dtype_name:14}"
                f"{ms['nanlab']:10.1f}{ms['trl']:10.1f}{ms['nanlab'] / ms['trl']:8.2f}"
                f"{mib['nanlab']:13.1f}{mib['trl']:13.1f}{mib['nanlab'] / mib['trl']:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
