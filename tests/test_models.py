"""Scoring completions and copying a model, held against plain transformers code in float64."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

from nanlab.models import clone, completion_batch, completion_log_probs

VOCABULARY = 61
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "gpt_neox": GPTNeoXConfig(**SMALL, intermediate_size=32, max_position_embeddings=64),
    "llama": LlamaConfig(**SMALL, intermediate_size=32, max_position_embeddings=64, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64),
}


def make_model(name="gpt_neox", seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
        for parameter in model.parameters():  # at the default scale all log-probs would be alike
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def make_batch(seed=0):
    """Four rows: one padded, one whose completion is a single token, one without a completion."""
    ids = torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(seed))
    attention, completion = torch.ones_like(ids), torch.zeros_like(ids)
    completion[0, 5:], completion[1, 3:8], completion[2, 11] = 1, 1, 1
    attention[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


def plain_log_probs(model, batch):
    """The whole float64 log-softmax of every position, then the mask."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
    labels = batch["input_ids"][:, 1:]
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return log_probs * batch["completion_mask"][:, 1:]


def test_a_batch_of_completions_is_cut_and_padded_on_the_right():
    batch = completion_batch([[1, 2], [], [5]], [[3, 4], [], [6]], pad_token_id=9, max_length=3)
    assert {tensor.dtype for tensor in batch.values()} == {torch.long}  # also the row without a token
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 2, 3], [9, 9, 9], [5, 6, 9]],
        "attention_mask": [[1, 1, 1], [0, 0, 0], [1, 1, 0]],
        "completion_mask": [[0, 0, 1], [0, 0, 0], [0, 1, 0]],
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradients_are_those_of_the_plain_formula(name):
    model, batch = make_model(name), make_batch()
    ours, plain = completion_log_probs(model, **batch), plain_log_probs(model, batch)
    assert ours.dtype == torch.float32
    assert ours.shape == (4, 11)
    assert_close(ours.double(), plain, atol=1e-5, rtol=1e-5)
    assert (ours[batch["completion_mask"][:, 1:] == 0] == 0).all()
    weights = torch.randn(4, 11, generator=torch.Generator().manual_seed(1))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = [torch.autograd.grad((x * weights).sum(), parameters) for x in (ours, plain)]
    assert max(g.abs().max() for g in gradients[1]) > 0.1
    for parameter, *pair in zip(names, *gradients, strict=True):
        assert_close(*pair, atol=1e-4, rtol=1e-4, msg=lambda text, parameter=parameter: f"{parameter}: {text}")


def test_the_head_runs_on_completion_tokens_only():
    model, batch, seen = make_model(), make_batch(), []
    hook = model.get_output_embeddings().register_forward_hook(lambda m, args, out: seen.append(out.shape))
    completion_log_probs(model, **batch)
    hook.remove()
    assert seen == [(1, int(batch["completion_mask"].sum()), VOCABULARY)]


def test_what_stands_outside_the_completion_does_not_count():
    """NaN on a prompt position of the head's input: neither value nor gradient sees it."""
    model, batch = make_model(), make_batch()
    clean = completion_log_probs(model, **batch)

    def poison(module, args, hidden):
        hidden = hidden.clone()
        hidden[0, :4] = torch.nan
        return hidden

    hook = model.gpt_neox.final_layer_norm.register_forward_hook(poison)
    poisoned = completion_log_probs(model, **batch)
    hook.remove()
    assert_close(poisoned, clean, atol=0, rtol=0)
    poisoned.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_no_hook_is_left_behind_even_after_an_error():
    model, batch = make_model(), make_batch()
    completion_log_probs(model, **batch)
    with pytest.raises(IndexError):
        completion_log_probs(model, **{**batch, "input_ids": batch["input_ids"] + VOCABULARY})
    assert not model.get_output_embeddings()._forward_pre_hooks
    full = model(input_ids=batch["input_ids"]).logits
    assert full.shape == (4, 12, VOCABULARY)


def test_wrapped_models_are_scored_the_same():
    peft = pytest.importorskip("peft")
    model, batch = make_model(), make_batch()
    expected = completion_log_probs(model, **batch).detach()
    wrapper = torch.nn.Module()
    wrapper.module, wrapper.forward = model, model.forward  # what DDP looks like
    assert_close(completion_log_probs(wrapper, **batch), expected, atol=0, rtol=0)
    with_prompt = peft.get_peft_model(
        clone(model), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    )
    scored = completion_log_probs(with_prompt, **batch)
    assert scored.shape == expected.shape
    assert (scored != 0).equal(expected != 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_clone_equals_its_model_and_shares_nothing(name):
    model, batch = make_model(name), make_batch()
    first = next(model.parameters()).requires_grad_(False)
    twin = clone(model)
    assert_close(completion_log_probs(twin, **batch), completion_log_probs(model, **batch), atol=0, rtol=0)
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    assert type(twin) is type(model)
    assert twin.training is model.training
    mine = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not mine & {t.data_ptr() for t in (*twin.parameters(), *twin.buffers())}
    assert twin.config is not model.config
    before = first.clone()
    next(twin.parameters()).data.fill_(7.0)
    assert_close(first, before)


def test_a_clone_keeps_mode_and_dtype_and_the_random_state():
    model = make_model().train()
    state = torch.get_rng_state()
    twin = clone(model, torch.bfloat16)
    assert torch.get_rng_state().equal(state)
    assert twin.training
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}
    assert_close(twin.gpt_neox.embed_in.weight, model.gpt_neox.embed_in.weight.bfloat16())
    inverse = twin.gpt_neox.rotary_emb.inv_freq  # rounded rotary angles would change every later position
    assert_close(inverse, model.gpt_neox.rotary_emb.inv_freq, atol=0, rtol=0)


def test_a_clone_of_a_model_of_two_types_is_not_rounded():
    model = make_model().bfloat16()
    head = model.get_output_embeddings().float()
    head.weight.data.add_(1e-4)  # bf16 does not hold it
    twin = clone(model)
    assert_close(twin.state_dict(), model.state_dict(), atol=0, rtol=0)  # compares types too
    assert_close(dict(twin.named_buffers()), dict(model.named_buffers()), atol=0, rtol=0)
    assert {p.dtype for p in clone(model, torch.float64).parameters()} == {torch.float64}


def test_a_clone_takes_over_a_changed_buffer():
    """A buffer outside the state dict, with NaN planted in it, is part of the model too."""
    model = make_model()
    model.gpt_neox.rotary_emb.inv_freq.data[0] = torch.nan
    assert clone(model).gpt_neox.rotary_emb.inv_freq[0].isnan()


def test_a_clone_of_a_patched_model_runs_its_own_weights():
    """TRL's trainers put a function in place of `forward` that remembers the model: a deep copy runs old weights."""
    model, batch = make_model(), make_batch()
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)
    outputs = {}
    for name, twin in {"deepcopy": copy.deepcopy(model), "clone": clone(model)}.items():
        for parameter in twin.parameters():
            parameter.data.zero_()
        outputs[name] = twin(input_ids=batch["input_ids"]).logits.abs().sum()
    assert outputs["deepcopy"] > 0  # the trap is real
    assert outputs["clone"] == 0
