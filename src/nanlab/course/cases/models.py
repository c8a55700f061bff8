"""Cases: weights and buffers that are not what they should be, and a backward written by hand."""

from __future__ import annotations

import contextlib
import inspect
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

from nanlab.course.cases.frame import Case
from nanlab.course.materials import PADDING, tiny_tokenizer
from nanlab.inspection import preflight

CASES: list[Case] = []


@contextlib.contextmanager
def strict_runs():
    """Deterministic kernels only, inside."""  # and torch then fills new memory with NaN, the same in every run
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def look_at(factory):
    """preflight of the model that a step works with, and one harmless row."""
    model = inspect.getclosurevars(inspect.unwrap(factory())).nonlocals["model"]
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = PADDING
    return preflight([{"text": "one and one is two"}], tokenizer, model=model)


# -- nemo-3232 -------------------------------------------------------------------------------------------------------
class WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, visible):
        scores = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        out = scores.softmax(-1) @ v
        ctx.save_for_backward(q, k, v, scores, out)
        return out

    @staticmethod
    def backward(ctx, slope):
        q, k, v, scores, out = ctx.saved_tensors
        grown = torch.exp(scores)
        weights = grown / grown.sum(-1, keepdim=True)
        inner = slope @ v.T - (slope * out).sum(-1, keepdim=True)
        at_scores = weights * inner / q.shape[-1] ** 0.5
        return at_scores @ k, at_scores.T @ q, weights.T @ slope, None


def windowed_layer():
    to_qkv, x = nn.Linear(8, 24), 20 * torch.randn(6, 8)
    place = torch.arange(6)
    visible = (place[:, None] - place >= 0) & (place[:, None] - place < 3)

    def step():
        attended = WindowAttention.apply(*to_qkv(x).chunk(3, -1), visible)
        loss = attended.square().mean()
        loss.backward()
        return {"loss": loss, "grad_norm": to_qkv.weight.grad.norm()}

    return step


def windowed_layer_fixed():
    to_qkv, x = nn.Linear(8, 24), 20 * torch.randn(6, 8)
    place = torch.arange(6)
    visible = (place[:, None] - place >= 0) & (place[:, None] - place < 3)

    def step():
        attended = F.scaled_dot_product_attention(*to_qkv(x)[None].chunk(3, -1), attn_mask=visible)[0]
        loss = attended.square().mean()  # the backward of another implementation
        loss.backward()
        return {"loss": loss, "grad_norm": to_qkv.weight.grad.norm()}

    return step


def windowed_layer_reference():
    """Position by position over what it sees, in float64, by autograd."""
    torch.manual_seed(0)
    to_qkv, x = nn.Linear(8, 24), 20 * torch.randn(6, 8).double()
    to_qkv, rows = to_qkv.double(), []
    q, k, v = to_qkv(x).chunk(3, -1)
    for i in range(6):
        seen = slice(max(0, i - 2), i + 1)
        rows.append(torch.softmax(k[seen] @ q[i] / 8**0.5, 0) @ v[seen])
    loss = torch.stack(rows).square().mean()
    loss.backward()
    return {"loss": loss, "grad_norm": to_qkv.weight.grad.norm()}


CASES.append(
    Case(
        id="nemo-3232",
        title="Only on the new cards",
        symptom="Fine-tuning with sliding-window attention: on the old cards all is well, on the new ones the loss is "
        "right and the gradients are nan. The new ones take another attention kernel; this is what it does.",
        broken=windowed_layer,
        fixed=windowed_layer_fixed,
        reference=windowed_layer_reference,
        parts=(WindowAttention,),
        cause="overflow",
        phase="backward",
        line="grown = torch.exp(scores)",
        link="https://github.com/NVIDIA-NeMo/Automodel/issues/3232",
        family="kernel_autograd",
        story="The report isolates one kernel's backward by switching backends; what that kernel does is not said, so "
        "this one is an example. Forward calls softmax, which subtracts the largest score; backward makes the weights "
        "anew and does not: e to the power of 89 is inf. A right forward proves nothing about backward; compare two "
        "implementations.",
        difficulty=3,
    )
)


# -- hf-48932 --------------------------------------------------------------------------------------------------------
class Rope(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("inv_freq", 100.0 ** (-torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, x):
        angle = torch.arange(len(x))[:, None] * self.inv_freq
        even, odd = x[:, ::2], x[:, 1::2]
        return torch.cat([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1)


def load(model, checkpoint):
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            setattr(module, name, torch.empty_like(getattr(module, name)))
    model.load_state_dict(checkpoint)
    return model


def loaded_model():
    trained = nn.Sequential(nn.Embedding(10, 8), Rope(8), nn.Linear(8, 10))
    with strict_runs():  # deterministic, so that runs can be compared
        model = load(nn.Sequential(nn.Embedding(10, 8), Rope(8), nn.Linear(8, 10)), trained.state_dict())
    ids = torch.tensor([4, 2, 9, 2])

    @torch.no_grad()
    def step():
        return {"scores": model(ids)[-1]}

    return step


def loaded_model_fixed():
    trained = nn.Sequential(nn.Embedding(10, 8), Rope(8), nn.Linear(8, 10))
    model = nn.Sequential(nn.Embedding(10, 8), Rope(8), nn.Linear(8, 10))
    model.load_state_dict(trained.state_dict())  # a buffer that is in no file stays as __init__ made it
    ids = torch.tensor([4, 2, 9, 2])

    @torch.no_grad()
    def step():
        return {"scores": model(ids)[-1]}

    return step


def loaded_model_reference():
    torch.manual_seed(0)
    embed, _, head = nn.Sequential(nn.Embedding(10, 8), Rope(8), nn.Linear(8, 10)).double()
    x, angle = embed.weight[2], 3 * torch.tensor([100.0 ** (-i / 4) for i in range(4)]).double()
    turned = torch.view_as_real(torch.view_as_complex(x.view(4, 2)) * torch.polar(torch.ones_like(angle), angle))
    return {"scores": head(turned.T.flatten())}


CASES.append(
    Case(
        id="hf-48932",
        title="Every file is fine",
        symptom="After loading, the model gives nan for any input, on some machines, on some days. I compared every "
        "tensor of the checkpoint with the model's state_dict(): all equal, all finite.",
        broken=loaded_model,
        fixed=loaded_model_fixed,
        reference=loaded_model_reference,
        parts=(Rope, load),
        cause="bad_state",
        phase="state",
        line="setattr(module, name, torch.empty_like(getattr(module, name)))",
        also=(("bad_state", "state", "angle = torch.arange(len(x))[:, None] * self.inv_freq"),),
        tool="preflight",
        look=lambda: look_at(loaded_model),
        finding="bad_buffers",
        link="https://github.com/huggingface/transformers/pull/48932",
        family="bad_weights",
        story="Non-persistent buffers are in no checkpoint and in no state_dict; loading replaced them by fresh "
        "memory, whose content is whatever was there. The report says so of rotary frequencies. Look at buffers too, "
        "not only at what is saved.",
        difficulty=3,
    )
)


# -- llm-foundry-1745 ------------------------------------------------------------------------------------------------
class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def initialise(module):
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.5)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def from_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, 8), Norm(8), nn.Linear(8, 10))
    with strict_runs():  # deterministic, so that runs can be compared
        model = model.to_empty(device="cpu").apply(initialise)
    ids = torch.tensor([4, 2, 9, 7, 2])

    def step():
        loss = F.cross_entropy(model(ids[:-1]), ids[1:])
        loss.backward()
        return {"loss": loss}

    return step


def from_meta_fixed():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, 8), Norm(8), nn.Linear(8, 10))
    model = model.to_empty(device="cpu").apply(initialise)
    nn.init.ones_(model[1].weight)  # every module that has weights needs a line in the initialisation
    ids = torch.tensor([4, 2, 9, 7, 2])

    def step():
        loss = F.cross_entropy(model(ids[:-1]), ids[1:])
        loss.backward()
        return {"loss": loss}

    return step


def from_meta_reference():
    torch.manual_seed(0)
    table, w = torch.empty(10, 8).normal_(std=0.5).double(), torch.empty(10, 8).normal_(std=0.5).double()
    x = table[[4, 2, 9, 7]]
    logits = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() @ w.T
    return {"loss": (logits.exp().sum(-1).log() - logits[range(4), [2, 9, 7, 2]]).mean()}


CASES.append(
    Case(
        id="llm-foundry-1745",
        title="nan at step 1, from scratch",
        symptom="Training from scratch: built on the meta device to save memory, then moved and initialised. The very "
        "first loss is nan. Built on the CPU in the plain way, it works.",
        broken=from_meta,
        fixed=from_meta_fixed,
        reference=from_meta_reference,
        parts=(Norm, initialise),
        cause="bad_state",
        phase="state",
        line='model = model.to_empty(device="cpu").apply(initialise)',
        also=(
            ("bad_state", "state", "if isinstance(module, (nn.Linear, nn.Embedding)):"),
            ("bad_state", "state", "return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight"),
            ("bad_state", "state", "loss = F.cross_entropy(model(ids[:-1]), ids[1:])"),
        ),
        tool="preflight",
        look=lambda: look_at(from_meta),
        finding="bad_weights",
        link="https://github.com/mosaicml/llm-foundry/pull/1745",
        family="bad_weights",
        story="to_empty gives memory without content, and the initialisation has no line for the norm, whose __init__ "
        "used to do it. What was in that memory became its weight. After meta, every parameter must be written once: "
        "check that.",
        difficulty=2,
    )
)


# -- transformers-43701 ----------------------------------------------------------------------------------------------
def small_model():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=20, max_position_embeddings=16, **sizes)).eval()


def trained_model(ids):
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(15):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model


def resumed_run():
    from safetensors.torch import load_file

    ids = torch.tensor([[3, 8, 1, 12, 5, 3]])
    trained = trained_model(ids)

    @torch.no_grad()
    def step():
        with tempfile.TemporaryDirectory() as folder:
            trained.save_pretrained(folder)
            model = small_model()
            model.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=False)
        print(f"before the break: loss {trained(input_ids=ids, labels=ids).loss:.4f}")
        return {"loss when resumed": model(input_ids=ids, labels=ids).loss}

    return step


def resumed_run_fixed():
    ids = torch.tensor([[3, 8, 1, 12, 5, 3]])
    trained = trained_model(ids)

    @torch.no_grad()
    def step():
        with tempfile.TemporaryDirectory() as folder:
            trained.save_pretrained(folder)
            model = type(trained).from_pretrained(folder).eval()  # translates the names
        return {"loss when resumed": model(input_ids=ids, labels=ids).loss}

    return step


def resumed_run_reference():
    """The model that was saved, its head and loss by hand, in float64."""
    torch.manual_seed(0)
    ids = torch.tensor([3, 8, 1, 12, 5, 3])
    model = trained_model(ids[None]).double()
    hidden = model.gpt_neox(input_ids=ids[None]).last_hidden_state[0, :-1]
    logits = hidden @ model.get_output_embeddings().weight.T
    return {"loss when resumed": (logits.exp().sum(-1).log() - logits[range(5), ids[1:]]).mean()}


CASES.append(
    Case(
        id="transformers-43701",
        title="A bump after the break",
        symptom="A Pythia-like model, saved and resumed. No error and no nan, but the loss jumps back to where it was "
        "at the very start of training, and takes hours to come down again.",
        broken=resumed_run,
        fixed=resumed_run_fixed,
        reference=resumed_run_reference,
        parts=(small_model, trained_model),
        phase="state",
        line='model.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=False)',
        link="https://github.com/huggingface/transformers/issues/43701",
        family="bad_weights",
        trap="finite and wrong",
        tool="none: compare with a reference",
        lesson="07_learning_rate_and_dirty_data",
        story="The report is of another family, the mechanism is the same: the file has the names of the hub format "
        "(embed_out), the model of today has others (lm_head). strict=False passes over both in silence, and the head "
        "keeps its random start. Loading must say what it did not load; from_pretrained translates.",
        difficulty=3,
    )
)
