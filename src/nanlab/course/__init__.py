"""What the notebooks use: models and data, exercises, the casebook, plots. Loaded on first use."""

import importlib

_HOME = {
    "load_model": "materials",
    "load_preferences": "materials",
    "quiet": "notebook",
    "show_versions": "versions",
    "cases": None,
    "exercises": None,
    "plots": None,
}
__all__ = ["cases", "exercises", "load_model", "load_preferences", "plots", "quiet", "show_versions"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'nanlab.course' has no attribute {name!r}; it has {', '.join(__all__)}")
    home = _HOME[name]
    module = importlib.import_module(f"nanlab.course.{home or name}")
    return getattr(module, name) if home else module
