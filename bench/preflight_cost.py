"""What preflight costs on a large file: seconds, and memory above the data set.

    python -m bench.preflight_cost [ROWS]

Rows are triples (prompt, chosen, rejected, reference) of random words, 7 % of them with a fault, tokenised with the
course's tokenizer. Both kinds of input are measured: a `datasets.Dataset` and a list of dicts.
"""

from __future__ import annotations

import random
import sys
import threading
import time

import psutil
from datasets import Dataset

from nanlab import preflight
from nanlab.course.materials import tiny_tokenizer

WORDS = "the capital of a country is far from any sea but close to two rivers and one old bridge".split()  # noqa: SIM905
MAX_LENGTH = 256


def make_rows(count: int, seed: int = 0) -> list[dict]:
    """Random triples: some 40 words of prompt and 20 of answer, every kind of row fault in between."""
    rng = random.Random(seed)
    text = lambda low, high: " ".join(rng.choices(WORDS, k=rng.randint(low, high)))
    rows = []
    for _ in range(count):
        row = {"prompt": text(20, 60), **{name: " " + text(5, 35) for name in ("chosen", "rejected", "reference")}}
        fault = rng.randrange(100)
        if fault < 2:
            row["prompt"] = text(200, 400)
        elif fault < 4:
            row["chosen"] = row["rejected"]
        elif fault < 7:
            row["reference"] = rng.choice([None, "", "<|endoftext|>"])
        rows.append(row)
    return rows


class PeakMemory:
    """The highest resident size inside the block above that at its start, in MiB, sampled every 10 ms."""

    def __enter__(self) -> PeakMemory:
        self._process, self._stop = psutil.Process(), threading.Event()
        self._start = self._peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self.mib = (self._peak - self._start) / 2**20


def measure(dataset, tokenizer) -> tuple[float, float, float, int]:
    """Seconds, seconds of CPU on all cores, MiB above the data set, faulty rows."""
    start, start_cpu = time.perf_counter(), time.process_time()
    with PeakMemory() as memory:
        findings = preflight(dataset, tokenizer, max_length=MAX_LENGTH)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    return seconds, cpu, memory.mib, sum(finding.count for finding in findings if finding.rows)


def main(count: int = 100_000) -> None:
    tokenizer = tiny_tokenizer()
    rows = make_rows(count)
    tokens = sum(len(tokenizer(" ".join(map(str, row.values())))["input_ids"]) for row in rows[:500]) / 500
    measure(rows[:2000], tokenizer)  # warm-up: imports, the tokenizer's caches
    print(f"preflight of {count:,} triples, about {tokens:.0f} tokens each, limits 60 s and 1024 MiB")
    print(f"{'input':18}{'seconds':>9}{'CPU s':>8}{'rows/s':>9}{'MiB':>7}{'faulty rows':>13}")
    for name, dataset in (("list of dicts", rows), ("datasets.Dataset", Dataset.from_list(rows))):
        seconds, cpu, mib, faulty = measure(dataset, tokenizer)
        print(f"{name:18}{seconds:9.1f}{cpu:8.1f}{count / seconds:9.0f}{mib:7.0f}{faulty:13,}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
