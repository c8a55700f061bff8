"""What several cases need and no reader has to see: a real trainer that is silent and leaves nothing behind."""

from __future__ import annotations

import tempfile
from typing import Any

from nanlab.course.notebook import quiet


def trainer(model: Any, rows: list[dict], eval_rows: list[dict] | None = None, **arguments: Any) -> Any:
    """A ``transformers.Trainer`` on the CPU that logs every step and saves nothing. ``arguments``: TrainingArguments."""
    quiet()
    from transformers import Trainer, TrainingArguments

    # The folder goes when the last reference to it goes: it is kept with the trainer.
    folder = tempfile.TemporaryDirectory()
    settings = {
        "output_dir": folder.name,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        **arguments,
    }
    made = Trainer(model, TrainingArguments(**settings), train_dataset=rows, eval_dataset=eval_rows)
    made.folder = folder
    made.remove_callback(next(type(c) for c in made.callback_handler.callbacks if "Print" in type(c).__name__))
    return made
