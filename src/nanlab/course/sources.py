"""Preference rows that came from elsewhere: files, folders, the hub. Wrong ones are named by file, row and column."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanlab import files
from nanlab.course import facts
from nanlab.errors import InputError
from nanlab.files import Table

if TYPE_CHECKING:
    from datasets import DatasetDict

COLUMNS = ("prompt", "chosen", "rejected", "reference")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HALF = re.compile("[\ud800-\udfff]")  # a lone surrogate: JSON can hold one, UTF-8 and a tokenizer cannot
HUB_SECONDS = 6.0
HELD_OUT_NAMES = ("held_out", "test", "validation")

# Where a column is found when nothing was said. The first that the table has is taken.
LAYOUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "prompt": (("prompt",), ("instruction", "input")),
    "chosen": (("chosen",),),
    "rejected": (("rejected",),),
    "reference": (("reference",), ("output",), ("chosen",)),
}


def read_splits(source: str | os.PathLike, columns: dict[str, str | Sequence[str]]) -> dict[str, list[dict[str, str]]]:
    """The rows of train and held_out, four columns of text. Arguments and errors: see ``load_preferences``."""
    tables = {split: _mapped(table, columns) for split, table in _wanted(_read(source), source).items()}
    return tables if len(tables) == 2 else _hold_out(tables["train"], source)


def _wanted(tables: dict[str, Table], source: object) -> dict[str, Table]:
    """The split to train on and, where there is one, the split to evaluate on."""
    if not tables.get("train"):
        raise InputError(f"data '{source}': no rows in a split 'train'; it has {', '.join(tables)}")
    held_out = next((tables[name] for name in HELD_OUT_NAMES if tables.get(name)), None)
    return {"train": tables["train"]} | ({"held_out": held_out} if held_out else {})


def _hold_out(rows: list[dict[str, str]], source: object) -> dict[str, list[dict[str, str]]]:
    """Take one prompt in ten out, with all its rows."""
    prompts = sorted({row["prompt"] for row in rows}, key=facts.order)
    if len(prompts) < 2:
        raise InputError(f"data '{source}': only one prompt; two are needed, as one is held out for evaluation")
    held_out = set(prompts[: max(1, len(prompts) // 10)])
    return {
        "train": [row for row in rows if row["prompt"] not in held_out],
        "held_out": [row for row in rows if row["prompt"] in held_out],
    }


def _read(source: str | os.PathLike) -> dict[str, Table]:
    """The rows of a file, a folder or a hub data set, by split."""
    path, name = Path(source).expanduser(), str(source)
    if path.suffix.lower() in READERS or path.is_file():
        return {"train": _read_file(path)}
    if not path.is_dir():
        if not HUB_ID.fullmatch(name):
            raise InputError(f"data {name!r}: no such file or folder, and not a hub id")
        ask_hub("data", name, "use a local file, or the course's own data")
    splits = _load_datasets(path if path.is_dir() else None, name)
    return {
        split: [(f"{name}, {split} row {i} (counted from 0)", row) for i, row in enumerate(rows)]
        for split, rows in splits.items()
    }


def _load_datasets(folder: Path | None, name: str) -> DatasetDict:
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    try:
        saved = folder is not None and any((folder / f).is_file() for f in ("dataset_dict.json", "state.json"))
        data = load_from_disk(str(folder)) if saved else load_dataset(str(folder or name))
    except Exception as error:  # many kinds, by format and by builder; all mean that there is no usable data
        raise InputError(f"data {name!r}: cannot be loaded ({one_line(error)}); use a .json or .jsonl file") from error
    return DatasetDict({"train": data}) if isinstance(data, Dataset) else data


def _read_file(path: Path) -> Table:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: unknown kind of file {path.suffix!r}; use {', '.join(READERS)}")
    try:
        if not path.stat().st_size:
            raise InputError(f"{path}: the file is empty")
        table = reader(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or one_line(error)})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    if not table:
        raise InputError(f"{path}: the file has no rows")
    for place, row in table:
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected an object with named columns, got {type(row).__name__}")
    return table


def _read_parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        return files.numbered(path, pyarrow.parquet.read_table(path).to_pylist())
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not Parquet ({one_line(error)})") from error


READERS: dict[str, Callable[[Path], Table]] = {**files.READERS, ".parquet": _read_parquet}


def _mapped(table: Table, columns: dict[str, str | Sequence[str]]) -> list[dict[str, str]]:
    """The four columns of each row, checked."""
    if unknown := set(columns) - set(COLUMNS):
        raise InputError(f"columns: {sorted(unknown)[0]!r} is not one of {', '.join(COLUMNS)}")
    have = list(dict.fromkeys(name for _, row in table for name in row))
    sources = {column: _find(column, columns.get(column), have, table[0][0]) for column in COLUMNS}
    return [{column: _text(row, names, place) for column, names in sources.items()} for place, row in table]


def _find(column: str, asked: str | Sequence[str] | None, have: list[str], place: str) -> tuple[str, ...]:
    layouts = LAYOUTS[column] if asked is None else ((asked,) if isinstance(asked, str) else tuple(asked),)
    for names in layouts:
        if names[0] in have:
            return names
    file = place.rsplit(", ", 1)[0]
    raise InputError(
        f"{file}: no column {layouts[0][0]!r} for the {column} (there is: {', '.join(map(str, have))}); "
        f"rename one (in Python, also load_preferences(…, columns={{{column!r}: …}}))"
    )


def _text(row: dict[str, Any], names: tuple[str, ...], place: str) -> str:
    first, *rest = names
    parts = [_checked(row, first, place)]
    parts += [_checked(row, name, place) for name in rest if row.get(name) not in (None, "")]
    return "\n".join(parts) + "\n" if rest else parts[0]  # the newline keeps prompt and answer apart


def _checked(row: dict[str, Any], name: str, place: str) -> str:
    value = row.get(name)
    if isinstance(value, str) and value.strip() and not HALF.search(value):
        return value
    what = "the column is missing" if name not in row else "None" if value is None else "empty text"
    if value is not None and not isinstance(value, str):
        what = f"expected text, got {type(value).__name__}"
    elif value and (half := HALF.search(value)):
        what = f"holds {half[0]!a}, half of a character"
    raise InputError(f"{place}, column {name!r}: {what}; fill it in or drop the row")


def ask_hub(kind: str, name: str, instead: str) -> None:
    """Fail within seconds where the hub does not answer; the libraries' own retries take most of a minute.

    With ``HF_HUB_OFFLINE=1`` nothing is asked: the libraries then look in their cache only, and are quick about it.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    repo_type = {"model": "model", "data": "dataset"}[kind]
    try:
        _within(HUB_SECONDS, lambda: HfApi().repo_info(name, repo_type=repo_type, timeout=HUB_SECONDS))
    except RepositoryNotFoundError as error:
        raise InputError(f"{kind} {name!r}: no such folder, and the hub has none of that name; {instead}") from error
    except Exception as error:  # no name service, no route, a proxy's refusal, a timeout …
        raise InputError(
            f"{kind} {name!r}: no such folder, and the hub does not answer ({one_line(error)}); {instead}, "
            "or set HF_HUB_OFFLINE=1 if you downloaded it before"
        ) from error


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of ``call``, or TimeoutError. A name look-up cannot be interrupted, so it is left to a thread."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # handed to the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer in {seconds:.0f} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def one_line(error: BaseException) -> str:
    """The first line of a message, for an InputError, which has only one."""
    lines = str(error).strip().splitlines()
    return lines[0][:160].rstrip(".") if lines else type(error).__name__
