"""What a notebook does once, at its top."""

from __future__ import annotations

import os
import warnings


def quiet() -> None:
    """Leave only what the lesson prints: no progress bars, no library notices about the future.

    Warnings about numbers (torch, numpy) stay: they are the subject.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("transformers", "trl", "accelerate", "peft", "datasets"):
        warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
    warnings.filterwarnings("ignore", message=".*pin_memory")  # on machines without an accelerator
    warnings.filterwarnings("ignore", message="IProgress not found")  # no bars, so no widgets for them

    import datasets
    import transformers

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
