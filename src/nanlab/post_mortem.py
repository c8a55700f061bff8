"""What a run that was ended leaves behind: a folder with the failing step's batches, to run them again."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanlab.errors import InputError
from nanlab.snapshots import map_leaves, plain, rng_state, set_rng_state

WEIGHTS_LIMIT = 256 * 2**20  # bytes: the folder holds the weights of small models only


def _storable(value: Any) -> Any:
    """What can be loaded again without running foreign code: tuples lose the names of their fields."""
    return map_leaves(value, _storable_leaf, lambda old, items: tuple(items))


def _storable_leaf(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        leaf = torch.from_numpy(leaf.copy())  # it may be read-only, or run backwards
    if torch.is_tensor(leaf):
        return (leaf.detach() if leaf.layout != torch.strided else plain(leaf)).cpu()
    known = str | int | float | complex | bool | torch.dtype | torch.device | None
    return leaf if isinstance(leaf, known) else repr(leaf)


def write(
    folder: Path, batches: list, model: nn.Module, log_tail: Mapping, summary: Mapping, report: list[str]
) -> Path:
    """Make a folder that is whole or not there: batches, small weights, what was logged. Returns its path.

    folder: the path it should have; ``folder-2`` and so on if an earlier run has left evidence there. batches: one
    mapping with args, kwargs and rng for each micro-batch of the step. log_tail, summary: for JSON. report: lines of
    text.
    """
    free = (folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, 1000)))
    target = next((path for path in free if not path.exists()), free[-1])
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    evaluating = [name for name, module in model.named_modules() if not module.training]  # a frozen BatchNorm
    batches = [{**batch, "evaluating": evaluating} for batch in batches]
    torch.save(_storable(batches), draft / "batches.pt")
    state = model.state_dict()
    small = sum(t.nbytes for t in state.values() if torch.is_tensor(t)) <= WEIGHTS_LIMIT
    if whole := small and not any(hasattr(t, "to_local") for t in state.values()):
        torch.save(_storable(dict(state)), draft / "weights.pt")
    (draft / "log_tail.json").write_text(json.dumps(log_tail, default=str, indent=1))
    more = {"torch": torch.__version__, "weights": whole, "micro_batches": len(batches)}
    (draft / "summary.json").write_text(json.dumps({**summary, **more}, indent=1))
    (draft / "report.txt").write_text("\n".join([*report, "", *_contents(len(batches), whole)]) + "\n")
    os.replace(draft, target)
    return target


def _contents(micro_batches: int, whole: bool) -> list[str]:
    weights = "weights.pt" if whole else "not here (too large, or sharded): load the checkpoint of the step before"
    return [
        f"batches.pt  {micro_batches} micro-batches of this rank, with the state of the random generators",
        f"weights     {weights}",
        "Run it again: nanlab.guard.replay(this_folder, trainer), or replay(this_folder, call, model=model) where",
        "call(*args, **kwargs) computes the loss of one recorded batch.",
    ]


def call_again(call: Callable, batch: Mapping, device: torch.device) -> Callable[[], Tensor]:
    """A function that gives ``call`` a recorded batch, with the random generators as they were."""

    def run():
        set_rng_state(batch["rng"], device)
        inputs = batch["args"], batch["kwargs"]
        args, kwargs = map_leaves(inputs, lambda leaf: leaf.to(device) if torch.is_tensor(leaf) else leaf)
        return call(*args, **kwargs)

    return run


def forward_backward(calls: Iterable[Callable[[], Tensor]], device: torch.device) -> Tensor:
    """The sum of the losses, each with its backward done: gradients add up as they did in the step."""
    total = torch.zeros((), device=device)
    for call in calls:
        loss = call()
        loss.backward()
        total = total + loss.detach()
    return total


def named_tensors(batches: Iterable[Mapping]) -> dict[str, Tensor]:
    """The batch's own tensors under the names a reader knows them by, numbered if there are several micro-batches."""
    named: dict[str, Tensor] = {}
    batches = list(batches)
    for i, batch in enumerate(batches, 1):
        flat = dict(batch["kwargs"])
        for j, argument in enumerate(batch["args"]):
            flat.update(argument if isinstance(argument, Mapping) else {f"argument_{j}": argument})
        suffix = f"_{i}" if len(batches) > 1 else ""
        named.update({f"{key}{suffix}": value for key, value in flat.items() if torch.is_tensor(value)})
    taken = ("step", "model", "optimizer", "mode", "max_batches")  # arguments of locate() itself
    return {key: value for key, value in named.items() if key not in taken}


def trainer_loss(trainer: Any, inputs: dict, **kwargs) -> Tensor:
    """The loss of a batch as the Trainer computes it in a training step, before the backward pass."""
    with trainer.compute_loss_context_manager():
        return trainer.compute_loss(trainer.model, dict(inputs), **kwargs)


def replay(folder: str | Path, step: Any, *, model: nn.Module | None = None) -> Any:
    """Run the batches of a post-mortem folder once more under `locate`, and return its Report.

    folder: what `GuardStop.folder` names. step: a Trainer, or a callable that gets one recorded batch as the forward
    got it (a Trainer's: the inputs dict and ``num_items_in_batch``) and returns the scalar loss. model: the module
    that `step` uses; with a Trainer its own. Weights in the folder are loaded into the model, and stay there. NumPy
    arrays come back as tensors, named tuples as plain ones, objects that are no numbers as their text.
    Submodules run in the mode, training or not, that they ran in. Gradients are dropped, and modes and random
    generators put back afterwards. Raises `InputError` if the folder is not one,
    is damaged, or holds the weights of another model.
    """
    folder = Path(folder)
    if not (folder / "batches.pt").is_file():
        raise InputError(f"replay: {folder} holds no batches.pt; give the folder that the guard named when it stopped")
    if hasattr(step, "compute_loss"):
        model, step = step.model, functools.partial(trainer_loss, step)
    if model is None:
        raise InputError("replay: name the model: replay(folder, call, model=model)")
    from nanlab.tracing import locate

    device = next(model.parameters()).device
    batches = _load(folder / "batches.pt", device)
    if (folder / "weights.pt").is_file():
        _load_weights(model, folder / "weights.pt", device)
    calls = [call_again(step, batch, device) for batch in batches]
    before, modes = rng_state(device), {module: module.training for module in model.modules()}
    evaluating = batches[0].get("evaluating", ()) if batches else ()
    for name, module in model.named_modules():
        module.training = name not in evaluating
    try:
        return locate(functools.partial(forward_backward, calls, device), model=model, **named_tensors(batches))
    finally:
        for module, mode in modes.items():
            module.training = mode
        model.zero_grad(set_to_none=True)
        set_rng_state(before, device)


def _load(path: Path, device: torch.device) -> Any:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # pickle, zip and PyTorch each have their own for a damaged file
        raise InputError(f"replay: {path} is damaged ({type(error).__name__}); take another folder") from error


def _load_weights(model: nn.Module, path: Path, device: torch.device) -> None:
    try:
        model.load_state_dict(_load(path, device))
    except (RuntimeError, TypeError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"replay: {path} does not fit this model; give the one that ran: {why:.200}") from error
