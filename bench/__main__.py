"""Print every table: `python -m bench`. Each one alone: `python -m bench.NAME`.

`python -m bench.versions` is not among them: it downloads other releases of the libraries.
"""

from __future__ import annotations

import subprocess
import sys

TABLES = {
    "import_time": "importing the package",
    "token_logps": "log-probs of the tokens, beside TRL's",
    "trainer_step": "a training step, beside the trainer below",
    "locate_cost": "a traced step, beside a plain one",
    "locate_zoo": "planted faults: what each tool finds",
    "casebook_matrix": "public reports in miniature: what each tool finds",
    "guard_cost": "a guarded step, beside an unguarded one",
    "preflight_cost": "looking through 100,000 rows",
}


def main() -> int:
    """Run the tables one after the other, each in a process of its own. Returns the number of those that failed."""
    failed = []
    for name, title in TABLES.items():
        print(f"\n== {name}: {title}", flush=True)
        if subprocess.run([sys.executable, "-m", f"bench.{name}"]).returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
