"""Two things one does with a causal language model: score completions (and batch them for it), and copy it."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nanlab.numerics import token_logps


def completion_batch(
    prompts: list[list[int]], completions: list[list[int]], pad_token_id: int = 0, max_length: int | None = None
) -> dict[str, Tensor]:
    """What `completion_log_probs` takes, `[rows, length]` each: ids cut to `max_length` and padded on the right."""
    rows = [*zip(prompts, completions, strict=True)]
    whole = lambda numbers: torch.tensor(numbers[:max_length], dtype=torch.long)
    ids = [whole([*prompt, *completion]) for prompt, completion in rows]
    masks = [whole([0] * len(prompt) + [1] * len(completion)) for prompt, completion in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_token_id),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "completion_mask": pad_sequence(masks, batch_first=True),
    }


def completion_log_probs(
    model: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor, completion_mask: Tensor
) -> Tensor:
    """Log-prob of each completion token under the model.

    Args:
        model: a transformers causal LM, also wrapped (PEFT, DDP, FSDP).
        input_ids, attention_mask, completion_mask: `[B, T]`; the last is 1 on completion tokens.

    Returns:
        `[B, T - 1]`, fp32 (fp64 of an fp64 model), in nats: position t holds the log-prob of token t + 1, exactly 0
        where that is no completion token. Such positions have no gradient, whatever the model computed there.

    The head (hidden state to vocabulary) runs on completion tokens only. Most of a step's memory is logits, and the
    prompt's are never used.
    """
    mask = completion_mask[:, 1:].bool()
    with _head_sees(model, mask):
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits  # [1, N, V]
    labels = input_ids[:, 1:][mask][None]
    log_probs = token_logps(logits, labels, torch.ones_like(labels, dtype=torch.bool))[0]
    return log_probs.new_zeros(mask.shape).masked_scatter(mask, log_probs)


@contextmanager
def _head_sees(model: torch.nn.Module, mask: Tensor):
    """Hands the model's head the N hidden states that predict a masked-in token, as `[1, N, H]`."""
    width = mask.shape[1]

    def select(head, args):
        (hidden,) = args  # [B, T, H]; prompt-tuning adapters put virtual tokens in front, so count from the end
        return (hidden[:, -width - 1 : -1][mask][None],)

    hook = _unwrapped(model).get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while not hasattr(model, "get_output_embeddings"):
        model = model.module  # DDP
    return model


def clone(model: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """An independent copy of a transformers model: same class, config, weights, buffers, device and mode.

    `copy.deepcopy` is not safe here: a library may have replaced `model.forward` by a function that remembers the
    original (TRL's trainers do). The deep copy then runs the *old* model's weights and never trains.

    Args:
        dtype: casts the weights, all to one type; rotary tables keep the precision that transformers gives them. By
            default everything keeps its own type, also in a model of several.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # building draws random weights
        twin = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype or model.dtype)
    for own, other in zip(twin.parameters(), model.parameters(), strict=True):
        own.data = own.data.to(own.dtype if dtype else other.dtype)
        own.requires_grad_(other.requires_grad)
    twin.load_state_dict(model.state_dict())
    for name, buffer in model.named_buffers():  # a state dict lacks the non-persistent ones
        own = twin.get_buffer(name)
        own.data = buffer.detach().to(own.device, own.dtype if dtype else buffer.dtype, copy=True)
    twin.generation_config = copy.deepcopy(model.generation_config)
    return twin.to(model.device).train(model.training)
