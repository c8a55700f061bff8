"""The full run: data, model, evaluate, train, evaluate. One function for the notebook, the CLI and accelerate."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanlab.course.materials import PADDING, load_model, load_preferences, scale, to_scored, warm_up
from nanlab.course.sources import COLUMNS, one_line
from nanlab.errors import InputError
from nanlab.findings import amount
from nanlab.metrics import WeightedMean
from nanlab.models import completion_batch, completion_log_probs
from nanlab.trainers import DPOConfig, DPOTrainer, TokenTPOConfig, TokenTPOTrainer, TPOConfig, TPOTrainer


class Method(NamedTuple):
    """`tiny` and `pretrained` are learning rates: for the course's small model and for a real one.

    `won` says when a pair counts in eval_rewards/accuracies; "" for a method that scores single answers.
    """

    trainer: type
    config: type
    rows: Callable  # preference rows → the rows that this trainer takes
    tiny: float
    pretrained: float
    options: dict[str, Any]
    won: str


def _gold_as_chosen(rows):
    """DPO has no third answer. Here the gold answer is the chosen one."""
    return rows.remove_columns("chosen").rename_column("reference", "chosen")


METHODS = {
    "tpo": Method(TPOTrainer, TPOConfig, lambda rows: rows, 3e-4, 2e-5, {"beta": 0.1}, "the better answer wins"),
    "token-tpo": Method(TokenTPOTrainer, TokenTPOConfig, to_scored, 1e-5, 1e-6, {}, ""),
    # Without the NLL term ("sft") DPO lowers the log-prob of good answers too, as long as bad ones fall faster.
    "dpo": Method(
        DPOTrainer,
        DPOConfig,
        _gold_as_chosen,
        4e-5,
        5e-6,
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]},
        "the gold answer gained on the rejected one",  # since the start; it may still be the less likely of the two
    ),
}


class Scale(NamedTuple):
    """The size of a run. `batch` is rows an optimizer step, however few of them fit in memory at a time."""

    model: str
    steps: int
    batch: int
    max_length: int
    eval_rows: int


SCALES = {
    "tiny": Scale("tiny", steps=60, batch=8, max_length=128, eval_rows=200),
    "small": Scale("smollm2", steps=8, batch=4, max_length=192, eval_rows=24),
    "full": Scale("smollm2", steps=150, batch=16, max_length=512, eval_rows=200),
}
# Rows that fit at a time, by memory in GB (measured for 135M parameters in fp32 at 512 tokens, three answers a row).
ROWS_AT_ONCE = ((40, 16), (20, 8), (10, 4), (5, 2), (0, 1))

LAST_SEED = 2**32 - 1  # NumPy's


@dataclass
class Run:
    """What a run measured. Metrics carry the trainer's names (`eval_loss` …); `gold` is log-prob per token, in nats."""

    settings: dict[str, Any]
    before: dict[str, float]
    after: dict[str, float]
    traps: dict[str, float]
    history: list[dict[str, float]]
    samples: list[dict[str, str]]
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    def numbers(self) -> list[float]:
        """Every number that was measured, before and after."""
        return [
            v for part in (self.before, self.after, self.traps) for v in part.values() if isinstance(v, int | float)
        ]

    def finite(self) -> bool:
        """Is every number that the run has reported finite?"""
        return all(map(math.isfinite, self.numbers()))

    def checks(self) -> list[tuple[str, str, bool]]:
        """The acceptance table: what was asked, what came out, and whether that is enough."""
        before, after = self.before, self.after
        left_out = after["eval_excluded_rows"] + after["eval_dropped_rows"]
        fell, moved = before["eval_loss"] - after["eval_loss"], after["gold"] - before["gold"]
        table = [
            ("every metric is finite", f"{len(self.numbers())} numbers", self.finite()),
            ("no row left out", amount(left_out, "row"), left_out == 0),
            ("the loss fell", f"by {fell:.2f}", fell > 0),
            ("the gold answer is kept", f"{moved:+.2f} nat a token", moved > -0.1),
        ]
        if won := METHODS[self.settings["method"]].won:
            accuracy = after["eval_rewards/accuracies"]
            table.append((won, f"{accuracy:.0%} of pairs", accuracy >= 0.9))
        return table

    def __str__(self) -> str:
        """Metrics before and after, and the acceptance table."""
        names = [name for name in self.after if name in self.before and name != "epoch"]
        table = [("", "before", "after"), *((n, f"{self.before[n]:.4g}", f"{self.after[n]:.4g}") for n in names)]
        width = max(10, *(1 + len(cell) for _, *cells in table for cell in cells))
        lines = [f"{name:28}{before:>{width}}{after:>{width}}" for name, before, after in table]
        lines += [f"{'ok' if passed else 'FAIL':6}{what}: {value}" for what, value, passed in self.checks()]
        return "\n".join(lines)


def train_and_evaluate(
    method: str,
    *,
    model: str | None = None,
    dataset: str | None = None,
    output: str | os.PathLike | None = None,
    size: str | None = None,
    steps: int | None = None,
    max_length: int | None = None,
    memory_gb: float | None = None,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> Run:
    """Evaluate, train, evaluate again, and write `output/result.json`.

    Args:
        method: "tpo", "token-tpo" or "dpo".
        model: "tiny", "smollm2", a local directory or a hub id; by default what the scale says.
        dataset: a file or hub id with preference rows; by default the course's own.
        output: a folder, new or of a run; by default `runs/full_run-METHOD`. A run that was stopped goes on from its
            last checkpoint, with the same final metrics; a finished one is run again.
        size: "tiny", "small" or "full"; by default `NANLAB_SCALE`, else the device decides.
        steps, max_length: replace the scale's.
        memory_gb: memory to plan for; by default what the device has. Less memory means fewer rows at a time and more
            gradient accumulation; a step sees the same rows.
        report: gets a line of text for each stage.

    Raises:
        InputError: an argument, file or folder that cannot be used. Nothing is half-written then.
        KeyboardInterrupt: says what is saved.
    """
    plan = _plan(method, model, dataset, size, steps, max_length, memory_gb, seed)
    folder = Path(f"runs/full_run-{method}" if output is None else output)
    if os.path.exists(plan["model"]) and folder.resolve() in Path(plan["model"]).resolve().parents:
        raise InputError(f"model {plan['model']!r}: lies in {folder}, which a new run clears; choose another --output")
    try:
        return _all_stages(METHODS[method], plan, folder, _Stages(report))
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(_saved(folder)) from stop


def _all_stages(method: Method, plan: dict[str, Any], folder: Path, stage: _Stages) -> Run:
    with stage("data"):
        data = _data(plan)
        plan["rows"] = _fingerprint(data)
    with stage("model"), _start_in(folder, plan) as start:
        _make_start(start, plan, data)
        policy, tokenizer = _load(start)
        trainer = _trainer(method, plan, folder, policy, tokenizer, data)
    with stage("evaluate before"):
        before, samples_before = _before(folder, trainer, policy, tokenizer, data)
    with stage("train"):
        trainer.train(resume_from_checkpoint=_last_checkpoint(folder))
    with stage("evaluate after"):
        after = _measure(trainer, policy, tokenizer, data)
        traps = trainer.evaluate(method.rows(data["traps"])) if "traps" in data else {}
        samples = [
            {**old, "after": new} for old, new in zip(samples_before, _samples(policy, tokenizer, data), strict=True)
        ]
    run = Run(plan, before, after, _plain(traps), trainer.state.log_history, samples, stage.seconds, stage.memory)
    if trainer.is_world_process_zero():
        _write(folder / "result.json", asdict(run))
    return run


# --- the plan -------------------------------------------------------------------------------------------------------


def _plan(method, model, dataset, size, steps, max_length, memory_gb, seed) -> dict[str, Any]:
    """Everything that decides the result, as plain data: two runs with the same plan are the same run."""
    if method not in METHODS:
        raise InputError(f"method {method!r}: choose {', '.join(METHODS)}")
    size = size or scale()
    if size not in SCALES:
        raise InputError(f"scale {size!r}: choose {', '.join(SCALES)}")
    for name, value in {"steps": steps, "max-length": max_length, "memory-gb": memory_gb}.items():
        if value is not None and not value > 0:  # NaN too
            raise InputError(f"{name} {value}: give a number above 0")
    if not 0 <= seed <= LAST_SEED:
        raise InputError(f"seed {seed}: give a number from 0 to {LAST_SEED}")
    chosen = SCALES[size]
    world, batch = _ranks().num_processes, chosen.batch
    if memory_gb is None:
        memory_gb = _device_memory()
    at_once = next(rows for least, rows in ROWS_AT_ONCE if memory_gb >= least)
    at_once = max(1, min(batch // world, at_once))
    return {
        "method": method,
        "model": str(model or chosen.model),
        "dataset": None if dataset is None else str(dataset),
        "steps": steps or chosen.steps,
        "rows_at_once": at_once,
        "accumulate": max(1, batch // (at_once * world)),
        "processes": world,
        "max_length": max_length or chosen.max_length,
        "eval_rows": chosen.eval_rows,
        "seed": seed,
    }


def _ranks() -> PartialState:
    """This process among all. Without a GPU accelerate sees the ranks of a launcher only if told to use the CPU."""
    return PartialState(cpu=not torch.cuda.is_available())


def _device_memory() -> float:
    """Memory of the GPU, else of the machine, in GB."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / 1e9
    import psutil

    return psutil.virtual_memory().total / 1e9


def _data(plan: dict[str, Any]) -> dict[str, Any]:
    """train, held_out and, for the course's own data, traps."""
    data = dict(load_preferences(plan["dataset"]))
    held_out = data["held_out"]
    data["held_out"] = held_out.select(range(min(len(held_out), plan["eval_rows"])))
    return data


def _fingerprint(data: dict[str, Any]) -> str:
    """Changes with any row: a file may be another one under the same name."""
    rows = hashlib.sha256()
    for split, table in data.items():
        rows.update(split.encode())
        for row in table:
            rows.update(json.dumps(row, sort_keys=True).encode())
    return rows.hexdigest()[:16]


# --- the folder -----------------------------------------------------------------------------------------------------


DRAFT = "start.tmp"  # what a kill during the set-up leaves in a new folder


@contextmanager
def _start_in(folder: Path, plan: dict[str, Any]) -> Iterator[Path]:
    """Where the model that the run starts from stands, or shall be put.

    An unfinished run with the same plan goes on. A new run replaces a finished one, but only once its set-up went
    through: until then its start is a draft, and a failure takes the draft and the new folders away again.
    """
    main = _ranks().is_main_process
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    _check_writable(folder)
    if _is_unfinished(folder, plan):
        yield folder / "start"
        return
    draft = folder / DRAFT
    try:
        yield draft
    except BaseException:
        if main:
            shutil.rmtree(draft, ignore_errors=True)
            with suppress(OSError):  # another process put something there
                for path in new_folders:
                    path.rmdir()
        raise
    _ranks().wait_for_everyone()  # all have loaded the draft
    if main:
        for path in [folder / "start", *_checkpoints(folder)]:
            shutil.rmtree(path, ignore_errors=True)
        (folder / "before.json").unlink(missing_ok=True)
        draft.replace(folder / "start")
        _write(folder / "settings.json", plan)
        (folder / "result.json").unlink(missing_ok=True)  # last: until here the folder counts as finished
    _ranks().wait_for_everyone()


def _is_unfinished(folder: Path, plan: dict[str, Any]) -> bool:
    """Whether the folder holds a run with this plan to go on with."""
    old = _settings(folder)
    if old is None or (folder / "result.json").exists():
        return False
    if other := [name for name in plan if plan[name] != old.get(name)]:
        raise InputError(
            f"output {folder}: holds an unfinished run with other settings ({', '.join(other)}); "
            "choose another --output or delete it"
        )
    return True


def _settings(folder: Path) -> dict[str, Any] | None:
    """The plan of the run in a folder; None if the folder is new. A run deletes files, but never somebody else's."""
    path = folder / "settings.json"
    if path.exists():
        plan = _read(path)
        if not isinstance(plan, dict) or not {"method", "model", "steps"} <= plan.keys():
            raise InputError(
                f"{path}: cannot be read as the settings of a run; choose another --output or delete {folder}"
            )
        for other in sorted(set(folder.glob("checkpoint-*")) - set(_checkpoints(folder))):
            raise InputError(f"{other}: no checkpoint of this run, and the trainer would delete it; move it away")
        return plan
    others = sorted(p.name for p in folder.iterdir() if p.name != DRAFT and not p.name.startswith("."))
    if others:
        raise InputError(
            f"output {folder}: holds {others[0]!r} and no settings.json of a run; choose a new folder as --output"
        )
    return None


def _saved(folder: Path) -> str:
    """What there is of a run that was stopped, in words."""
    if not (folder / "settings.json").exists():
        return "nothing was saved yet; the same command starts anew"
    if (folder / "result.json").exists():
        return f"the finished run in {folder} is as it was; the same command starts anew"
    newest = _last_checkpoint(folder)
    what = f"the training up to step {newest.rsplit('-', 1)[1]}" if newest else "the model to start from"
    return f"{what} is saved in {folder}; the same command goes on from there"


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"output {folder}: cannot write here: {reason}; choose another --output") from error


def _check_space(folder: Path, model) -> None:
    """The start and, while the oldest is not yet deleted, three checkpoints of weights and two moments each."""
    need, free = 10 * sum(p.nbytes for p in model.parameters()), shutil.disk_usage(folder).free
    if free < need:
        raise InputError(
            f"output {folder}: needs {need / 1e6:.0f} MB, {free / 1e6:.0f} MB are free; choose another --output"
        )


def as_json(content: Any, indent: int | None = None) -> str:
    """JSON has no NaN: what is not finite is the text "NaN" or "Infinity", which `float` and `autopsy` take."""
    return json.dumps(json.loads(json.dumps(content), parse_constant=str), indent=indent, allow_nan=False)


def _write(path: Path, content: Any) -> None:
    """All or nothing: a reader never sees half a file."""
    draft = path.with_suffix(".tmp")
    draft.write_text(as_json(content, indent=1))
    draft.replace(path)


def _read(path: Path) -> Any:
    """What `_write` wrote, or None if it cannot be read (any more)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoints, the newest first; only what has a number for a name is one of ours."""
    steps = {p: re.fullmatch(r"checkpoint-(\d+)", p.name) for p in folder.glob("checkpoint-*")}
    return sorted((p for p in steps if steps[p]), key=lambda p: int(steps[p][1]), reverse=True)


def _last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end and can be read."""
    return next((str(p) for p in _checkpoints(folder) if _is_whole(p)), None)


def _opens(path: Path) -> bool:
    with safe_open(path, "pt"):  # compares the header with the size of the file
        return True


# Cheap ways to see that a file of a checkpoint is not cut off. A zip has its directory at the end.
WHOLE: dict[str, Callable[[Path], bool]] = {
    ".json": lambda path: _read(path) is not None,
    ".safetensors": _opens,
    ".pt": zipfile.is_zipfile,
    ".pth": zipfile.is_zipfile,
}


def _is_whole(checkpoint: Path) -> bool:
    """The trainer's state comes last; a disk or a copy may have damaged any file later."""
    try:
        files = [path for path in checkpoint.iterdir() if path.suffix in WHOLE]
        return checkpoint / "trainer_state.json" in files and all(WHOLE[path.suffix](path) for path in files)
    except (OSError, SafetensorError):
        return False


# --- model and trainer ----------------------------------------------------------------------------------------------


def _make_start(start: Path, plan: dict[str, Any], data: dict[str, Any]) -> None:
    """Save the model before preference tuning, once: a run that is resumed starts from the same weights."""
    if _ranks().is_main_process and start.name != "start":
        model, tokenizer = load_model(plan["model"], seed=plan["seed"])
        _check_space(start.parent, model)
        if tokenizer.pad_token is None:
            own = PADDING in tokenizer.get_vocab()
            tokenizer.pad_token = PADDING if own else tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        _check_fit(plan, model, tokenizer, data)
        if plan["model"] == "tiny":  # a random model has nothing to lose: first it reads good and bad answers alike
            warm_up(model, tokenizer, data["train"], columns=("reference", "chosen", "rejected"), seed=plan["seed"])
        shutil.rmtree(start, ignore_errors=True)
        model.save_pretrained(start)
        tokenizer.save_pretrained(start)
    _ranks().wait_for_everyone()


def _check_fit(plan: dict[str, Any], model, tokenizer, data: dict[str, Any]) -> None:
    """Do model, tokenizer and rows go together? Asked before the warm-up, which takes minutes for long rows."""
    if getattr(model, "_hf_peft_config_loaded", False):  # the start would be saved as the adapter alone
        raise InputError(
            f"model {plan['model']!r}: is an adapter; merge it into its model (merge_and_unload), save that and name it"
        )
    known, length = set(tokenizer.get_vocab().values()), plan["max_length"]
    if known <= set(tokenizer.all_special_ids):  # what transformers makes up where there are no files
        raise InputError(f"model {plan['model']!r}: holds no tokenizer; save one beside the weights")
    if tokenizer.eos_token is None:
        raise InputError(f"model {plan['model']!r}: its tokenizer has no eos_token, which ends an answer; set it there")
    for split, rows in data.items():
        if not any(max(1, len(tokenizer(prompt)["input_ids"])) < length for prompt in rows["prompt"]):
            raise InputError(
                f"{split} dataset: no row of {len(rows)} has a completion token within max_length={length}; "
                "raise max_length or shorten the prompts"
            )
    positions = _positions(model)
    if positions < length and (longest := _longest(tokenizer, data)) > positions:
        raise InputError(
            f"model {plan['model']!r}: has {positions} positions, and the longest row has {min(longest, length)} "
            f"tokens; use --max-length {positions} or another model"
        )
    size = model.get_input_embeddings().num_embeddings
    if max(known) >= size and (highest := _highest_id(tokenizer, data)) >= size:
        raise InputError(
            f"model {plan['model']!r}: its vocabulary has {size} tokens, and its tokenizer makes token {highest} of "
            "the rows; use the tokenizer that belongs to it"
        )
    if _sees_the_future(model):
        raise InputError(
            f"model {plan['model']!r}: what it says at a token depends on later ones: its losses would be finite "
            "and wrong; use a causal language model (an encoder is none)"
        )


@torch.no_grad()
def _sees_the_future(model) -> bool:
    """Does another last token change what is said at an earlier one?"""
    ids = torch.tensor([[0, 0, 0], [0, 0, 1]], device=model.device)
    one, other = model(input_ids=ids).logits[:, :2].float()
    return bool((one - other).abs().max() > 1e-3 * one.abs().max())


def _positions(model) -> int:
    """How many tokens in a row the model was made for; without a limit (ALiBi, state spaces) a very large number."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def _longest(tokenizer, data: dict[str, Any]) -> int:
    """Tokens of the longest row: prompt, answer and eos."""

    def lengths(texts: list[str | None], **how) -> list[int]:
        return [len(ids) for ids in tokenizer([text or "" for text in texts], **how)["input_ids"]]

    return 1 + max(
        prompt + answer
        for rows in data.values()
        for column in COLUMNS[1:]
        for prompt, answer in zip(lengths(rows["prompt"]), lengths(rows[column], add_special_tokens=False), strict=True)
    )


def _highest_id(tokenizer, data: dict[str, Any]) -> int:
    texts = [text for rows in data.values() for column in COLUMNS for text in rows[column] if text]
    return max(tokenizer.pad_token_id, *(max(ids, default=0) for ids in tokenizer(texts)["input_ids"]))


def _load(start: Path):
    """Weights in fp32, also for bf16 training: autocast computes in bf16, the optimizer needs the precision."""
    try:
        if not (start / "config.json").is_file():
            raise FileNotFoundError("no config.json")  # without one transformers asks the hub
        model = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        return model, transformers.AutoTokenizer.from_pretrained(start)
    except Exception as error:  # a dozen kinds, by file format
        raise InputError(
            f"{start}: cannot be loaded ({one_line(error)}); choose another --output or delete {start.parent}"
        ) from error


def _has_fast_bf16() -> bool:
    """Whether this GPU computes in bf16; else the run is in fp32. Before compute capability 8 (T4, V100) bf16 is only
    emulated. fp16 would be fast there, but needs a loss scaler and has the edges that this course is about.
    """
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _trainer(how: Method, plan: dict[str, Any], folder: Path, model, tokenizer, data):
    on_gpu = torch.cuda.is_available()
    args = how.config(
        output_dir=str(folder),
        per_device_train_batch_size=plan["rows_at_once"],
        per_device_eval_batch_size=plan["rows_at_once"],
        gradient_accumulation_steps=plan["accumulate"],
        max_steps=plan["steps"],
        learning_rate=how.tiny if plan["model"] == "tiny" else how.pretrained,
        lr_scheduler_type="cosine",
        warmup_steps=plan["steps"] // 10,
        max_length=plan["max_length"],
        logging_steps=max(1, plan["steps"] // 12),
        logging_nan_inf_filter=False,  # it puts a share of the sum so far in place of a NaN loss
        save_steps=max(1, plan["steps"] // 3),
        save_total_limit=2,
        bf16=on_gpu and _has_fast_bf16(),
        use_cpu=not on_gpu,
        seed=plan["seed"],
        report_to=[],
        disable_tqdm=not sys.stderr.isatty(),
        **how.options,
    )
    trainer = how.trainer(
        model, args=args, train_dataset=how.rows(data["train"]), eval_dataset=how.rows(data["held_out"]),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


# --- measuring ------------------------------------------------------------------------------------------------------


class _Stages:
    """Time and peak memory of each stage. On a GPU the allocator's peak in GB, on a CPU the process's so far."""

    def __init__(self, report: Callable[[str], None]):
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        self._report = report if _ranks().is_main_process else lambda text: None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        yield
        self.seconds[name], self.memory[name] = time.perf_counter() - begin, _peak_memory()
        self._report(f"{name:16} {self.seconds[name]:6.1f} s   peak memory {self.memory[name]:5.2f} GB")


def _peak_memory() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return psutil.Process().memory_info().peak_wset / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes, KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def _before(folder: Path, trainer, model, tokenizer, data) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Metrics and sample answers of the untouched model; a resumed run reads what it measured then."""
    path = folder / "before.json"
    known = _read(path)
    if not isinstance(known, list) or [type(part) for part in known] != [dict, list]:  # none yet, or damaged
        metrics = _measure(trainer, model, tokenizer, data)
        prompts = data["held_out"]["prompt"][:3]
        answers = _samples(model, tokenizer, data)
        samples = [{"prompt": p, "before": a} for p, a in zip(prompts, answers, strict=True)]
        if trainer.is_world_process_zero():
            _write(path, [metrics, samples])
        _ranks().wait_for_everyone()
        known = _read(path)
    metrics, samples = known
    return {name: float(value) if isinstance(value, str) else value for name, value in metrics.items()}, samples


def _measure(trainer, model, tokenizer, data) -> dict[str, float]:
    gold = gold_log_prob(model, tokenizer, data["held_out"], trainer.args.max_length)
    return _plain({**trainer.evaluate(), "gold": gold})


def _plain(metrics: dict[str, float]) -> dict[str, float]:
    """Without what depends on the machine's speed."""
    speed = ("_runtime", "_per_second", "_preparation_time")
    return {name: value for name, value in metrics.items() if not name.endswith(speed)}


@torch.no_grad()
def gold_log_prob(model, tokenizer, rows, max_length: int, batch_size: int = 8) -> float:
    """Log-prob per token of the gold answers, in nats, weighted by tokens: is it still a language model?"""
    mean, was_training = WeightedMean(), model.training
    model.eval()
    for i in range(0, len(rows), batch_size):
        batch = _gold_batch(tokenizer, rows[i : i + batch_size], max_length)
        batch = {name: column.to(model.device) for name, column in batch.items()}
        tokens = batch["completion_mask"][:, 1:].sum(1)
        mean.update(completion_log_probs(model, **batch).sum(1) / tokens, tokens)
    model.train(was_training)
    return mean.compute()


def _gold_batch(tokenizer, rows: dict[str, list[str]], max_length: int) -> dict[str, Tensor]:
    prompts = tokenizer(rows["prompt"])["input_ids"]
    answers = tokenizer(rows["reference"], add_special_tokens=False)["input_ids"]
    answers = [[*ids, tokenizer.eos_token_id] for ids in answers]
    return completion_batch(prompts, answers, max_length=max_length)


@torch.no_grad()
def _samples(model, tokenizer, data) -> list[str]:
    """Greedy answers to three held-out prompts; of a prompt that leaves no room for one the end."""
    answers, was_training, positions = [], model.training, _positions(model)
    new = min(24, positions // 2)
    model.eval()
    for prompt in data["held_out"]["prompt"][:3]:
        batch = tokenizer(prompt, return_tensors="pt").to(model.device)
        batch = {name: batch[name][:, new - positions :] for name in ("input_ids", "attention_mask")}
        ids = model.generate(**batch, max_new_tokens=new, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        answers.append(tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    model.train(was_training)
    return answers
