"""Real models and what surrounds them: attention, checkpoints, autocast, PEFT, compile, accumulation, two ranks."""

import math

import pytest
import torch
from marks import lines_of
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from nanlab import locate

line = lines_of(__file__)
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}
MODELS = {
    "bert": (BertForMaskedLM, BertConfig, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {}),
    "qwen": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 2}),
}


def make(name: str, attention: str = "eager", **config) -> nn.Module:
    torch.manual_seed(0)
    model, settings, more = MODELS[name]
    return model(settings(**SIZE, **more, attn_implementation=attention, **config)).train()


def batch(rows: int = 3, length: int = 8) -> dict[str, torch.Tensor]:
    """Left- and right-padded rows, as real batches have them."""
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(1, 64, (rows, length), generator=generator), torch.ones(rows, length, dtype=torch.long)
    mask[1, :5] = 0
    mask[2, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def stepper(model: nn.Module, inputs: dict[str, torch.Tensor], eps: float = 1e-4):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, eps=eps)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**inputs).loss  # call of the model
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_healthy_model_is_not_blamed_and_a_planted_one_is_found(name, attention, dtype):
    model = make(name, attention).to(dtype)
    report = locate(stepper(model, batch()), model=model)
    assert not report.found, str(report)
    assert report.exception is None
    layer = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-3]
    with torch.no_grad():
        model.get_submodule(layer).weight[1, 1] = math.nan
    report = locate(stepper(model, batch()), model=model)
    assert (report.cause, report.phase, report.module, report.rows) == ("bad_state", "state", layer, [1]), str(report)
    assert report.source == line("call of the model")
    assert report.library.startswith("transformers/models/")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_phase_module_and_line(reentrant):
    model = make("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert not locate(stepper(model, batch()), model=model).found
    model.model.layers[1].mlp.act_fn = SquareRoot()
    report = locate(stepper(model, batch()), model=model)
    assert (report.cause, report.phase, report.source) == ("gradient_at_edge", "backward", line("the slope"))
    assert report.module == "model.layers.1.mlp.act_fn"


class SquareRoot(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sqrt(x - x.detach())  # the slope


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    model, inputs = make("gpt_neox"), batch()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            loss = model(**inputs).loss  # under autocast
        loss.backward()
        return loss

    assert not locate(step, model=model).found
    with torch.no_grad():
        model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.normal_(std=3e4)
    report = locate(step, model=model)
    if dtype is torch.bfloat16:
        assert not report.found, "bfloat16 has room for this"
        return
    assert (report.cause, report.module) == ("overflow", "gpt_neox.layers.0.mlp.dense_h_to_4h")
    assert report.source == line("under autocast")
    assert "65504" in report.explanation


def test_peft_lora_layer():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(make("llama"), config)
    assert not locate(stepper(model, batch()), model=model).found
    name = next(n for n, _ in model.named_parameters() if "lora_B" in n)
    with torch.no_grad():
        model.get_parameter(name)[3] = math.inf
    report = locate(stepper(model, batch()), model=model)
    assert (report.cause, report.op, report.rows) == ("bad_state", f"parameter {name}", [3])
    assert report.module == name.removesuffix(".weight")
    assert report.library.startswith("peft/")


def test_a_compiled_model_is_run_eagerly_and_located():
    model = make("gpt_neox")
    model.forward = torch.compile(model.forward, backend="eager")
    assert not locate(stepper(model, batch()), model=model).found
    model.gpt_neox.layers[0].mlp.act = SquareRoot()
    report = locate(stepper(model, batch()), model=model)
    assert (report.phase, report.source) == ("backward", line("the slope"))


def test_gradient_accumulation_names_the_micro_batch_that_overflows():
    model = nn.Sequential(nn.Linear(4, 1, bias=False)).half()
    x = torch.full((2, 4), 200.0).half()

    def step() -> None:
        for _ in range(3):
            (model(x).float() * 100).sum().backward()  # accumulated

    report = locate(step, model=model)
    assert (report.cause, report.phase, report.op, report.kind) == ("overflow", "backward", "add", "inf")
    assert report.source == line("accumulated")
    assert "gradient of 0.weight" in report.story[0]
    assert report.module == "0"


def test_the_attention_row_that_sees_nothing():
    model, inputs = make("llama"), batch()
    mask = torch.zeros(3, 1, 8, 8).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf)
    step = stepper(model, {**inputs, "attention_mask": mask})
    assert not locate(step, model=model).found
    mask[1, :, 4] = -math.inf
    report = locate(stepper(make("llama"), {**inputs, "attention_mask": mask}), mask=mask)
    assert (report.cause, report.phase, report.op, report.rows) == ("masked_row", "forward", "_softmax", [1]), str(
        report
    )
    assert report.library.startswith("transformers/models/llama/")


def test_rows_of_the_batch_are_given_for_activations():
    model, inputs = make("gpt_neox"), batch()
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    embeddings[2, 3, 5] = math.nan
    report = locate(lambda: model(inputs_embeds=embeddings).logits.sum(), embeddings=embeddings)
    assert (report.cause, report.op, report.rows) == ("bad_input", "batch embeddings", [2])


def test_a_bad_row_before_batch_norm_is_no_bad_buffer():
    norm, x = nn.BatchNorm1d(4), torch.randn(6, 4)
    x[2, 1] = math.nan
    report = locate(lambda: norm(x).sum().backward(), model=norm, x=x)
    assert (report.cause, report.op, report.rows) == ("bad_input", "batch x", [2])
    assert report.others == []
    assert "running" not in str(report.story[:-1])
