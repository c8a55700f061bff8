"""The trainers on two gloo ranks: evaluation and training are those of a single process, also with a sharded model.

The test starts this very file under torchrun, and kills it with all its children after `BOUND` seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parent))
import test_trainers as one  # the same models, rows and trainers as on one process
from sharding import SHARDED, shard_on_a_cpu

BOUND = 240  # seconds
SIZES = (1, 3, 12)  # rows to evaluate: with one row the second rank has nothing of its own
STEP = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "logging_steps": 1}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * BOUND)]


def given(count: int) -> tuple[Any, list[dict[str, str]]]:
    """A tokenizer, and so many rows."""
    tokenizer = one.tiny_tokenizer()
    tokenizer.pad_token = "<|padding|>"
    held_out = one.load_preferences()["held_out"].select(range(count))
    return tokenizer, [{c: row[c] for c in ("prompt", "chosen", "rejected", "reference")} for row in held_out]


def measure(folder: Path, ranks: int) -> dict[str, dict[str, float]]:
    """Metrics for each method and number of rows; then, after the evaluations, one step over the same eight rows."""
    tokenizer, rows = given(12)
    found = {}
    for method in one.METHODS:
        batch = len(one.data_for(method, rows[:8])) // ranks
        options = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": 4, **STEP}
        trainer = one.make_trainer(method, folder, tokenizer, rows[:8], rows, **options)
        whole = trainer.eval_dataset
        for size in SIZES:
            metrics = trainer.evaluate(whole.select(range(size)))
            found[f"{method}, {size} rows"] = {k: v for k, v in metrics.items() if "_per_" not in k and "time" not in k}
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        moved = {name: before[name] - p.detach() for name, p in trainer.model.named_parameters()}
        found[f"{method}, step"] = {name: change.norm().item() for name, change in moved.items()}
        logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
        found[f"{method}, log"] = {k: v for k, v in logged.items() if k != "grad_norm"}
    return found


def train_and_evaluate(folder: Path, ranks: int) -> dict[str, dict[str, float]]:
    """Losses of three steps, then the metrics, for each method. (Under FSDP 2 nothing can be evaluated untrained.)"""
    tokenizer, rows = given(11)
    found = {}
    for method in one.METHODS:
        options = {"per_device_train_batch_size": 4 // ranks, "per_device_eval_batch_size": 2, "max_steps": 3}
        options |= {"learning_rate": 1e-4, "logging_steps": 1}
        trainer = one.make_trainer(method, folder, tokenizer, rows[:8], rows, **options)
        assert trainer.is_fsdp_enabled == (ranks > 1)
        trainer.train()
        losses = {str(entry["step"]): entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        metrics = {k: v for k, v in trainer.evaluate().items() if "_per_" not in k and "time" not in k}
        found[method] = {**losses, **metrics}
    return found


def on_two_ranks(folder: Path, **environment: str) -> list[dict[str, dict[str, float]]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    process = subprocess.Popen([*command, str(folder)], env=environment, start_new_session=True, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        output, _ = process.communicate(timeout=BOUND)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"two ranks did not end within {BOUND} s")
    assert process.returncode == 0, output[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def assert_alike(ranks: list[dict[str, dict[str, float]]], alone: dict[str, dict[str, float]]) -> None:
    for found in ranks:
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            assert found[name] == pytest.approx(expected, abs=1e-5, rel=1e-5), name


def test_two_ranks_are_one_process(tmp_path):
    assert_alike(on_two_ranks(tmp_path), measure(tmp_path, ranks=1))


@pytest.mark.skipif(Version(accelerate.__version__) < Version("1.6"), reason="accelerate knows FSDP 2 from 1.6 on")
def test_two_ranks_that_share_one_model_are_one_process(tmp_path):
    assert_alike(on_two_ranks(tmp_path, **SHARDED), train_and_evaluate(tmp_path, ranks=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, sharded = Path(sys.argv[1]), "ACCELERATE_USE_FSDP" in os.environ
    if sharded:
        shard_on_a_cpu()
    found = (train_and_evaluate if sharded else measure)(folder, ranks=2)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
