"""What locate costs: a traced training step against the plain one, interleaved in one process. ``python -m
bench.locate_cost``

GPT-NeoX with 6 layers, hidden 128 (1.7M parameters) and 512 (21M), batch 8 × 128, AdamW, on the CPU. Every round runs
each variant once, in random order; the figure is the median of the round's ratios. Memory is the peak resident set of
a child process that does one kind of step only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from nanlab.tracing import locate

LIMITS = {128: 1.75, 512: 1.15}  # hidden size → the ratio that must hold
MEMORY_LIMIT = 1.2


def make_step(hidden: int, seed: int = 0) -> tuple[Callable[[], torch.Tensor], torch.nn.Module, torch.optim.Optimizer]:
    """A full training step (zero_grad, forward, backward, AdamW) of a random GPT-NeoX."""
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        hidden_size=hidden, num_hidden_layers=6, num_attention_heads=4, intermediate_size=4 * hidden, vocab_size=2048,
        max_position_embeddings=256,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 2048, (8, 128))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


def traced(step: Callable, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    report = locate(step, model=model, optimizer=optimizer)
    if report.found:
        raise AssertionError(f"a healthy step was blamed: {report}")


def with_anomaly_detection(step: Callable, *_: object) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        step()


VARIANTS = {"plain": lambda step, *_: step(), "locate": traced, "detect_anomaly": with_anomaly_detection}


def ratios(hidden: int, rounds: int, names: tuple[str, ...] = tuple(VARIANTS)) -> dict[str, list[float]]:
    """Seconds of each variant, relative to the plain step of the same round."""
    cases = {name: make_step(hidden) for name in names}
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 2):
        seconds = {}
        for name in random.sample(names, len(names)):
            start = time.perf_counter()
            VARIANTS[name](*cases[name])
            seconds[name] = time.perf_counter() - start
        if i >= 2:  # the first rounds allocate and warm up
            for name in names:
                found[name].append(seconds[name] / seconds["plain"])
    return found


def peak_memory(hidden: int, name: str, queue: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    case = make_step(hidden)
    for _ in range(3):
        VARIANTS[name](*case)
    queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def memory_ratio(hidden: int) -> float:
    """Peak resident memory of three traced steps over that of three plain ones, each in a process of its own."""
    context, peaks = multiprocessing.get_context("spawn"), {}
    for name in ("plain", "locate"):
        queue = context.Queue()
        child = context.Process(target=peak_memory, args=(hidden, name, queue))
        child.start()
        peaks[name] = queue.get(timeout=300)
        child.join()
    return peaks["locate"] / peaks["plain"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hidden", type=int, nargs="*", default=list(LIMITS))
    options = parser.parse_args()
    print(f"| parameters | {' | '.join(n for n in VARIANTS if n != 'plain')} | limit | peak memory |")
    print("|---|---|---|---|---|")
    for hidden in options.hidden:
        found = ratios(hidden, options.rounds)
        size = sum(p.numel() for p in make_step(hidden)[1].parameters()) / 1e6
        medians = " | ".join(f"{statistics.median(found[n]):.2f}" for n in VARIANTS if n != "plain")
        print(f"| {size:.1f}M | {medians} | {LIMITS.get(hidden, '')} | {memory_ratio(hidden):.2f} |", flush=True)


if __name__ == "__main__":
    main()
