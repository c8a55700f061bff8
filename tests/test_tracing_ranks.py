"""Trainers on two ranks, sharded models, and tensors made of others."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from packaging.version import Version
from sharding import SHARDED
from torch import nn
from torch.utils._pytree import tree_map

from nanlab import locate

WORKER = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nanlab import locate

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


def sharded(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    if kind == "fsdp1":
        model[0] = FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if kind == "tensor parallel":
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, **({"mp_policy": half} if kind == "fsdp2 in bfloat16" else {}))
    return model


def weight_of(model):
    weight = next(model.parameters())
    return getattr(weight, "_local_tensor", weight).detach().view(-1)


def report(kind, fault):
    model = sharded(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0 if kind == "tensor parallel" else rank)
    x = torch.randn(4, 8)
    if rank == 0 and fault == "data":
        x[2, 3] = torch.nan
    if rank == 0 and fault == "weight":
        weight_of(model)[0] = torch.nan

    def step():
        optimizer.zero_grad()
        y = model(x)
        if fault == "logarithm":
            y = torch.log(y * 0)  # BUG logarithm
        if fault == "edge":
            y = y + (y - y.detach()).square().sqrt()  # BUG edge
        y.float().square().mean().backward()
        if kind == "fsdp1":
            model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    found = locate(step, model=model, optimizer=optimizer, x=x)
    return [found.cause, found.phase, found.op, found.source.partition(":")[2], len(found.others), str(found.exception)]


KINDS = ("fsdp2", "fsdp2 in bfloat16", "fsdp1", "tensor parallel")
FAULTS = ("nothing", "data", "logarithm", "edge", "weight")
said = {f"{kind}, {fault}": report(kind, fault) for kind in KINDS for fault in FAULTS}
print("SAID", json.dumps(said), flush=True)
dist.destroy_process_group()
"""


def run_twice(worker: str, folder: Path) -> list[dict]:
    """What each of two ranks says in JSON."""
    script = folder / "worker.py"
    script.write_text(worker)
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ranks = [
        subprocess.Popen([sys.executable, script], env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, **pipes)
        for r in range(2)
    ]
    try:
        texts = [process.communicate(timeout=240)[0].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    lines = [[row.partition("SAID ")[2] for row in text.splitlines() if "SAID " in row] for text in texts]
    assert all(lines), texts
    return [json.loads(own[0]) for own in lines]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


KINDS = ("fsdp2", "fsdp2 in bfloat16", "fsdp1", "tensor parallel")


def line_of(mark: str) -> str:
    return str(next(i for i, text in enumerate(WORKER.splitlines(), 1) if text.endswith(f"# BUG {mark}")))


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict]:
    """What each of the two ranks says of each sharded model and fault."""
    return run_twice(WORKER, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_sharded_step_is_quiet_and_not_disturbed(said, kind):
    for rank in said:
        assert rank[f"{kind}, nothing"] == ["", "", "", "", 0, "None"]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_of_a_bad_row_one_rank_names_the_data_and_the_other_the_reduction(said, kind):
    first, second = (rank[f"{kind}, data"] for rank in said)
    assert first[:3] == ["bad_input", "data", "batch x"]
    assert first[4:] == [0, "None"]
    assert second[:3] == ["unknown", "backward", "all_reduce"]
    assert second[4:] == [0, "None"]


@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_a_sharded_step_are_named_with_their_line(said, kind):
    for rank in said:
        assert rank[f"{kind}, logarithm"] == ["log_of_zero", "forward", "log", line_of("logarithm"), 0, "None"]
        edge = rank[f"{kind}, edge"]
        assert edge[:2] == ["gradient_at_edge", "backward"]
        assert edge[3:] == [line_of("edge"), 0, "None"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_weight_is_state_for_the_rank_that_holds_it(said, kind):
    found = said[0][f"{kind}, weight"]
    assert found[:2] == ["bad_state", "state"]
    assert "parameter" in found[2]
    assert found[4:] == [0, "None"]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_gathered_bad_weight_is_state_for_the_other_rank_too(said, kind):
    assert said[1][f"{kind}, weight"][:2] == ["bad_state", "state"]


# -- a step under DDP --------------------------------------------------------------------------------------------------
STEP = """
import json, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nanlab import locate

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
x = torch.ones(2, 4)
x[1, 2] = torch.nan if dist.get_rank() == 1 else 1.0
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)


def step():
    model(x).sum().backward()
    optimizer.step()


report = locate(step, model=model, optimizer=optimizer, x=x)
print("SAID", json.dumps([report.found, report.cause, report.phase, report.op, report.rows]), flush=True)
dist.destroy_process_group()
"""


def test_two_ranks_each_report_their_own(tmp_path):
    healthy, faulty = run_twice(STEP, tmp_path)
    assert faulty == [True, "bad_input", "data", "batch x", [1]]
    assert healthy == [True, "unknown", "backward", "all_reduce", []]


# -- a trainer on two ranks --------------------------------------------------------------------------------------------
TRAINER = """
import json, os
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from nanlab import locate

rank = int(os.environ["RANK"])
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels, fault):
        loss = (self.layer(x).squeeze(-1) - labels).square().mean()
        if fault.any():
            loss = loss + torch.log(loss * 0)  # BUG on one rank
        return {"loss": loss}


def report(mode, fault):
    torch.manual_seed(0)
    row = lambda i: {"x": torch.randn(4), "labels": torch.randn(()), "fault": torch.tensor(fault and i == 13)}
    rows = list(map(row, range(24)))
    args = TrainingArguments(
        "runs", per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=6, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, remove_unused_columns=False, ddp_backend="gloo", ddp_timeout=60,
    )
    trainer = Trainer(Net(), args, train_dataset=rows, eval_dataset=rows)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found = locate(trainer, mode=mode)
    same = all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    fine = torch.tensor([1.0])
    torch.distributed.all_reduce(fine)  # the ranks still answer each other
    line = found.source.partition(":")[2]
    return [found.cause, line, found.batch, found.explanation, str(found.exception), same, fine.item()]


said = {f"{mode}, {fault}": report(mode, fault) for mode in ("train", "eval") for fault in (False, True)}
print("SAID", json.dumps(said), flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_a_fault_on_one_rank_stops_both_and_the_other_says_where_to_look(tmp_path):
    ranks = run_twice(TRAINER, tmp_path)
    number = next(str(i) for i, text in enumerate(TRAINER.splitlines(), 1) if text.endswith("# BUG on one rank"))
    for mode in ("train", "eval"):
        for rank in ranks:
            assert rank[f"{mode}, False"] == ["", "", None, "", "None", True, 2.0]
        both = [rank[f"{mode}, True"] for rank in ranks]
        guilty, other = sorted(both, key=lambda said: said[:2] != ["log_of_zero", number])
        assert guilty[:2] == ["log_of_zero", number]
        assert other[2] == guilty[2]  # the batch
        assert other[0] == "unknown" if mode == "train" else "Another rank" in other[3]
        assert guilty[4:] == other[4:] == ["None", True, 2.0]


SHARDED_TRAINER = """
import json, os
import torch
from sharding import shard_on_a_cpu

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
shard_on_a_cpu()

from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from nanlab import locate
from nanlab.course import load_model, load_preferences

_, tokenizer = load_model("tiny")
tokenizer.pad_token = "<|padding|>"
texts = [row["prompt"] + row["chosen"] for row in load_preferences()["train"].select(range(16))]
rows = [tokenizer(text, truncation=True, max_length=24) for text in texts]


class Faulty(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if rank == 1 and self.fault and self.state.global_step == 2:
            loss = loss + torch.log(loss * 0)  # BUG in a sharded trainer
        return loss


def trainer(fault):
    args = TrainingArguments(
        "runs", per_device_train_batch_size=2, max_steps=4, use_cpu=True, report_to=[], save_strategy="no", seed=0,
        disable_tqdm=True, logging_steps=1, ddp_timeout=60, logging_nan_inf_filter=False,
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    made = Faulty(load_model("tiny")[0], args, train_dataset=rows, data_collator=collator)
    made.fault = fault
    return made


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


plain, searched, faulty = trainer(False), trainer(False), trainer(True)
healthy = locate(searched)
found = locate(faulty)
said = {
    "sharded": plain.is_fsdp_enabled, "healthy": [healthy.found, str(healthy.exception)],
    "found": [found.cause, found.source.partition(":")[2], found.batch, str(found.exception)],
    "surfaced": found.story[-1], "same": losses(plain) == losses(searched),
}
print("SAID", json.dumps(said), flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(Version(accelerate.__version__) < Version("1.6"), reason="accelerate knows FSDP 2 from 1.6 on")
@pytest.mark.timeout(300)
def test_a_trainer_that_shards_its_model_is_searched_and_left_as_it_was(tmp_path, monkeypatch):
    for name, value in SHARDED.items():
        monkeypatch.setenv(name, value)
    ranks = run_twice(SHARDED_TRAINER, tmp_path)
    number = next(str(i) for i, text in enumerate(SHARDED_TRAINER.splitlines(), 1) if "# BUG" in text)
    for rank in ranks:
        assert rank["sharded"]
        assert rank["healthy"] == [False, "None"]
        assert rank["same"], "training after a search goes as without one"
        assert "gradient of gpt_neox.embed_in.weight" in rank["surfaced"]
    assert ranks[1]["found"] == ["log_of_zero", number, 2, "None"]
    assert ranks[0]["found"][0] == "unknown"
    assert ranks[0]["found"][2:] == [2, "None"]


# -- tensors that are made of others -----------------------------------------------------------------------------------
class Pair(torch.Tensor):
    """Two tensors that do everything twice."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, requires_grad=a.requires_grad)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        each = [tree_map(lambda x: getattr(x, part, x), (args, kwargs or {})) for part in ("a", "b")]  # noqa: B023
        return Pair(*(func(*given, **named) for given, named in each))


@pytest.mark.parametrize(("second", "cause"), [(1.0, ""), (0.0, "log_of_zero")])
def test_a_tensor_made_of_others_is_watched_in_its_parts(second, cause):
    w = nn.Parameter(Pair(torch.ones(3), torch.full((3,), second)))

    def step():
        logs = torch.log(w * 2)
        return logs.a.sum() + logs.b.sum()

    report = locate(step)
    assert (report.cause, report.exception) == (cause, None), str(report)
