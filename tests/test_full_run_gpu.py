"""The full run on a small GPU such as Colab's T4 (no fast bf16, 15 GB). Measuring needs a GPU, the rules do not."""

import math
from types import SimpleNamespace

import pytest
import torch

from nanlab import full_run
from nanlab.full_run import METHODS, train_and_evaluate

T4_GB, LIMIT_GB = 15.6, 12.0  # what the card has, and what a run may take of it


@pytest.mark.parametrize(("major", "fast"), [(7, False), (8, True), (9, True)])
def test_bf16_is_used_where_the_hardware_has_it(major, fast, monkeypatch):
    """Compute capability 7.5 is a T4, 8.0 an A100. On a T4 the run is in fp32: nothing in it needs a loss scaler."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major, minor=5))
    assert full_run._has_fast_bf16() is fast


def test_a_t4_takes_the_rows_of_a_step_in_parts():
    plan = full_run._plan("dpo", None, None, "full", None, None, T4_GB, 0)
    assert (plan["rows_at_once"], plan["accumulate"]) == (4, 4)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_a_full_run_on_a_t4_stays_within_12_gb(method, tmp_path, monkeypatch):
    """On any GPU: memory as a T4 has it, fp32 as on a T4, and an allocator that gives no more than the limit."""
    total = torch.cuda.get_device_properties(0).total_memory / 1e9
    monkeypatch.setattr(full_run, "_has_fast_bf16", lambda: False)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT_GB / total))
    try:
        run = train_and_evaluate(method, size="full", memory_gb=T4_GB, output=tmp_path / method)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print({stage: f"{gb:.2f} GB" for stage, gb in run.memory.items()})
    assert max(run.memory.values()) < LIMIT_GB
    assert run.finite()
    assert all(math.isfinite(entry["loss"]) for entry in run.history if "loss" in entry)
    assert all(passed for _, _, passed in run.checks()), str(run)
