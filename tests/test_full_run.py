"""The full run in small: what it measures, how it goes on after a stop, and that bad input leaves no trace."""

import dataclasses
import errno
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, TrainerCallback

from nanlab import cli, full_run
from nanlab.course.materials import load_model, load_preferences, tiny_tokenizer
from nanlab.errors import InputError
from nanlab.full_run import METHODS, Run, Scale, gold_log_prob, train_and_evaluate
from nanlab.history import autopsy

SMALL = {"tiny": Scale("tiny", steps=3, batch=4, max_length=48, eval_rows=6)}


@pytest.fixture(autouse=True, scope="module")
def in_small():
    """Three steps and hardly any warm-up: these tests look at the frame. The slow ones look at what is learned."""
    warm_up = full_run.warm_up
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_run, "SCALES", full_run.SCALES | SMALL)
        patch.setattr(full_run, "warm_up", lambda *args, **kwargs: warm_up(*args, **kwargs, steps=4))
        patch.setenv("NANLAB_SCALE", "tiny")
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Method: (its run, its folder, the lines it reported)."""
    runs = {}
    for method in METHODS:
        folder, lines = tmp_path_factory.mktemp("runs") / method, []
        runs[method] = (train_and_evaluate(method, output=folder, report=lines.append), folder, lines)
    return runs


def snapshot(folder: Path):
    return {str(p.relative_to(folder)): p.is_file() and p.read_bytes() for p in sorted(folder.rglob("*"))}


# --- what it measures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_run_writes_what_it_returns(method, finished):
    run, folder, lines = finished[method]
    assert json.loads((folder / "result.json").read_text()) == json.loads(json.dumps(dataclasses.asdict(run)))
    assert json.loads((folder / "settings.json").read_text()) == run.settings
    assert not list(folder.rglob("*.tmp"))
    assert [line.split("  ")[0] for line in lines] == list(run.seconds) == list(run.memory)
    assert list(run.seconds) == ["data", "model", "evaluate before", "train", "evaluate after"]
    assert all(0 < gb < 64 for gb in run.memory.values())
    assert [set(sample) for sample in run.samples] == [{"prompt", "before", "after"}] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the allocator is asked")
def test_peak_memory_is_the_largest_so_far_and_not_the_current(monkeypatch):
    block = torch.ones(100_000_000)
    held = psutil.Process().memory_info().rss / 1e9
    del block
    assert psutil.Process().memory_info().rss / 1e9 < held - 0.3
    assert held - 0.05 < full_run._peak_memory() < 64
    peaks = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=3_000_000))
    monkeypatch.setitem(sys.modules, "resource", peaks)
    for platform, gb in (("linux", 3.072), ("darwin", 0.003)):  # KiB, bytes
        monkeypatch.setattr(sys, "platform", platform)
        assert full_run._peak_memory() == pytest.approx(gb)
    monkeypatch.setitem(sys.modules, "resource", None)  # Windows has none
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=4e9)))
    assert full_run._peak_memory() == 4.0


@pytest.mark.parametrize("method", METHODS)
def test_every_number_is_finite_and_before_and_after_can_be_compared(method, finished):
    run, _, _ = finished[method]
    for metrics in (run.before, run.after, run.traps):
        assert all(math.isfinite(value) for value in metrics.values())
    assert set(run.after) - set(run.before) <= {"epoch"}
    assert run.before["eval_loss"] != run.after["eval_loss"]
    assert run.traps["eval_dropped_rows"] > 0  # the trap rows without a completion token
    assert run.after["eval_dropped_rows"] == 0  # and they are counted there only
    assert {name for name in run.after if name.endswith("runtime")} == set()  # nothing that depends on speed
    logged = [entry for entry in run.history if "loss" in entry]
    assert len(logged) == 3
    assert {"grad_norm", "learning_rate"} <= set(logged[0])
    assert "FAIL  every metric is finite" not in str(run)


def test_dpo_starts_without_a_margin(finished):
    run, _, _ = finished["dpo"]
    assert run.before["eval_preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert run.before["eval_nll"] == pytest.approx(-run.before["gold"], abs=1e-4)  # two ways to the same number


@torch.no_grad()
def test_gold_log_prob_is_the_plain_mean_over_tokens(finished):
    _, folder, _ = finished["tpo"]
    model, tokenizer = full_run._load(folder / "start")
    rows = [*load_preferences()["held_out"]][:5]
    rows.append({"prompt": "word " * 60, "reference": " too late"})  # no token left of this one
    columns = {name: [row[name] for row in rows] for name in ("prompt", "reference")}
    total, count = 0.0, 0
    for row in rows[:5]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([[*prompt, *tokenizer(row["reference"])["input_ids"], tokenizer.eos_token_id]])
        log_probs = model.double()(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        total, count = total + log_probs[len(prompt) - 1 :].sum().item(), count + ids.shape[1] - len(prompt)
    for size in (1, 2, 16):
        measured = gold_log_prob(model.float(), tokenizer, _Rows(columns), 48, batch_size=size)
        assert measured == pytest.approx(total / count, abs=1e-5)


class _Rows(dict):
    """Columns that can be sliced like a data set."""

    def __len__(self):
        return len(self["prompt"])

    def __getitem__(self, key):
        return dict.__getitem__(self, key) if isinstance(key, str) else {k: v[key] for k, v in self.items()}


GOOD = {
    "eval_loss": 1.0,
    "eval_excluded_rows": 0,
    "eval_dropped_rows": 0,
    "eval_rewards/accuracies": 0.95,
    "gold": -2.0,
}
WORSE = {
    "every metric is finite": {"eval_loss": math.nan},
    "no row left out": {"eval_excluded_rows": 1},
    "no row left out, nor dropped": {"eval_dropped_rows": 1},
    "the loss fell": {"eval_loss": 3.0},
    "the gold answer is kept": {"gold": -2.3},
    "the better answer wins": {"eval_rewards/accuracies": 0.8},
}
TPO = {"method": "tpo"}


@pytest.mark.parametrize("what", WORSE)
def test_the_acceptance_table_can_fail(what):
    before = {**GOOD, "eval_loss": 2.0}
    good = Run(TPO, before, GOOD, {}, [], [])
    assert [passed for *_, passed in good.checks()] == [True] * 5
    bad = Run(TPO, before, {**GOOD, **WORSE[what]}, {}, [], [])
    what = what.split(",")[0]
    assert {name: passed for name, _, passed in bad.checks()}[what] is False
    assert f"FAIL  {what}" in str(bad)
    assert "FAIL" not in str(good)


PAIRS = {"tpo": ["the better answer wins"], "token-tpo": [], "dpo": ["the gold answer gained on the rejected one"]}


@pytest.mark.parametrize("method", METHODS)
def test_the_acceptance_table_says_what_a_pair_counts_as(method):
    """DPO counts a pair whose margin grew since the start, also while the gold answer is the less likely one."""
    after = {k: v for k, v in GOOD.items() if PAIRS[method] or "rewards" not in k}
    table = Run({"method": method}, {**GOOD, "eval_loss": 2.0}, after, {}, [], []).checks()
    assert [what for what, value, _ in table if "pairs" in value] == PAIRS[method]


@torch.no_grad()
def test_under_dpo_a_pair_counts_when_its_margin_grew(finished):
    run, folder, _ = finished["dpo"]
    start, tokenizer = full_run._load(folder / "start")
    end, _ = full_run._load(Path(full_run._last_checkpoint(folder)))
    rows = load_preferences()["held_out"].select(range(6))
    before, after = ([_margin(model, tokenizer, row) for row in rows] for model in (start, end))
    grown = [a > b for a, b in zip(after, before, strict=True)]
    assert run.after["eval_rewards/accuracies"] == pytest.approx(sum(grown) / 6)
    assert any(grown)
    assert max(after) < 0  # the gold answer of each pair is the longer one, and the less likely


def _margin(model, tokenizer, row):
    """How much likelier the gold answer is than the rejected one, in nats."""
    prompt, logps = tokenizer(row["prompt"])["input_ids"], []
    for column in ("reference", "rejected"):
        ids = torch.tensor([[*prompt, *tokenizer(row[column])["input_ids"], tokenizer.eos_token_id]])
        log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        logps.append(log_probs[len(prompt) - 1 :].sum().item())
    return logps[0] - logps[1]


def test_columns_of_the_table_stand_apart():
    small = {**GOOD, "eval_loss": -3.642e-4}
    lines = str(Run(TPO, small, small, {}, [], [])).splitlines()
    assert lines[1].split() == ["eval_loss", "-0.0003642", "-0.0003642"]
    assert {len(line) for line in lines[: 1 + len(GOOD)]} == {len(lines[0])}


@pytest.fixture
def nan_model(tmp_path):
    """The tiny model with one weight that is NaN, in a folder."""
    model, tokenizer = load_model("tiny")
    with torch.no_grad():
        model.get_output_embeddings().weight[7, 0] = math.nan
    model.save_pretrained(tmp_path / "nan")
    tokenizer.save_pretrained(tmp_path / "nan")
    return str(tmp_path / "nan")


def test_a_nan_loss_is_written_as_it_is_and_the_file_is_json(nan_model, tmp_path, monkeypatch, capsys):
    before = None
    for _ in range(2):  # the second time the metrics before training are read from their file
        arguments = ["run", "--method", "dpo", "--model", nan_model, "--steps", "1", "--output", str(tmp_path / "run")]
        assert cli.main([*arguments, "--json"]) == 1
        told = json.loads(capsys.readouterr().out, parse_constant=_no_json)
        assert json.loads((tmp_path / "run" / "result.json").read_text(), parse_constant=_no_json) == told
        assert (told["before"]["eval_loss"], told["after"]["gold"]) == ("NaN", "NaN")
        logged = next(entry for entry in told["history"] if "loss" in entry)
        assert (logged["loss"], logged["grad_norm"]) == ("NaN", "NaN")
        assert before in (None, told["before"])
        before = told["before"]
        (tmp_path / "run" / "result.json").unlink()
    assert autopsy(told["history"])  # which reads the words as numbers


def _no_json(word):
    raise AssertionError(f"{word} is not JSON")


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_memory_changes_the_rows_at_a_time_not_the_rows_of_a_step(processes, monkeypatch):
    monkeypatch.setattr(full_run, "_ranks", lambda: SimpleNamespace(num_processes=processes))
    at_once = []
    for memory in (1, 2.5, 6, 12, 24, 80):
        plan = full_run._plan("dpo", None, None, "full", None, None, memory, 0)
        assert plan["rows_at_once"] * plan["accumulate"] * processes == full_run.SCALES["full"].batch
        at_once.append(plan["rows_at_once"])
    assert at_once == sorted(at_once)
    assert at_once[0] == 1
    assert at_once[-1] == full_run.SCALES["full"].batch // processes


# --- stop and go on -------------------------------------------------------------------------------------------------


class _PowerCut(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


@contextmanager
def cut_after_the_second_checkpoint():
    make = full_run._trainer

    def trainer(*args):
        made = make(*args)
        made.add_callback(_PowerCut)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_run, "_trainer", trainer)
        yield patch


@pytest.fixture
def power_cut():
    with cut_after_the_second_checkpoint() as patch:
        yield patch


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_goes_on_and_ends_with_the_same_metrics(method, finished, tmp_path, power_cut):
    with pytest.raises(KeyboardInterrupt):
        train_and_evaluate(method, output=tmp_path, report=lambda line: None)
    assert full_run._last_checkpoint(tmp_path).endswith("checkpoint-2")
    with pytest.raises(InputError, match="holds an unfinished run with other settings"):
        train_and_evaluate(method, output=tmp_path, steps=7, report=lambda line: None)
    power_cut.undo()
    run, whole = train_and_evaluate(method, output=tmp_path, report=lambda line: None), finished[method][0]
    assert run.after == whole.after
    assert run.before == whole.before
    assert run.samples == whole.samples
    steps = [[entry["step"] for entry in r.history if "loss" in entry] for r in (run, whole)]
    assert steps == [[1, 2, 3], [1, 2, 3]]


def test_an_incomplete_checkpoint_is_passed_over(tmp_path):
    for step, files in {2: ["trainer_state.json"], 10: ["trainer_state.json"], 12: ["model.safetensors"]}.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        for name in files:
            (tmp_path / f"checkpoint-{step}" / name).write_text("{}")
    assert full_run._last_checkpoint(tmp_path).endswith("checkpoint-10")
    assert full_run._last_checkpoint(tmp_path / "nothing") is None


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A folder with a run that was stopped after its second checkpoint of three."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with cut_after_the_second_checkpoint(), pytest.raises(KeyboardInterrupt):
        train_and_evaluate("dpo", output=folder, report=lambda line: None)
    return folder


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


CUT = ["trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"]


@pytest.mark.parametrize("file", CUT)
def test_a_damaged_checkpoint_is_passed_over(file, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    _halve(tmp_path / "run" / "checkpoint-2" / file)
    assert full_run._last_checkpoint(tmp_path / "run").endswith("checkpoint-1")
    assert full_run._last_checkpoint(stopped).endswith("checkpoint-2")


DAMAGE = {
    "settings half": (lambda run: _halve(run / "settings.json"), "run/settings.json: cannot be read"),
    "settings empty": (lambda run: (run / "settings.json").write_text(""), "run/settings.json: cannot be read"),
    "settings bytes": (lambda run: (run / "settings.json").write_bytes(b"\xff"), "run/settings.json: cannot be read"),
    "settings foreign": (lambda run: (run / "settings.json").write_text('{"a": 1}'), "settings.json: cannot be read"),
    "start gone": (lambda run: shutil.rmtree(run / "start"), "run/start: cannot be loaded (no config.json)"),
    "start cut": (lambda run: _halve(run / "start" / "model.safetensors"), "run/start: cannot be loaded"),
    "a checkpoint of one's own": (lambda run: (run / "checkpoint-best").mkdir(), "run/checkpoint-best: no checkpoint"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_named_and_left_as_it_is(name, stopped, tmp_path, capsys):
    shutil.copytree(stopped, tmp_path / "run")
    damage, words = DAMAGE[name]
    damage(tmp_path / "run")
    before = snapshot(tmp_path)
    assert cli.main(["run", "--method", "dpo", "--output", str(tmp_path / "run")]) == 2
    assert words in told(capsys)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("text", ["", '[{"eval', "[1]"])
def test_damaged_metrics_of_before_are_measured_again(text, stopped, finished, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "run" / "before.json").write_text(text)
    run, whole = train_and_evaluate("dpo", output=tmp_path / "run", report=lambda line: None), finished["dpo"][0]
    assert (run.before, run.after, run.samples) == (whole.before, whole.after, whole.samples)


def test_other_rows_under_the_same_name_are_another_run(tmp_path, power_cut):
    file, ask = tmp_path / "rows.json", {"output": tmp_path / "run", "report": lambda line: None}
    file.write_text(json.dumps(ROWS))
    with pytest.raises(KeyboardInterrupt, match=r"the training up to step 2 is saved in .*run; the same command goes"):
        train_and_evaluate("dpo", dataset=file, **ask)
    file.write_text(json.dumps([*ROWS[:-1], {**ROWS[-1], "rejected": " six."}]))
    with pytest.raises(InputError, match=r"other settings \(rows\); choose another --output"):
        train_and_evaluate("dpo", dataset=file, **ask)
    with pytest.raises(InputError, match=r"other settings \(steps, rows\)"):
        train_and_evaluate("dpo", dataset=file, steps=7, **ask)


def test_ctrl_c_is_one_line_that_says_what_is_saved_and_status_130(tmp_path, monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    folder = tmp_path / "new" / "run"
    arguments = ["run", "--method", "dpo", "--output", str(folder)]
    said = {
        "load_preferences": "nothing was saved yet; the same command starts anew",
        "_make_start": "nothing was saved yet; the same command starts anew",
        "_before": f"the model to start from is saved in {folder}; the same command goes on from there",
    }
    for where, words in said.items():
        with monkeypatch.context() as patch:
            patch.setattr(full_run, where, stop)
            assert cli.main(arguments) == 130
        assert told(capsys) == f"nanlab: stopped; {words}\n"
        assert (tmp_path / "new").exists() is (where == "_before")


# --- whose folder is it? --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["start/notes.txt", "checkpoint-500/model.bin", "result.json", "README.md"])
def test_a_folder_of_somebody_else_is_refused(name, tmp_path, capsys):
    (tmp_path / "mine" / name).parent.mkdir(parents=True)
    (tmp_path / "mine" / name).write_text("precious")
    before = snapshot(tmp_path)
    assert cli.main(["run", "--method", "dpo", "--output", str(tmp_path / "mine")]) == 2
    assert f"mine: holds {name.split('/')[0]!r} and no settings.json of a run" in told(capsys)
    assert snapshot(tmp_path) == before


def test_what_a_kill_in_the_set_up_leaves_is_no_obstacle(tmp_path):
    (tmp_path / "start.tmp").mkdir()
    (tmp_path / "start.tmp" / "half").touch()
    (tmp_path / ".probe-1").touch()
    train_and_evaluate("dpo", output=tmp_path, steps=1, report=lambda line: None)
    assert (tmp_path / "result.json").is_file()
    assert not (tmp_path / "start.tmp").exists()


def test_by_default_every_method_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(full_run, "_all_stages", lambda method, plan, folder, stage: seen.append(str(folder)))
    for method in METHODS:
        train_and_evaluate(method)
    assert seen == ["runs/full_run-tpo", "runs/full_run-token-tpo", "runs/full_run-dpo"]


def test_a_kill_while_a_finished_run_is_replaced_leaves_no_mixture(tmp_path, monkeypatch):
    """Whatever is written last, the folder counts as finished until the new run stands: it is never gone on with."""
    train_and_evaluate("dpo", output=tmp_path, steps=1, report=lambda line: None)

    def die(path, content):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(full_run, "_write", die)
        with pytest.raises(KeyboardInterrupt):
            train_and_evaluate("dpo", output=tmp_path, steps=2, report=lambda line: None)
    assert (tmp_path / "result.json").is_file()
    assert train_and_evaluate("dpo", output=tmp_path, steps=2, report=lambda line: None).settings["steps"] == 2


def test_a_new_run_replaces_a_finished_one(finished, tmp_path):
    train_and_evaluate("token-tpo", output=tmp_path, steps=1, report=lambda line: None)
    run = train_and_evaluate("dpo", output=tmp_path, steps=2, report=lambda line: None)
    assert run.settings["method"] == json.loads((tmp_path / "settings.json").read_text())["method"] == "dpo"
    assert {p.name for p in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    assert run.before == finished["dpo"][0].before


# --- bad input ------------------------------------------------------------------------------------------------------

ROW = {"prompt": "Two and two is", "chosen": " four.", "rejected": " five.", "reference": " Two and two is four."}
ROWS = [{**ROW, "prompt": f"{n} and two is"} for n in range(20)]
FILES = {
    "good.json": json.dumps(ROWS),
    "broken.json": json.dumps(ROWS)[:-4],
    "text.json": "hello",
    "missing.json": json.dumps([{k: v for k, v in row.items() if k != "rejected"} for row in ROWS]),
    "none.json": json.dumps([*ROWS[:3], {**ROW, "chosen": None}, *ROWS[4:]]),
    "empty.json": json.dumps([*ROWS[:3], {**ROW, "chosen": ""}, *ROWS[4:]]),
    "half.json": json.dumps([*ROWS[:3], {**ROW, "chosen": " four \ud83d"}, *ROWS[4:]]),
    "no-rows.json": "[]",
    "deep.json": "[" * 100_000,
    "deep.jsonl": "[" * 100_000,
    "digits.jsonl": json.dumps(ROW)[:-1] + ', "n": ' + "9" * 5000 + "}",
    "shift.csv": "prompt,chosen,rejected\n" + "Q, yes, no\n" * 3 + "Q, please, yes, no\n",
}
BAD = {
    "no method": ([], ["--method"]),
    "unknown method": (["--method", "ppo"], ["ppo", "tpo, token-tpo, dpo"]),
    "unknown scale": (["--method", "dpo", "--scale", "huge"], ["huge", "tiny, small, full"]),
    "no steps": (["--method", "dpo", "--steps", "0"], ["steps 0"]),
    "negative steps": (["--method", "dpo", "--steps", "-3"], ["steps -3"]),
    "no length": (["--method", "dpo", "--max-length", "0"], ["max-length 0"]),
    "no memory": (["--method", "dpo", "--memory-gb", "0"], ["memory-gb 0"]),
    "memory of NaN": (["--method", "dpo", "--memory-gb", "nan"], ["memory-gb nan"]),
    "negative seed": (["--method", "dpo", "--seed", "-1"], ["seed -1"]),
    "large seed": (["--method", "dpo", "--seed", "99999999999999999999999"], ["seed 9999", "0 to 4294967295"]),
    "words for steps": (["--method", "dpo", "--steps", "many"], ["--steps", "many"]),
    "unknown model": (["--method", "dpo", "--model", "{folder}/nothing"], ["nothing"]),
    "short tpo": (["--method", "tpo", "--max-length", "3"], ["train dataset", "max_length=3"]),
    "short dpo": (["--method", "dpo", "--max-length", "3"], ["train dataset", "max_length=3"]),
    "short token-tpo": (["--method", "token-tpo", "--max-length", "3"], ["train dataset", "max_length=3"]),
    "no file": (["--method", "dpo", "--dataset", "{folder}/no.json"], ["no.json"]),
    "broken file": (["--method", "dpo", "--dataset", "{folder}/broken.json"], ["broken.json", "JSON"]),
    "no JSON": (["--method", "dpo", "--dataset", "{folder}/text.json"], ["text.json", "JSON"]),
    "missing column": (["--method", "dpo", "--dataset", "{folder}/missing.json"], ["missing.json", "rejected"]),
    "None": (["--method", "dpo", "--dataset", "{folder}/none.json"], ["none.json", "row 3", "chosen"]),
    "empty text": (["--method", "dpo", "--dataset", "{folder}/empty.json"], ["empty.json", "row 3", "chosen"]),
    "half a character": (
        ["--method", "dpo", "--dataset", "{folder}/half.json"],
        ["half.json, row 3", "holds '\\ud83d'"],
    ),
    "no rows": (["--method", "dpo", "--dataset", "{folder}/no-rows.json"], ["no-rows.json"]),
    "deep": (["--method", "dpo", "--dataset", "{folder}/deep.json"], ["deep.json: ", "nested too deeply"]),
    "deep line": (["--method", "dpo", "--dataset", "{folder}/deep.jsonl"], ["deep.jsonl, line 1", "nested"]),
    "digits": (["--method", "dpo", "--dataset", "{folder}/digits.jsonl"], ["digits.jsonl, line 1", "number"]),
    "more cells": (["--method", "dpo", "--dataset", "{folder}/shift.csv"], ["csv, row 3 ", "4 cells for 3 columns"]),
    "folder below a file": (["--method", "dpo", "--output", "{folder}/good.json/a/b"], ["good.json", "--output"]),
    "folder is a file": (["--method", "dpo", "--output", "{folder}/good.json"], ["good.json", "--output"]),
}


def told(capsys):
    """The one line on stderr."""
    err = capsys.readouterr().err
    assert err.startswith("nanlab: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_status_2_and_no_trace(name, tmp_path, capsys):
    arguments, words = BAD[name]
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    before = snapshot(tmp_path)
    arguments = ["run", "--output", str(tmp_path / "new" / "run"), *(a.format(folder=tmp_path) for a in arguments)]
    assert cli.main(arguments) == 2
    line = told(capsys)
    assert all(word in line for word in words), line
    assert snapshot(tmp_path) == before


def test_a_model_without_a_tokenizer(tmp_path, capsys):
    load_model("tiny")[0].save_pretrained(tmp_path / "weights")
    capsys.readouterr()  # saving may have shown its progress
    before = snapshot(tmp_path)
    arguments = ["run", "--method", "dpo", "--model", str(tmp_path / "weights"), "--output", str(tmp_path / "run")]
    assert cli.main(arguments) == 2
    assert "weights': holds no tokenizer" in told(capsys)
    assert snapshot(tmp_path) == before


def is_refused(model, capsys, words):
    """`nanlab run` says so in one line, and leaves nothing behind."""
    capsys.readouterr()  # saving may have shown its progress
    before = snapshot(model.parent)
    assert cli.main(["run", "--method", "dpo", "--model", str(model), "--output", str(model.parent / "run")]) == 2
    assert words in told(capsys)
    assert snapshot(model.parent) == before


def test_an_adapter_without_its_model(tmp_path, capsys):
    """transformers loads the model below it too, but saves the adapter alone."""
    peft = pytest.importorskip("peft")
    model, tokenizer = load_model("tiny")
    model.save_pretrained(tmp_path / "model")
    model.name_or_path = str(tmp_path / "model")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["query_key_value"])).save_pretrained(tmp_path / "lora")
    tokenizer.save_pretrained(tmp_path / "lora")
    is_refused(tmp_path / "lora", capsys, "lora': is an adapter; merge it into its model (merge_and_unload)")


def test_an_encoder_that_sees_the_future(tmp_path, capsys):
    _, tokenizer = load_model("tiny")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    is_refused(tmp_path / "bert", capsys, "bert': what it says at a token depends on later ones")


def test_a_model_that_the_run_would_clear_away(tmp_path, capsys):
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    folder = tmp_path / "run"
    arguments = ["run", "--method", "dpo", "--model", str(folder / "checkpoint-3"), "--output", str(folder)]
    assert cli.main(arguments) == 2
    assert "which a new run clears; choose another --output" in told(capsys)
    assert (folder / "checkpoint-3").is_dir()


def test_a_tokenizer_of_another_model(tmp_path, capsys):
    model, tokenizer = load_model("tiny")
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    capsys.readouterr()  # saving may have shown its progress
    before = snapshot(tmp_path)
    arguments = ["run", "--method", "dpo", "--model", str(tmp_path / "model"), "--output", str(tmp_path / "run")]
    assert cli.main(arguments) == 2
    line = told(capsys)
    assert "its vocabulary has 100 tokens" in line
    assert "use the tokenizer that belongs to it" in line
    assert snapshot(tmp_path) == before


def test_a_tokenizer_without_eos(tmp_path, capsys):
    model, tokenizer = load_model("tiny")
    tokenizer.eos_token = None
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    capsys.readouterr()  # saving may have shown its progress
    before = snapshot(tmp_path)
    for method in METHODS:
        arguments = ["run", "--method", method, "--model", str(tmp_path / "model"), "--output", str(tmp_path / "run")]
        assert cli.main(arguments) == 2
        assert "its tokenizer has no eos_token" in told(capsys)
        assert snapshot(tmp_path) == before


def test_a_model_with_fewer_positions_than_the_rows_need(tmp_path, capsys):
    """With rows that are cut to fit it runs to the end, though a prompt and its answer may need more."""
    config = GPT2Config(n_positions=24, n_embd=32, n_layer=1, n_head=2, vocab_size=1536, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    capsys.readouterr()  # saving may have shown its progress
    before = snapshot(tmp_path)
    arguments = ["run", "--method", "tpo", "--model", str(tmp_path / "model"), "--output", str(tmp_path / "run")]
    assert cli.main(arguments) == 2
    line = told(capsys)
    assert "has 24 positions, and the longest row has 4" in line
    assert "use --max-length 24 or another model" in line
    assert snapshot(tmp_path) == before
    assert cli.main([*arguments, "--max-length", "24", "--steps", "1"]) in (0, 1)
    assert (tmp_path / "run" / "result.json").is_file()


def test_tokens_that_no_row_has_may_be_missing_in_the_model(tmp_path):
    """Some real models are like that: Gemma 3 has one for pictures."""
    model, tokenizer = load_model("tiny")
    tokenizer.add_tokens(["<picture>"])
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    run = train_and_evaluate("dpo", model=str(tmp_path / "model"), output=tmp_path / "run", steps=1,
                             report=lambda line: None)  # fmt: skip
    assert run.finite()


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_rows_that_are_all_too_long_are_refused_before_the_warm_up(split, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(full_run, "warm_up", lambda *args, **kwargs: pytest.fail("it warmed up first"))
    rows = {"train": ROWS, "held_out": ROWS} | {split: [{**ROW, "prompt": "word " * 60}] * 3}
    data = DatasetDict({name: Dataset.from_list(part) for name, part in rows.items()})
    monkeypatch.setattr(full_run, "load_preferences", lambda source: data)
    assert cli.main(["run", "--method", "dpo", "--output", str(tmp_path / "run")]) == 2
    assert f"{split} dataset: no row of 3 has a completion token within max_length=48" in told(capsys)
    assert snapshot(tmp_path) == {}


def test_a_bad_scale_in_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANLAB_SCALE", "huge")
    assert cli.main(["run", "--method", "dpo", "--output", str(tmp_path / "run")]) == 2
    assert "NANLAB_SCALE='huge'" in told(capsys)
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("call", ["mkdir", "write_text"])
def test_a_read_only_folder(call, tmp_path, monkeypatch, capsys):
    """As root a mode of 0o500 refuses nothing, so the refusal is made here."""

    def refuse(self, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, call, refuse)
        assert cli.main(["run", "--method", "dpo", "--output", str(tmp_path / "run")]) == 2
    assert "Read-only file system; choose another --output" in told(capsys)
    assert snapshot(tmp_path) == {"run": False}


def test_a_full_disk(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(full_run.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    assert cli.main(["run", "--method", "dpo", "--output", str(tmp_path / "new" / "run")]) == 2
    line = told(capsys)
    assert "1 MB are free" in line
    assert int(line.split("needs ")[1].split(" MB")[0]) > 20
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_set_up_leaves_a_finished_run_as_it_is(method, finished):
    _, folder, _ = finished[method]
    before = snapshot(folder)
    with pytest.raises(InputError, match="max_length=3"):
        train_and_evaluate(method, output=folder, max_length=3, report=lambda line: None)
    assert snapshot(folder) == before


def test_in_a_process_of_its_own_stderr_is_that_one_line_too(tmp_path):
    command = [sys.executable, "-m", "nanlab", "run", "--method", "dpo", "--model", str(tmp_path / "nothing"),
               "--output", str(tmp_path / "run")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("nanlab: ")
    assert done.stderr.count("\n") == 1
    assert snapshot(tmp_path) == {}


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_table_or_json_and_tells_by_its_status(tmp_path, monkeypatch, capsys):
    asked = []

    def train(method, **options):
        asked.append((method, options["model"], options["steps"], options["size"], options["memory_gb"]))
        options["report"]("a stage")
        return Run({"method": method}, {**GOOD, "eval_loss": 2.0}, after, {}, [], [])

    monkeypatch.setattr(full_run, "train_and_evaluate", train)
    arguments = ["run", "--method", "dpo", "--model", "m", "--steps", "5", "--scale", "full", "--memory-gb", "2.5"]
    after = GOOD
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("a stage\n")
    assert "ok    the loss fell: by 1.00" in out
    assert err == ""
    after = {**GOOD, "eval_loss": math.nan}
    assert cli.main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["after"]["eval_loss"] == "NaN"
    assert asked == [("dpo", "m", 5, "full", 2.5)] * 2


def test_a_file_of_pairs_is_split_and_used(tmp_path):
    (tmp_path / "rows.json").write_text(FILES["good.json"])
    run = train_and_evaluate("dpo", dataset=tmp_path / "rows.json", output=tmp_path / "run", steps=1,
                             report=lambda line: None)  # fmt: skip
    assert run.traps == {}
    assert run.settings["dataset"] == str(tmp_path / "rows.json")
    assert all(math.isfinite(value) for value in run.after.values())


@pytest.mark.parametrize("name", ["rows.ndjson", "rows.JSONL", "rows.Json"])
def test_kinds_of_files_go_by_any_case(name, tmp_path):
    (tmp_path / name).write_text("\n".join(map(json.dumps, ROWS)))
    assert len(load_preferences(tmp_path / name, "train")) == 18


def test_the_tokenizer_of_the_start_has_a_pad_token_of_its_own(finished):
    _, folder, _ = finished["dpo"]
    tokenizer = full_run._load(folder / "start")[1]
    assert tokenizer.pad_token == "<|padding|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tiny_tokenizer().pad_token is None
