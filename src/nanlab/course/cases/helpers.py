"""What several cases need and no reader has to see: a real trainer that is silent and leaves nothing behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from nanlab.course.notebook import quiet


class InOrder(IterableDataset):
    """Rows that come as they stand; a list would be shuffled."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict]:
        return iter(self.rows)


def trainer(model: Any, rows: Any, eval_rows: list[dict] | None = None, **arguments: Any) -> Any:
    """A ``transformers.Trainer`` on the CPU that logs every step. ``arguments``: of TrainingArguments."""
    quiet()
    from transformers import Trainer, TrainingArguments

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
    return silent(made, folder)


def silent(made: Any, folder: tempfile.TemporaryDirectory) -> Any:
    """The trainer without the callback that prints. Its folder goes when the trainer goes."""
    made.folder = folder
    made.remove_callback(next(type(c) for c in made.callback_handler.callbacks if "Print" in type(c).__name__))
    return made


def preference_trainer(kind: Any, config: Any, model: Any, tokenizer: Any, rows: list[dict], max_length: int) -> Any:
    """A triple-preference trainer of class ``kind`` that trains and evaluates on ``rows``, two a batch.

    The filter is off, as evaluation was before transformers 5.23: there it now leaves non-finite batches out.
    """
    quiet()
    from datasets import Dataset

    folder = tempfile.TemporaryDirectory()
    settings = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False}
    batches = {"per_device_eval_batch_size": 2, "logging_nan_inf_filter": False, "max_length": max_length}
    data = Dataset.from_list(rows)
    arguments = config(folder.name, **settings, **batches)
    made = kind(model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    return silent(made, folder)
