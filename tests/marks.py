"""What the tests of ``locate`` compare: the line of a file that ends in a comment, and the heart of a report."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from nanlab.tracing import Report


def lines_of(file: str) -> Callable[[str], str]:
    """A function from ``marker`` to "file.py:12", the first line of ``file`` that ends in "# marker"."""
    path = Path(file)

    def line(marker: str) -> str:
        text = path.read_text(encoding="utf-8").splitlines()
        return f"{path.name}:{next(i for i, t in enumerate(text, 1) if t.endswith('# ' + marker))}"

    return line


def verdict(report: Report) -> tuple[str, str, str]:
    return report.cause, report.phase, report.source


def healthy(report: Report) -> bool:
    return not report.found and report.exception is None


def leaf(*values: float, shape: tuple = (), dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter((torch.randn(shape) if shape else torch.tensor(values)).to(dtype))
