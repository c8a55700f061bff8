"""The command line: `nanlab check`, `nanlab preflight`, `nanlab autopsy`, `nanlab run`.

Exit status 0: nothing found; 1: findings; 2: bad input, told in one line on stderr; 130: stopped by Ctrl-C;
141: whatever read the output went away. A command is one row of `COMMANDS`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanlab import __version__, files
from nanlab.errors import InputError

NOTHING, FOUND, BAD_INPUT = 0, 1, 2
COURSE = ("tiny", "smollm2")  # models that come with the course
STOPPED = 130  # what a shell gives a command that Ctrl-C ended
PIPE_CLOSED = 141  # and one whose reader went away


class Command(NamedTuple):
    """`arguments` are the (flags, options) of `add_argument`; `run(args)` returns the exit status."""

    name: str
    help: str
    arguments: tuple[tuple[tuple[str, ...], dict[str, Any]], ...]
    run: Callable[[argparse.Namespace], int]


# -------------------------------------------------------------------------------------------------------------- check


class Line(NamedTuple):
    """One line of `nanlab check`; `problem` says what to do, or is ""."""

    name: str
    value: str
    problem: str = ""


def _check(args: argparse.Namespace) -> int:
    lines = []
    for line in _lines(args.all):
        lines.append(line)
        if not args.json:  # at once: with --all the next one may take a while
            state, advice = ("FAIL", f"  → {line.problem}") if line.problem else ("ok", "")
            print(f"{state:4}  {line.name:12}  {line.value}{advice}", flush=True)
    if args.json:
        print(json.dumps([line._asdict() for line in lines]))
    return FOUND if any(line.problem for line in lines) else NOTHING


def _lines(everything: bool) -> Iterator[Line]:
    yield from _versions()
    yield from _devices()
    if everything:
        from nanlab.course import room

        yield from (Line(*row) for row in room.checks())


def _versions() -> list[Line]:
    """Python and every package that nanlab requires, held against the range it asks for."""
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    here = metadata.metadata("nanlab")
    python, wanted = sys.version.split()[0], here["Requires-Python"]
    lines = [
        Line("nanlab", __version__),
        Line("python", python, "" if SpecifierSet(wanted).contains(python, True) else f"needs {wanted}"),
    ]
    for text in here.get_all("Requires-Dist") or []:
        need = Requirement(text)
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            lines.append(Line(need.name, "missing", f"pip install '{need}'"))
            continue
        fits = need.specifier.contains(version, prereleases=True)
        lines.append(Line(need.name, version, "" if fits else f"needs {need.specifier}: pip install '{need}'"))
    return lines


def _devices() -> list[Line]:
    try:
        import torch
    except ImportError as error:
        return [Line("device", "unknown", f"torch does not import: {error}")]
    lines = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        # Cards before compute capability 8.0 (T4, V100) only emulate bf16.
        half = "bf16" if card.major >= 8 else "no bf16: use fp32 where fp16 overflows"
        lines.append(Line("device", f"cuda:{index} {card.name}, {card.total_memory / 2**30:.0f} GiB, {half}"))
    if torch.backends.mps.is_available():
        lines.append(Line("device", "mps"))
    lines.append(Line("device", f"cpu; cores: {os.cpu_count()}, threads for torch: {torch.get_num_threads()}"))
    return lines


# ----------------------------------------------------------------------------------------------------------- preflight


def _preflight(args: argparse.Namespace) -> int:
    rows = read_rows(Path(args.file))
    from nanlab.inspection import preflight

    model = _load("model", args.model) if args.model else None
    return _report(preflight(rows, _load("tokenizer", args.tokenizer), max_length=args.max_length, model=model), args)


def read_rows(path: Path):
    """Rows of a JSON, JSONL, CSV or Parquet file as they are, faults included: a list of dicts or a `datasets.Dataset`.

    Raises:
        InputError: no such file, another kind of file, no rows in it, or text that is not JSON, named by line.
    """
    if not os.path.exists(path):  # unlike path.exists(), False also for a name that no system takes
        raise InputError(f"{path}: no such file, or in a folder that cannot be entered")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name the file of rows in it")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: cannot tell the kind of file; name it {', '.join(_READERS)}")
    try:
        rows = reader(path)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text at byte {error.start}; save it as UTF-8") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(rows) == 0:
        raise InputError(f"{path}: holds no rows")
    return rows


def _read_text(path: Path) -> list:
    table = files.READERS[path.suffix.lower()](path)
    for place, row in table:
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected a row as {{column: value}}, got {type(row).__name__}")
    return [row for _, row in table]


def _read_csv(path: Path) -> list:
    from nanlab.rows import NUMBERS

    kinds = {**dict.fromkeys(NUMBERS, _number), "label": _label}
    read = lambda name, cell: kinds[name](cell) if name in kinds else cell
    return [{name: read(name, cell) for name, cell in row.items()} for row in _read_text(path)]


def _number(cell: str | None) -> float | str | None:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return cell  # an empty cell, a word: the check of the rewards says which row


def _label(cell: str | None) -> bool | float | str | None:
    """As pandas reads it, and so `datasets`."""
    spelt = {"true": True, "false": False}
    return spelt[cell.lower()] if cell and cell.lower() in spelt else _number(cell)


def _read_parquet(path: Path):
    import pyarrow
    from datasets import Dataset
    from pyarrow import parquet

    try:
        return Dataset(parquet.read_table(path))
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path}: not a Parquet file: {error}") from error


_READERS = {**dict.fromkeys(files.READERS, _read_text), ".csv": _read_csv, ".parquet": _read_parquet}


def _check_name(name: str | None) -> None:
    if name in COURSE and Path(name).is_dir():
        raise InputError(f"{name!r} is a model of the course and a folder here: write ./{name} if you mean the folder")


def _load(kind: str, name: str):
    """A tokenizer, or a model in the dtype it is stored in, by the course's name, a directory or a hub id."""
    _check_name(name)
    if name in COURSE:
        from nanlab.course import load_model

        model, tokenizer = load_model(name)
        return model if kind == "model" else tokenizer
    import transformers

    from nanlab.course.sources import HUB_ID

    if "/" in name and not HUB_ID.fullmatch(name) and not os.path.isdir(name):
        raise InputError(f"{kind} {name!r}: no such folder, and no hub id")
    load = {
        "tokenizer": lambda: transformers.AutoTokenizer.from_pretrained(name),
        "model": lambda: transformers.AutoModelForCausalLM.from_pretrained(name, dtype="auto"),
    }[kind]
    try:
        return load()
    except Exception as error:  # on a damaged folder the libraries raise what they like
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" …")
        raise InputError(f"{kind} {name!r} cannot be loaded: {why}") from error


# ------------------------------------------------------------------------------------------------------------- autopsy


def _autopsy(args: argparse.Namespace) -> int:
    from nanlab.history import autopsy

    return _report(autopsy(args.run_dir), args)


def _report(findings, args: argparse.Namespace) -> int:
    print(json.dumps(findings.to_dict()) if args.json else findings)
    return FOUND if findings else NOTHING


# ----------------------------------------------------------------------------------------------------------------- run


def _run(args: argparse.Namespace) -> int:
    try:
        return _train(args)
    except KeyboardInterrupt as stop:
        print(f"nanlab: stopped; {stop.args[0] if stop.args else 'nothing was saved yet'}", file=sys.stderr)
        return STOPPED


def _train(args: argparse.Namespace) -> int:
    from nanlab.course import quiet

    quiet()
    _check_name(args.model)
    from nanlab.full_run import as_json, train_and_evaluate

    report = (lambda text: print(text, file=sys.stderr)) if args.json else print
    run = train_and_evaluate(
        args.method, model=args.model, dataset=args.dataset, output=args.output, size=args.scale, steps=args.steps,
        max_length=args.max_length, memory_gb=args.memory_gb, seed=args.seed, report=report,
    )  # fmt: skip
    if int(os.environ.get("RANK", 0)) == 0:
        print(as_json(dataclasses.asdict(run)) if args.json else run)
    return NOTHING if run.finite() else FOUND


# ---------------------------------------------------------------------------------------------------------------- main

_ALL = (("--all",), {"action": "store_true", "help": "also import, train, plot, start a kernel: is the room ready?"})
_JSON = (("--json",), {"action": "store_true", "help": "print JSON"})
_MAX_LENGTH = (("--max-length",), {"type": int, "metavar": "N", "help": "tokens kept of prompt and answer together"})
_RUN = "run folder, trainer_state.json, JSON, JSONL, CSV, or console output"
_OUTPUT = "goes on with a stopped run there, replaces an ended one (runs/full_run-METHOD)"

COMMANDS = (
    Command("check", "environment, device and versions, one line each", (_ALL, _JSON), _check),
    Command(
        "preflight",
        "faults of a data set and its set-up, before training",
        (
            (("file",), {"metavar": "FILE", "help": "JSON, JSONL, CSV or Parquet rows"}),
            (("--tokenizer",), {"required": True, "metavar": "NAME", "help": "directory, hub id, tiny or smollm2"}),
            _MAX_LENGTH,
            (("--model",), {"metavar": "NAME", "help": "also look at these weights"}),
            _JSON,
        ),
        _preflight,
    ),
    Command(
        "autopsy",
        "what went wrong in a run, from its log",
        ((("run_dir",), {"metavar": "RUN_DIR", "help": _RUN}), _JSON),
        _autopsy,
    ),
    Command(
        "run",
        "train and evaluate one method, end to end; exit status 1 if a metric is not finite",
        (
            (("--method",), {"required": True, "metavar": "NAME", "help": "tpo, token-tpo or dpo"}),
            (("--model",), {"metavar": "NAME", "help": "tiny, smollm2, a directory or hub id (the scale decides)"}),
            (("--dataset",), {"metavar": "FILE", "help": "preference rows: a file or hub id (the course's own)"}),
            (("--output",), {"metavar": "DIR", "help": _OUTPUT}),
            (("--scale",), {"metavar": "SIZE", "help": "tiny, small or full (NANLAB_SCALE, else the device decides)"}),
            (("--steps",), {"type": int, "metavar": "N", "help": "optimizer steps"}),
            _MAX_LENGTH,
            (("--memory-gb",), {"type": float, "metavar": "GB", "help": "memory to plan for (what the device has)"}),
            (("--seed",), {"type": int, "default": 0, "metavar": "N"}),
            _JSON,
        ),
        _run,
    ),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise InputError(f"{message}; try {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nanlab", description="Find, explain, survive and foresee NaN in preference tuning.")
    parser.add_argument("--version", action="version", version=f"nanlab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        one = commands.add_parser(command.name, help=command.help, description=command.help)
        for flags, options in command.arguments:
            one.add_argument(*flags, **options)
        one.set_defaults(run=command.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is returned."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # stderr is for the one line of bad input
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 has no arrow
    try:
        return _obey(argv)
    except BrokenPipeError:  # `| head` has seen enough
        _drop_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        _drop_output()
        print("nanlab: stopped", file=sys.stderr)
        return STOPPED
    except InputError as error:
        print(f"nanlab: {' '.join(str(error).split())}", file=sys.stderr)
    except OSError as error:  # no space, no permission: the system's doing, and no fault in the code
        _drop_output()
        print(f"nanlab: {error.filename or 'cannot go on'}: {error.strerror or error}", file=sys.stderr)
    return BAD_INPUT


def _obey(argv: list[str] | None) -> int:
    try:
        args = _parser().parse_args(argv)
        return args.run(args)
    finally:
        print(end="", flush=True)  # here, where it can still be told that nothing can be written


def _drop_output() -> None:
    """What nobody takes goes nowhere; otherwise Python tries to write it again at its end, and complains."""
    try:
        print(end="", flush=True)
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
