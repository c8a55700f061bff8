"""The guard on two gloo ranks of which one is poisoned, and what happens to two ranks without it.

The tests start this very file under torchrun. Every process group gives up after a few seconds, torchrun is killed with
all its children after `BOUND` seconds: nothing here can hang.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import test_guard as one  # the same model, batches, faults and trainer as on one process

from nanlab.guard import watch

BOUND = 120  # seconds
PATIENCE = 5  # seconds that a rank waits for the other in the scenario that hangs


def launch(scenario: str, folder: Path) -> list[dict]:
    """Run a scenario on two ranks; what each rank returned."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [*command, __file__, scenario, str(folder)],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=BOUND)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{scenario} did not end within {BOUND} s:\n{output[-3000:]}")
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(path.is_file() for path in files), output[-3000:]
    return [json.loads(path.read_text()) for path in files]


# -- What the two ranks do ---------------------------------------------------------------------------


def wrapped(optimizer: str, **options):
    model = one.make_model()
    return nn.parallel.DistributedDataParallel(model, **options), one.OPTIMIZERS[optimizer](model.parameters())


def shard(steps, rank: int):
    """Each rank sees its own half of every micro-batch."""
    return [[x[rank * 3 : rank * 3 + 3] for x in step] for step in steps]


def train(steps, policy: str, optimizer: str = "adamw", inject=None, **options):
    """The plain loop of `test_guard`, under DDP with gradients synchronised at the last micro-batch only."""
    ddp, optimizer = wrapped(optimizer, **options)
    torch.manual_seed(2 + dist.get_rank())
    guard = watch(ddp, policy, optimizer=optimizer)
    inject = inject or (lambda *args, **kwargs: None)
    for i, step in enumerate(steps):
        inject("between steps", i, model=ddp.module, optimizer=optimizer)
        losses = []
        for j, x in enumerate(step):
            ddp.require_backward_grad_sync = j == len(step) - 1
            losses.append(ddp(x).square().mean() / len(step))
            losses[-1].backward()
        inject("before the decision", i, model=ddp.module, optimizer=optimizer, losses=losses)
        if guard.allow_step(losses):
            optimizer.step()
            inject("after the step", i, model=ddp.module, optimizer=optimizer)
            guard.after_step()
        optimizer.zero_grad()
    return one.everything(ddp.module, optimizer), guard


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def parameters_agree(state: dict) -> bool:
    """Whether the two ranks hold the same parameters and optimizer state (BatchNorm's buffers are each rank's own)."""
    for name, tensor in state.items():
        if "running" not in name:
            copies = [torch.empty_like(tensor) for _ in range(2)]
            dist.all_gather(copies, tensor)
            if not torch.equal(*copies):
                return False
    return True


def identity(folder: Path) -> dict:
    """Only rank 1 is poisoned."""
    rank, results = dist.get_rank(), {}
    for where, bad in one.POSITIONS.items():
        for accumulation in (1, 4):
            for optimizer in one.OPTIMIZERS:
                steps = shard(one.make_batches(8, accumulation), rank)
                spoiled = one.poison(steps, bad if rank == 1 else ())
                got, guard = train(spoiled, "skip", optimizer)
                expected, _ = train([s for i, s in enumerate(steps) if i not in bad], "off", optimizer)
                results[f"{where} {accumulation} {optimizer}"] = {
                    "same": same(got, expected),
                    "agree": parameters_agree(got),
                    "steps": [event.step - 1 for event in guard.events],
                    "what": sorted({event.what for event in guard.events}),
                    "ranks": sorted({r for event in guard.events for r in event.ranks}),
                    "rows": guard.summary().rows_lost,
                    "expected rows": 6 * accumulation * len(bad),
                    "expected steps": sorted(bad),
                }
    return results


def injections(folder: Path) -> dict:
    """Two hundred faults, each on one rank at one step. Buffers are each rank's own: else DDP heals those of rank 1."""
    rank, references, wrong = dist.get_rank(), {}, []
    steps = shard(one.make_batches(4), rank)
    for seed in range(200):
        at, kind, value, inject = one.injection(seed, len(steps))
        mine, optimizer = seed % 3 % 2 == rank, ("adamw", "sgd")[seed % 2]
        if kind == "loss":
            inject = one.keep_graph(at, value)
        spoiled = one.poison(steps, {at} if kind == "batch" and mine else (), value)
        got, guard = train(spoiled, "rollback", optimizer, inject if mine else None, broadcast_buffers=False)
        if (at, optimizer) not in references:
            clean = steps[:at] + steps[at + 1 :]
            references[at, optimizer], _ = train(clean, "off", optimizer, broadcast_buffers=False)
        shown = [(event.step - 1, event.what) for event in guard.events]
        if not same(got, references[at, optimizer]) or shown != [(at, one.SHOWS_AS.get(kind, kind))]:
            wrong.append([seed, kind, at, shown])
    return {"wrong": wrong}


def naive_divergence(folder: Path) -> dict:
    """Each rank looks at its own loss after backward, as popular advice has it."""
    rank = dist.get_rank()
    ddp, optimizer = wrapped("adamw")
    agree, finite = [], []
    for (x,) in one.poison(shard(one.make_batches(3), rank), {1} if rank == 1 else ()):
        loss = ddp(x).square().mean()
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()
        optimizer.zero_grad()
        agree.append(parameters_agree(one.everything(ddp.module, optimizer)))
        finite.append(all(bool(torch.isfinite(p).all()) for p in ddp.parameters()))
    return {"agree": agree, "finite": finite}


def naive_hang(folder: Path) -> dict:
    """Each rank leaves the batch out before backward if its own loss is bad."""
    rank = dist.get_rank()
    ddp, optimizer = wrapped("adamw")
    try:
        for (x,) in one.poison(shard(one.make_batches(3), rank), {1, 2} if rank == 1 else ()):
            loss = ddp(x).square().mean()
            if torch.isfinite(loss):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:  # the other rank never came
        return {"stuck": True, "error": str(error)[:200]}
    return {"stuck": False}


def dead(folder: Path) -> dict:
    """Rank 0 is poisoned for good: both ranks stop, each with a post-mortem of its own."""
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(one.make_model())
    guard = watch(model, max_consecutive=2, folder=folder / "guard")
    taken = 0
    try:
        for (x,) in one.poison(shard(one.make_batches(5), rank), {1, 2, 3, 4} if rank == 0 else ()):
            loss = model(x).square().mean()
            loss.backward()
            taken += guard.allow_step(loss)
    except one.GuardStop as stop:
        return {"taken": taken, "folder": stop.folder.name, "reason": stop.event.reason, "report": stop.folder.is_dir()}
    return {"taken": taken}


def trainer(folder: Path) -> dict:
    """A real Trainer: rows 0-1 of every four go to rank 0, 2-3 to rank 1; only a row of rank 1 is poisoned."""
    results = {}
    for accumulation in (1, 2):
        step_rows, bad_steps = 4 * accumulation, {1, 2}
        data = one.rows(step_rows * 5, bad={i * step_rows + 3 for i in bad_steps})
        make = lambda rows: one.make_trainer(rows, folder, accumulation, ddp_backend="gloo")  # noqa: B023
        got, guard = one.trained(make(data))
        clean = one.without(one.rows(step_rows * 5), step_rows, bad_steps)
        expected, _ = one.trained(make(clean), "off")
        results[accumulation] = {
            "same": same(got, expected),
            "agree": parameters_agree(got),
            "steps": [event.step - 1 for event in guard.events],
            "ranks": [list(event.ranks) for event in guard.events],
            "rows": guard.summary().rows_lost,
            "world": dist.get_world_size(),
        }
    return results


def fsdp(folder: Path) -> dict:
    """Each rank holds half of every parameter; a gradient is spoiled in the shard of rank 1 only."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def run(policy: str, bad: int | None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        fully_shard(model, mesh=mesh)
        optimizer = one.OPTIMIZERS["adamw"](model.parameters())
        guard = watch(model, policy, optimizer=optimizer)
        for i, (x,) in enumerate(shard(one.make_batches(4), dist.get_rank())):
            if i == bad and policy == "off":
                continue
            loss = model(x).square().mean()
            loss.backward()
            if i == bad and dist.get_rank() == 1:
                model[0].weight.grad.to_local()[0, 0] = float("nan")
            if guard.allow_step(loss):
                optimizer.step()
                guard.after_step()
            optimizer.zero_grad()
        return [p.full_tensor() for p in model.parameters()], guard

    expected, _ = run("off", 2)
    results = {}
    for policy in ("skip", "rollback"):
        got, guard = run(policy, 2)
        results[policy] = {
            "same": all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)),
            "events": [[event.step, event.what, event.name, list(event.ranks)] for event in guard.events],
        }
    return results


QUICK = (identity, naive_divergence, dead, fsdp)  # one start for all of them


def quick(folder: Path) -> dict:
    return {scenario.__name__: scenario(folder) for scenario in QUICK}


# -- What must come out ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> list[dict]:
    return launch("quick", tmp_path_factory.mktemp("quick"))


def test_two_ranks_end_as_if_neither_had_seen_the_batch_that_poisoned_one(both):
    ranks = [result["identity"] for result in both]
    assert len(ranks[0]) == 20
    assert ranks[0] == ranks[1]
    for case, result in ranks[0].items():
        assert result["same"], case
        assert result["agree"], case
        assert result["steps"] == result["expected steps"], case
        assert result["rows"] == result["expected rows"], case
        assert (result["what"], result["ranks"]) == (["loss"], [1]), case


def test_skipping_on_ones_own_loss_kills_the_healthy_rank_first_and_then_both(both):
    healthy, poisoned = [result["naive_divergence"] for result in both]
    assert healthy["agree"] == poisoned["agree"] == [True, False, False]
    assert healthy["finite"] == [True, False, False]  # it took the NaN that was averaged in
    assert poisoned["finite"] == [True, True, False]


def test_a_dead_run_ends_on_both_ranks(both):
    ranks = [result["dead"] for result in both]
    assert [r["taken"] for r in ranks] == [1, 1]
    assert [r["folder"] for r in ranks] == ["step-000003-rank0", "step-000003-rank1"]
    assert all(r["report"] and "loss is nan on rank 0" in r["reason"] for r in ranks)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_fsdp_shards_decide_together(both, policy):
    for result in both:
        assert result["fsdp"][policy]["same"]
        assert result["fsdp"][policy]["events"] == [[3, "gradient", "0.weight", [1]]]


@pytest.mark.slow
def test_skipping_backward_on_ones_own_loss_leaves_the_other_rank_waiting(tmp_path):
    ranks = launch("naive_hang", tmp_path)
    assert ranks[0]["stuck"]


@pytest.mark.slow
def test_two_hundred_injections_on_either_rank(tmp_path):
    for result in launch("injections", tmp_path):
        assert result["wrong"] == []


@pytest.mark.slow
def test_a_trainer_on_two_ranks(tmp_path):
    ranks = launch("trainer", tmp_path)
    assert ranks[0] == ranks[1]
    for accumulation, result in ranks[0].items():
        assert (result["same"], result["agree"], result["world"]) == (True, True, 2)
        assert result["steps"] == [1, 2]
        assert result["ranks"] == [[1], [1]]
        assert result["rows"] == 2 * 4 * int(accumulation)


if __name__ == "__main__":
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if scenario != "trainer":  # accelerate sets up its own
        patience = PATIENCE if scenario == "naive_hang" else BOUND
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=patience))
    result = globals()[scenario](folder)
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    if scenario != "naive_hang":  # there the other rank is not coming
        dist.destroy_process_group()
