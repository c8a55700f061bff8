"""Rows of JSON, JSON-lines and CSV files as they are, each with its place in words."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nanlab.errors import InputError

Table = list[tuple[str, Any]]  # each row with its place in words, for messages


def numbered(path: Path, rows: Iterable[Any]) -> Table:
    """Rows with their number, from 0, as their place."""
    return [(f"{path}, row {i} (counted from 0)", row) for i, row in enumerate(rows)]


def json_rows(path: Path) -> Table:
    """A list of rows; also one object a line, which is JSON lines under the wrong name.

    Raises `InputError` with the line that is no JSON, or if the file is no list.
    """
    try:
        rows = _loads(path.read_text(encoding="utf-8-sig"), str(path))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a whole value, then another one
            return json_lines(path)
        raise InputError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    if not isinstance(rows, list):
        raise InputError(f"{path}: expected a list of rows, got {type(rows).__name__}; write [{{…}}, {{…}}]")
    return numbered(path, rows)


def json_lines(path: Path) -> Table:
    """One JSON value a line; empty lines are passed over. Raises `InputError` with the line that is no JSON."""
    table: Table = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            try:
                table.append((place := f"{path}, line {number}", _loads(line, place)))
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not JSON ({error.msg})") from error
    return table


def csv_table(path: Path) -> Table:
    """Rows of a CSV file with a header, all cells text.

    Raises `InputError` for another separator, and for a row with more cells than columns.
    """
    text = path.read_bytes().decode("utf-8-sig")  # as bytes: a cell keeps its line ends
    header = text.partition("\n")[0]
    for separator, name in ((";", "a semicolon"), ("\t", "a tab")):
        if separator in header and "," not in header:
            raise InputError(f"{path}: {name} stands between the columns of the header; put a comma there")
    table = numbered(path, csv_rows(text))
    for place, row in table:
        if None in row:  # then cells stand under wrong names: a text with a comma and no quotes
            cells, columns = len(row) - 1 + len(row[None]), len(row) - 1
            raise InputError(f'{place}: {cells} cells for {columns} columns; put texts with a comma in "quotes"')
    return table


def csv_rows(text: str) -> list[dict[str, str]]:
    """Rows of a CSV file as text, with cells of any length: the module's own limit is 131,072 characters."""
    limit = csv.field_size_limit(max(1, len(text)))
    try:
        return list(csv.DictReader(io.StringIO(text.replace("\0", ""), newline="")))
    finally:
        csv.field_size_limit(limit)


READERS: dict[str, Callable[[Path], Table]] = {
    ".json": json_rows,
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".csv": csv_table,
}


def _loads(text: str, place: str) -> Any:
    """JSON that Python can hold: it has limits of its own for digits and for depth."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise InputError(f"{place}: brackets nested too deeply to be read") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise InputError(f"{place}: a number that cannot be read ({error})") from error
