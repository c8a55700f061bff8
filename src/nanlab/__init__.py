"""NaN Lab: find the first NaN of a preference-tuning run, explain it, survive it, see it coming.

The public names load on first use, so that ``import nanlab`` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "locate": "nanlab.tracing",
    "watch": "nanlab.guard",
    "preflight": "nanlab.inspection",
    "autopsy": "nanlab.history",
    "WeightedMean": "nanlab.metrics",
}
__all__ = ["WeightedMean", "autopsy", "locate", "preflight", "watch"]

if TYPE_CHECKING:
    from nanlab.guard import watch
    from nanlab.history import autopsy
    from nanlab.inspection import preflight
    from nanlab.metrics import WeightedMean
    from nanlab.tracing import locate


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'nanlab' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
