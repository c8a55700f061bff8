"""What `import nanlab` costs beside `import torch`: fresh processes in turn, median seconds and their ratio.

python -m bench.import_time
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time

MUST_REACH = 1.2
STATEMENTS = ("import torch", "import nanlab", "from nanlab import locate, watch, preflight, autopsy, WeightedMean")


def seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    taken: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for number in range(runs + 1):
        for statement in random.Random(number).sample(STATEMENTS, len(STATEMENTS)):
            spent = seconds(statement)
            if number:  # the first round reads the files from the disk
                taken[statement].append(spent)
    print(f"imports, median of {runs} processes; the ratio must be at most {MUST_REACH}")
    for statement, spent in taken.items():
        ratio = statistics.median(a / b for a, b in zip(spent, taken[STATEMENTS[0]], strict=True))
        print(f"{statement:75}{statistics.median(spent):6.2f} s{ratio:7.2f}")


if __name__ == "__main__":
    main()
