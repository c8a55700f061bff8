"""Refuse large files: `python -m tools.large_files FILE …`, a hook of pre-commit. Notebooks have the same limit."""

from __future__ import annotations

import sys
from pathlib import Path

MAX_BYTES = 1_000_000


def main(names: list[str]) -> int:
    """Names each file above the limit in one line; status 1 if there is one."""
    large = [path for path in map(Path, names) if path.is_file() and path.stat().st_size > MAX_BYTES]
    for path in large:
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, the limit is {MAX_BYTES / 1e6:.0f} MB")
    return int(bool(large))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
