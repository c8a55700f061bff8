"""What a guarded step costs, as a ratio to the unguarded one.

    python -m bench.guard_cost

A GPT-NeoX of Pythia-14m's shape (6 layers, hidden 128) on a small vocabulary, AdamW, batches of 8 x 128 tokens. All
variants train side by side in one process, each with a model of its own. A round times one step of each, in a new
random order. The figure is the median over the rounds of the ratio to the unguarded step of the same round, so that a
machine that slows down slows both sides. "unguarded, again" says how much of it is noise.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanlab.guard import watch

WARM_UP = 3  # rounds that are not counted: the optimizer's state does not exist yet
VARIANTS: dict[str, dict | None] = {
    "unguarded": None,
    "unguarded, again": None,
    "off": {"policy": "off"},
    "skip": {"policy": "skip"},
    "skip, check_state": {"policy": "skip", "check_state": True},
    "rollback": {"policy": "rollback"},
}
MUST_REACH = {"off": 1.00, "skip": 1.02, "skip, check_state": 1.05, "rollback": 1.10}


def make_model() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**shape, vocab_size=2048, max_position_embeddings=256)).train()


def make_step(model: nn.Module, options: dict | None, ids: Tensor) -> Callable[[], None]:
    """One training step; the unguarded one is written without a guard, not with one that is off."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def unguarded() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    if options is None:
        return unguarded
    guard = watch(model, optimizer=optimizer, **options)

    def guarded() -> None:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if guard.allow_step(loss):
            optimizer.step()
            guard.after_step()

    return guarded


def measure(rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds per step of every variant, one entry a round."""
    base = make_model().to(device)
    ids = torch.randint(0, 2048, (8, 128), device=device)
    steps = {name: make_step(copy.deepcopy(base), options, ids) for name, options in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    order = list(VARIANTS)
    gc.disable()  # a collection would be paid by whoever happens to run
    for _ in range(WARM_UP + rounds):
        gc.collect()
        random.shuffle(order)
        for name in order:
            start = time.perf_counter()
            steps[name]()
            if device != "cpu":
                torch.accelerator.synchronize()
            seconds[name].append(time.perf_counter() - start)
    gc.enable()
    return {name: times[WARM_UP:] for name, times in seconds.items()}


def ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    rows = {}
    for name, times in seconds.items():
        paired = [t / base for t, base in zip(times, seconds["unguarded"], strict=True)]
        low, middle, high = statistics.quantiles(paired, n=4) if len(paired) > 1 else paired * 3
        rows[name] = {"ms": 1e3 * statistics.median(times), "ratio": middle, "low": low, "high": high}
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [f"{'':20}{'ms a step':>10}{'ratio':>8}{'quartiles':>16}{'must reach':>12}"]
    for name, row in rows.items():
        quartiles, limit = f"{row['low']:.3f}..{row['high']:.3f}", MUST_REACH.get(name)
        limit = "" if limit is None else f"{limit:.2f}"
        lines.append(f"{name:20}{row['ms']:10.2f}{row['ratio']:8.3f}{quartiles:>16}{limit:>12}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = ratios(measure(arguments.rounds, arguments.device))
    print(json.dumps(rows, indent=1) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
