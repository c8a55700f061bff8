"""preflight: every fault in its table is seen where it is planted, and nowhere in a healthy set-up."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.tpo import TPOConfig, TPOTrainer

from nanlab import preflight
from nanlab.errors import InputError
from nanlab.inspection import ROW_CHECKS, SETUP_CHECKS, WHOLE_CHECKS

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
END, PAD = "<|endoftext|>", "<|pad|>"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(pad=PAD, eos=END):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["the capital of france is paris", "two plus two is four"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token=END, bos_token=END, eos_token=eos, pad_token=pad)


def beginning_tokenizer():
    """It puts bos before every text, as Llama's does."""
    tokenizer = make_tokenizer()
    bos = (END, tokenizer.bos_token_id)
    begin = processors.TemplateProcessing(single=f"{END} $A", pair=f"{END} $A $B", special_tokens=[bos])
    tokenizer.backend_tokenizer.post_processor = begin
    return tokenizer


TOKENIZER = make_tokenizer()


def make_model(dtype=torch.float32, rows=None):
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=rows or len(TOKENIZER),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    return GPTNeoXForCausalLM(config).to(dtype)


def make_args(kind=DPOConfig, **options):
    options = {"logging_nan_inf_filter": False, "bf16": False, "use_cpu": True, "report_to": [], **options}
    return kind(output_dir="unused", **options)


def sft_args(**options):
    return make_args(SFTConfig, **options)


PAIR = {"prompt": "the capital of france is", "chosen": " paris", "rejected": " four"}
SCORED = [{"prompt": "two plus two is", "completion": f" {n}", "reward": n / 3, "group": n // 2} for n in range(8)]
LONG = "two plus two " * 20
UNPAIRED = {"prompt": "two plus two is", "completion": " four"}


def pairs(*odd, **changes):
    """Four good rows and then the odd ones."""
    return (
        [{**PAIR, "prompt": f"{PAIR['prompt']} {n}"} for n in range(4)]
        + ([{**PAIR, **changes}] if changes else [])
        + [*odd]
    )


def look(rows=None, tokenizer=TOKENIZER, **options):
    return preflight(pairs() if rows is None else rows, tokenizer, **options)


def broken(edit, dtype=torch.float32):
    """A model after `edit(model)`."""
    model = make_model(dtype)
    with torch.no_grad():
        edit(model)
    return model


class HalfNorm(torch.nn.Module):
    """An RMS norm that computes in the dtype of its input."""

    def __init__(self, size=16, eps=1e-8):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size, dtype=torch.float16)), eps

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


def frozen(model):
    return model.requires_grad_(False)


def with_adapter():
    model = frozen(make_model())
    model.lora_A = torch.nn.Linear(16, 4, bias=False, dtype=torch.float16)
    return model


# One planted fault a code: (what preflight is given, rows or None for a fault of the set-up).
PLANTED = {
    "missing_text": (lambda: look(pairs({**PAIR, "chosen": math.nan}, chosen=None)), [4, 5]),  # pandas writes NaN
    "not_text": (
        lambda: look(pairs(*({**PAIR, "rejected": odd} for odd in (3, ["no"], [{"from": "gpt", "value": "no"}])))),
        [4, 5, 6],
    ),
    "empty_text": (lambda: look(pairs(chosen="  ")), [4]),
    "empty_prompt": (lambda: look(pairs(prompt="  ")), [4]),
    "not_ids": (
        lambda: look([{"input_ids": ids} for ids in ([5, 6], (5, 6), [5, "x"], "ab", None, [[5, 6]], [5.0])]),
        [*range(2, 7)],
    ),
    "refused_by_template": (
        lambda: look([{"messages": MESSAGES}, {"messages": [{"role": 3, "content": "two"}]}], choosy_tokenizer()),
        [1],
    ),
    "too_long": (lambda: look(pairs(chosen=LONG), args=make_args(RewardConfig, max_length=30)), [4]),
    "bad_label": (
        lambda: look(
            [{**UNPAIRED, "label": label} for label in (True, 0, np.bool_(True), 1.0, None, "True", 2, math.nan)]
        ),
        [4, 5, 6, 7],
    ),
    "no_eos_token": (lambda: look(tokenizer=make_tokenizer(eos=None), args=make_args()), None),
    "label_count": (lambda: look([{"input_ids": [5, 6, 7], "labels": [5, 6, 7][:n]} for n in (3, 2)]), [1]),
    "truncated_away": (lambda: look(pairs(prompt=LONG), max_length=30), [4]),
    "no_label": (lambda: look([{"input_ids": [5, 6, 7], "labels": labels} for labels in ([5, 6, 7], [-100] * 3)]), [1]),
    "truncated_partly": (lambda: look(pairs(chosen=LONG), max_length=30), [4]),
    "identical_pair": (lambda: look(pairs(rejected=" paris")), [4]),
    "all_unk": (lambda: look(pairs(chosen=PAD * 3)), [4]),
    "only_special_tokens": (lambda: look(pairs(chosen=END)), [4]),
    "two_bos": (lambda: look([{"text": f"{bos}two plus two"} for bos in ("", END)], beginning_tokenizer()), [1]),
    "id_outside_vocabulary": (
        lambda: look([{"input_ids": [5, 6]}, {"input_ids": [5, 999]}], model=make_model()),
        [1],
    ),
    "eos_label_lost": (
        # A prompt may end with an eos as well.
        lambda: look([{"input_ids": [5, 0, 6, 0, 0], "labels": [-100, -100, 6, end, -100]} for end in (0, -100)]),
        [1],
    ),
    "bad_reward": (
        lambda: look([*SCORED, *({**SCORED[0], "reward": one} for one in (1, None, math.nan, -math.inf, "good"))]),
        [9, 10, 11, 12],
    ),
    "group_of_one": (lambda: look([*SCORED, {**SCORED[0], "group": 9}]), [8]),
    "constant_group": (lambda: look([*SCORED, *[{**SCORED[0], "group": 9, "reward": 0.1}] * 3]), [8, 9, 10]),
    "one_class_labels": (lambda: look([{"prompt": "a", "completion": "b", "label": True}] * 3), [0, 1, 2]),
    "no_pad_token": (lambda: look(tokenizer=make_tokenizer(pad=None)), None),
    "eos_lost": (lambda: look([{"text": "two plus two"}], make_tokenizer(pad=END)), None),
    "special_token_outside_vocabulary": (
        lambda: look([{"input_ids": [0, 5]}], make_tokenizer(pad=" paris"), model=make_model(rows=len(TOKENIZER) - 40)),
        None,
    ),
    "nan_filter_on": (lambda: look(args=make_args(logging_nan_inf_filter=True)), None),
    "bad_learning_rate": (lambda: look(args=make_args(learning_rate=math.nan)), None),
    "huge_learning_rate": (lambda: look(args=make_args(learning_rate=1.0)), None),
    "bad_argument": (lambda: look(args=make_args(beta=math.nan)), None),
    "zero_divisor": (lambda: look(args=make_args(loss_type="ipo", beta=0.0)), None),
    "learns_nothing": (lambda: look(args=make_args(beta=0.0)), None),
    "adam_eps_is_zero": (lambda: look(args=make_args(adam_epsilon=0.0)), None),
    "scaler_refuses_fp16_weights": (
        lambda: look(model=make_model(torch.float16), args=_fp16(make_args())),
        None,
    ),
    "fp16_adam_eps": (lambda: look(model=make_model(torch.float16), args=make_args(optim="adamw_torch")), None),
    "fp16_adapters": (lambda: look(model=with_adapter(), args=make_args(optim="adamw_torch_fused")), None),
    "fp16_weights": (lambda: look(model=make_model(torch.float16)), None),
    "overflows_in_fp16": (lambda: look(model=frozen(make_gemma(torch.float16))), None),
    "meta_weights": (lambda: look(model=make_model().to("meta")), None),
    "bad_weights": (lambda: look(model=broken(lambda m: m.get_output_embeddings().weight[3, 2].fill_(math.nan))), None),
    "bad_buffers": (
        lambda: look(model=broken(lambda m: m.gpt_neox.rotary_emb.inv_freq.fill_(3e20))),
        None,
    ),
    "uninitialised_weights": (
        lambda: look(model=broken(lambda m: m.get_output_embeddings().weight.view(torch.int32).fill_(1234))),
        None,
    ),
    "dead_norm_layers": (lambda: look(model=broken(_kill_norm)), None),
    "norm_eps_is_zero": (lambda: look(model=frozen(torch.nn.Sequential(HalfNorm()))), None),
}


def _fp16(args):
    args.fp16 = True  # the constructor refuses it on a machine without a GPU
    return args


def _shrink(model):
    """Many entries fall below the smallest normal number of float16."""
    for weight in model.parameters():
        weight.mul_(0.01)


def _kill_norm(model):
    norm = model.gpt_neox.final_layer_norm
    norm.weight.zero_()
    norm.bias.zero_()


def make_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=len(TOKENIZER), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(config)


def make_gemma(dtype=torch.float32):
    """Its norm layers multiply by 1 + weight, and start with weights of zero."""
    config = GemmaConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, head_dim=8,
    )  # fmt: skip
    return GemmaForCausalLM(config).to(dtype)


@pytest.mark.parametrize("code", [check.code for check in (*ROW_CHECKS, *WHOLE_CHECKS, *SETUP_CHECKS)])
def test_a_planted_fault_is_the_only_finding(code):
    plant, rows = PLANTED[code]
    findings = plant()
    assert findings.codes == [code]
    (finding,) = findings
    assert list(finding.rows) == (rows or [])
    assert finding.count == (len(rows) if rows else finding.count) > 0
    assert "{" not in finding.message


def test_every_finding_names_an_existing_lesson():
    lessons = {path.stem for path in (Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb")}
    named = {check.lesson for check in (*ROW_CHECKS, *WHOLE_CHECKS, *SETUP_CHECKS)}
    written = {lesson.partition("_")[0] for lesson in lessons}
    for lesson in named:
        number = lesson.partition("_")[0]
        assert number.isdigit()
        assert number not in written or lesson in lessons


# --------------------------------------------------------------------------------------------------------- healthy runs


def chat(said):
    return [{"role": "assistant", "content": said}]


def chat_tokenizer(eos=END):
    tokenizer = make_tokenizer(eos=eos)
    tokenizer.chat_template = CHAT
    return tokenizer


def choosy_tokenizer():
    """Its template takes no role but text."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    return tokenizer


def marking_tokenizer():
    """Its template marks what the assistant says."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|endoftext|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    return tokenizer


def tool_tokenizer():
    """Its template writes what the tools are, and what it is told to."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.description }}{% endfor %}{{ extra or '' }}" + CHAT
    )
    return tokenizer


def lora():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(make_model(torch.float16), LoraConfig(target_modules=["query_key_value"]))


def with_mask_buffer():
    model = make_model()
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    return model


def with_half_layer_norm():
    """torch computes a float16 LayerNorm in float32, so an eps that float16 cannot hold does no harm."""
    model = frozen(make_model(torch.float16))
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-8
    return model


def with_float8():
    model = make_model()
    model.stored = torch.nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    model.norm = frozen(torch.nn.LayerNorm(4))
    model.norm.weight.data = torch.zeros(4).to(torch.float8_e4m3fn)
    return model


MESSAGES = [{"role": "user", "content": "two plus two is"}]
CHATTING = chat_tokenizer()
TALK = {"prompt": MESSAGES, "chosen": chat("a"), "rejected": chat("b")}
HEALTHY = {
    "strings": lambda: look(),
    "dataset": lambda: look(Dataset.from_list(pairs())),
    "torch format": lambda: look(Dataset.from_list([{"input_ids": [5, 6, 7]}] * 3).with_format("torch")),
    "triples": lambda: look([{**row, "reference": " paris"} for row in pairs()], max_length=40),
    "implicit prompt": lambda: look([{"chosen": "two is four", "rejected": "two is paris"}]),
    "chat": lambda: look(
        [{"prompt": MESSAGES, "chosen": chat("four"), "rejected": chat("paris")}], chat_tokenizer(), max_length=60
    ),
    "chat messages": lambda: look([{"messages": MESSAGES + chat("four")}], chat_tokenizer()),
    "scored": lambda: look(SCORED),
    "KTO labels as numbers": lambda: look([{**UNPAIRED, "label": n % 2} for n in range(3)]),
    "labels of another kind": lambda: look([{"text": "two plus two", "label": "sports"}] * 2),
    "array of messages": lambda: look([{"messages": np.array(MESSAGES + chat("four"))}], chat_tokenizer()),
    "a limit of numpy": lambda: look(max_length=np.int64(40)),
    "another text column": lambda: look([{"said": "two plus two"}], args=sft_args(dataset_text_field="said")),
    "the same in a table": lambda: look(
        Dataset.from_list([{"said": "two plus two"}]), args=sft_args(dataset_text_field="said")
    ),
    "whole text counts": lambda: look(
        [{**UNPAIRED, "prompt": LONG}], args=sft_args(max_length=500, completion_only_loss=False)
    ),
    "only divided": lambda: look(
        [{**UNPAIRED, "prompt": LONG}], args=sft_args(max_length=30, packing=True, packing_strategy="wrapped")
    ),
    "a mask that SFT does not heed": lambda: look(
        [{"input_ids": [5, 6, 7], "completion_mask": [0] * 3}], args=sft_args()
    ),
    "chat without eos": lambda: look([TALK], chat_tokenizer(eos=None), args=make_args()),
    "mixed KTO labels": lambda: look([{"prompt": "a", "completion": "b", "label": n == 1} for n in range(3)]),
    "text": lambda: look([{"text": "two plus two is four"}], max_length=3),
    "prompts": lambda: look([{"prompt": "two plus two is", "reward": 1.0}], max_length=30, model=make_model()),
    "chat prompts": lambda: look([{"prompt": MESSAGES}], chat_tokenizer(), max_length=60),
    "prompts, pad = eos": lambda: look([{"prompt": "two"}], make_tokenizer(pad=END)),
    "pad = eos in TRL": lambda: look([{"text": "two"}], make_tokenizer(pad=END), args=make_args(DPOConfig)),
    "no pad in TRL": lambda: look(tokenizer=make_tokenizer(pad=None), args=make_args(DPOConfig)),
    "labels": lambda: look([{"input_ids": [5, 6, 0, 0], "labels": [-100, 6, 0, -100]}]),
    "classes": lambda: look([{"input_ids": [5, 6, 7], "labels": 1}]),
    "many classes": lambda: look([{"input_ids": [5, 6, 7], "labels": [0.0, 1.0]}], model=make_model()),
    "numpy ids": lambda: look([{"input_ids": np.array([5, 6]), "labels": [np.int64(-100), np.int64(6)]}]),
    "encoder and decoder": lambda: look([{"input_ids": [5, 6, 7], "labels": [5, 6]}], model=make_t5()),
    "tensors": lambda: look([{"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([-100, 6])}]),
    "numpy rewards": lambda: look([{**row, "reward": np.float32(row["reward"])} for row in SCORED]),
    "completion mask": lambda: look([{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}], max_length=2),
    "fp32": lambda: look(model=make_model(), args=make_args(optim="adamw_torch")),
    "bf16 weights": lambda: look(model=make_model(torch.bfloat16), args=make_args(optim="adamw_torch")),
    "frozen fp16": lambda: look(model=frozen(make_model(torch.float16)), args=make_args()),
    "LoRA on fp16": lambda: look(model=lora(), args=make_args(TPOConfig, learning_rate=2e-4, optim="adamw_torch")),
    "plain trainer": lambda: look(model=make_model(), args=make_args(TrainingArguments)),
    "SGD": lambda: look(args=make_args(learning_rate=0.1, optim="sgd")),
    "no clipping": lambda: look(args=make_args(max_grad_norm=math.inf)),
    "a small eps": lambda: look(args=make_args(adam_epsilon=1e-30)),
    "SGD without eps": lambda: look(args=make_args(adam_epsilon=0.0, optim="sgd")),
    "float8 weights": lambda: look(model=with_float8()),
    "Gemma": lambda: look(model=make_gemma(torch.bfloat16)),
    "mask buffer": lambda: look(model=with_mask_buffer()),
    "half LayerNorm": lambda: look(model=with_half_layer_norm()),
    "small fp16 weights": lambda: look(model=broken(_shrink, torch.float16).requires_grad_(False)),
    "unused rows of the vocabulary": lambda: look(model=make_model(rows=512)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_set_up(name):
    findings = HEALTHY[name]()
    assert findings.codes == []
    assert str(findings).startswith("Nothing found")


# --------------------------------------------------------------------------------------------- against what really runs


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("max_length", [6, 14, 30])
def test_truncation_is_what_trl_does_to_the_rows(max_length, mode):
    rows = [
        {"prompt": "two " * p + "is", "chosen": " paris" * c, "rejected": "s four", "reference": " the"}
        for p, c in [(0, 1), (3, 1), (4, 1), (5, 2), (3, 8), (11, 1), (12, 3), (13, 1), (28, 1), (40, 4)]
    ]
    args = make_args(TPOConfig, max_length=max_length, truncation_mode=mode)
    trainer = TPOTrainer(make_model(), args=args, train_dataset=Dataset.from_list(rows), processing_class=TOKENIZER)
    away, partly = [], []
    for number, row in enumerate(trainer.train_dataset):
        kept = trainer.data_collator([row])["completion_mask"].sum(1)
        whole = torch.tensor([len(row[f"{name}_ids"]) for name in ("chosen", "rejected", "reference")])
        away += [number] * bool((kept == 0).any())
        partly += [number] * bool(((kept > 0) & (kept < whole)).any())
    found = {finding.code: list(finding.rows) for finding in look(rows, args=args)}
    assert found.get("truncated_away", []) == away
    assert found.get("truncated_partly", []) == partly
    assert away or mode == "keep_end"


def real(kind, rows, args, tokenizer=TOKENIZER, **more):
    """A trainer of TRL."""
    more = {"model": make_model(), **({"ref_model": make_model()} if kind in (DPOTrainer, KTOTrainer) else {}), **more}
    return kind(args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **more)


def few_steps(kind=DPOConfig, **options):
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", "disable_tqdm": True, **options}
    return make_args(kind, **options)


def make_scorer():
    from transformers import GPTNeoXForSequenceClassification

    config = make_model().config
    config.num_labels = 1
    return GPTNeoXForSequenceClassification(config)


def tools(description):
    function = {"name": "f", "description": description, "parameters": {"type": "object", "properties": {}}}
    return json.dumps([{"type": "function", "function": function}])


ASKED = {"messages": MESSAGES + chat("four")}
LONG_ASKED = {"messages": [{"role": "user", "content": LONG}, *chat("four")]}
MASKED = [{"input_ids": [5, 6, 7, 8], "completion_mask": mask} for mask in ([0, 0, 0, 1], [0] * 4, [1, 1, 0, 0])]
ANSWERS = [{**UNPAIRED, "prompt": LONG}, UNPAIRED]
# A trainer, its rows, tokenizer and arguments, and the rows that it drops or that give it nothing to learn.
DROPPED = {
    "SFT": (SFTTrainer, ANSWERS, TOKENIZER, {"max_length": 30}, [0]),
    "whole text": (SFTTrainer, ANSWERS, TOKENIZER, {"max_length": 30, "completion_only_loss": False}, []),
    "keep_end": (SFTTrainer, ANSWERS, TOKENIZER, {"max_length": 30, "truncation_mode": "keep_end"}, []),
    "masks of SFT": (SFTTrainer, MASKED, TOKENIZER, {"max_length": 3}, []),
    "masks told to SFT": (SFTTrainer, MASKED, TOKENIZER, {"max_length": 3, "completion_only_loss": True}, [0, 1]),
    "assistant masks": (
        SFTTrainer,
        [{"input_ids": row["input_ids"], "assistant_masks": row["completion_mask"]} for row in MASKED],
        TOKENIZER,
        {"max_length": 3},
        [0, 1],
    ),
    "assistant only": (
        SFTTrainer,
        [{**ASKED, "text": "two"}, {**LONG_ASKED, "text": "two"}],
        marking_tokenizer(),
        {"max_length": 30, "assistant_only_loss": True},
        [1],
    ),
    "assistant only, keep_end": (
        SFTTrainer,
        [LONG_ASKED, {"messages": [*MESSAGES, *chat("four"), {"role": "user", "content": LONG}]}],
        marking_tokenizer(),
        {"max_length": 30, "assistant_only_loss": True, "truncation_mode": "keep_end"},
        [1],
    ),
    "tools": (
        DPOTrainer,
        [{**TALK, "tools": tools(text)} for text in ("two", LONG)],
        tool_tokenizer(),
        {"max_length": 48},
        [1],
    ),
    "words for the template": (
        DPOTrainer,
        [{**TALK, "chat_template_kwargs": {"extra": text}} for text in ("two", LONG)],
        tool_tokenizer(),
        {"max_length": 48},
        [1],
    ),
    "reward": (RewardTrainer, pairs(chosen=LONG), TOKENIZER, {"max_length": 30}, [4]),
    "KTO": (
        KTOTrainer,
        [{**row, "label": label} for row, label in zip([*ANSWERS, UNPAIRED], (True, True, False), strict=True)],
        TOKENIZER,
        {"max_length": 30},
        [0],
    ),
}


@pytest.mark.parametrize("name", DROPPED)
def test_clean_drops_what_the_trainer_of_the_arguments_drops(name):
    kind, rows, tokenizer, options, dropped = DROPPED[name]
    config = {SFTTrainer: SFTConfig, RewardTrainer: RewardConfig, KTOTrainer: KTOConfig}.get(kind, DPOConfig)
    args = few_steps(config, **options)
    assert look(rows, tokenizer, args=args).clean(rows) == [row for at, row in enumerate(rows) if at not in dropped]
    more = {"model": make_scorer()} if kind is RewardTrainer else {}
    kept = real(kind, rows, args, tokenizer, **more).train_dataset
    assert len(kept) == len(rows) - len(dropped)


@pytest.mark.parametrize(
    ("kind", "rows", "tokenizer", "args", "code"),
    [
        (DPOTrainer, pairs(), make_tokenizer(eos=None), few_steps, "no_eos_token"),
        (SFTTrainer, [{"text": "two plus two"}], make_tokenizer(eos=None), sft_args, "no_eos_token"),
        (
            KTOTrainer,
            [{**UNPAIRED, "label": n} for n in (True, False, None)],
            TOKENIZER,
            lambda: few_steps(KTOConfig),
            "bad_label",
        ),
        (
            SFTTrainer,
            [ASKED, {"messages": MESSAGES}],
            marking_tokenizer(),
            lambda: sft_args(assistant_only_loss=True),
            "no_label",
        ),
    ],
)
def test_what_is_found_stops_the_trainer_of_the_arguments(kind, rows, tokenizer, args, code):
    args = args()
    assert look(rows, tokenizer, args=args).codes == [code]
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        real(kind, rows, args, tokenizer)


def test_one_kto_class_is_seen_among_the_rows_that_are_left():
    rows = [*[{**UNPAIRED, "label": True}] * 3, {**UNPAIRED, "completion": "", "label": False}]
    assert {f.code: list(f.rows) for f in look(rows)} == {"empty_text": [3], "one_class_labels": [0, 1, 2]}


def test_nothing_is_left_of_one_token_that_nothing_predicts():
    args = make_args(TPOConfig, max_length=1, truncation_mode="keep_end")
    assert look(args=args).codes == ["truncated_away"]


def test_assistant_only_loss_takes_the_template_that_trl_would():
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = make_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    assert look([ASKED], tokenizer, args=sft_args(assistant_only_loss=True)).codes == []


@pytest.mark.parametrize("labels", [[5, -100, -100], [-100, -100, -100], [-100, -100, 7], [5, 6, -100]])
def test_a_row_without_label_is_one_whose_real_loss_is_nan(labels):
    """Also where only the first token is counted: nothing predicts it."""
    loss = make_model()(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([labels])).loss
    codes = look([{"input_ids": [5, 6, 7], "labels": labels}]).codes
    assert codes == (["no_label"] if loss.isnan() else [])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("eps", [1e-8, 1e-4])
def test_the_adam_finding_is_what_a_real_step_does(eps, fused):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    weight.grad = torch.tensor([0.0, 1e-4, 0.1], dtype=torch.float16)
    torch.optim.AdamW([weight], lr=1e-6, eps=eps, fused=fused).step()
    args = make_args(optim="adamw_torch_fused" if fused else "adamw_torch", adam_epsilon=eps)
    findings = look(model=make_model(torch.float16), args=args)
    assert ("fp16_adam_eps" in findings.codes) == (not weight.isfinite().all())
    assert findings.codes in (["fp16_adam_eps"], ["fp16_weights"])


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ({}, []),
        ({"adam_epsilon": 0.0}, ["adam_eps_is_zero"]),
        ({"adam_epsilon": 1e-50, "optim": "adamw_torch"}, ["adam_eps_is_zero"]),
        ({"beta": math.nan}, ["bad_argument"]),
        ({"weight_decay": math.nan}, ["bad_argument"]),
        ({"max_grad_norm": math.inf}, []),
        ({"loss_type": "discopop", "discopop_tau": 0.0}, ["zero_divisor"]),
    ],
)
def test_an_argument_that_is_found_makes_the_weights_nan(options, codes):
    args = few_steps(**options)
    assert look(args=args).codes == codes
    trainer = real(DPOTrainer, pairs(), args)
    trainer.train()
    assert all(weight.isfinite().all() for weight in trainer.model.parameters()) == (not codes)


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ({"beta": 0.0}, ["learns_nothing"]),
        ({"beta": 0.0, "loss_type": ["hinge", "apo_zero"], "loss_weights": [1.0, 1.0]}, ["learns_nothing"]),
        ({"learning_rate": 0.0}, ["learns_nothing"]),
        ({"beta": 0.0, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}, []),
        ({"beta": 0.01}, []),
    ],
)
def test_what_teaches_nothing_leaves_the_weights_as_they_were(options, codes):
    args = few_steps(weight_decay=0.0, warmup_steps=0, **{"learning_rate": 1e-2 * 0.9, **options})
    assert look(args=args).codes == codes
    trainer = real(DPOTrainer, pairs(), args)
    before = [weight.clone() for weight in trainer.model.parameters()]
    trainer.train()
    moved = any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert moved == (not codes)


def test_what_the_trainer_tokenises_begins_with_two_bos_where_told():
    tokenizer = beginning_tokenizer()
    rows = [{"text": f"{END}two plus two"}, {"text": "two plus two"}]
    trainer = real(SFTTrainer, rows, few_steps(SFTConfig), tokenizer)
    first = [row["input_ids"][:2] for row in trainer.train_dataset]
    bos = tokenizer.bos_token_id
    assert [ids == [bos, bos] for ids in first] == [True, False]
    assert list(look(rows, tokenizer, args=few_steps(SFTConfig))[0].rows) == [0]


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_a_beta_of_zero_is_the_default_of_other_trainers(beta):
    rows = [{"prompt": "two plus two is"}] * 4
    assert look(rows, args=make_args(GRPOConfig, beta=beta, per_device_train_batch_size=8)).codes == []


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"loss_type": "ipo", "beta": 0.0}, "zero_divisor"),
        ({"learning_rate": "1e-5"}, "bad_learning_rate"),
        ({"adam_epsilon": "1e-8", "optim": "adamw_torch"}, "bad_argument"),
    ],
)
def test_an_argument_that_is_found_stops_the_run(options, code):
    args = few_steps(**options)
    assert look(args=args, model=make_model()).codes == [code]
    with pytest.raises((ZeroDivisionError, TypeError)):
        real(DPOTrainer, pairs(), args).train()


def test_the_model_is_left_as_it_was():
    model = broken(_kill_norm).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    look(model=model, args=make_args())
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("check", SETUP_CHECKS, ids=lambda check: check.code)
def test_a_message_about_one_thing_does_not_speak_of_several(check):
    assert not re.search(r"\b1 (\w+ )?\w+s\b", check.finding(["a.tensor"]).message)


def test_batch_norm_statistics_are_seen_and_not_changed():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4, eps=0.0))
    torch.nn.init.zeros_(model[0].weight)  # how residual networks start
    assert look(model=model).codes == []
    model[0].running_var[1] = math.nan
    assert look(model=model).codes == ["bad_buffers"]
    assert model[0].num_batches_tracked == 0


@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.0] * 3, [-5.0, -5.0], [1e6] * 4, [0.1, 0.1 + 1e-9]])
def test_equal_rewards_are_constant_whatever_their_size(rewards):
    rows = [{"prompt": "a", "completion": "b", "reward": r, "group": 0} for r in rewards]
    assert look(rows).codes == ["constant_group"]
    rows[0]["reward"] += 1e-3 * max(1.0, abs(rewards[0]))
    assert look(rows).codes == []


class Slow:
    """A tokenizer without a fast backend, that only knows how to be called."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        if name == "backend_tokenizer":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __call__(self, *args, **kwargs):
        return self._tokenizer(*args, **kwargs)


def test_fast_and_slow_tokenizers_agree_whatever_was_called_before():
    rows = pairs(prompt=LONG) + pairs(chosen=LONG) + pairs(chosen=PAD)
    slow = look(rows, Slow(make_tokenizer()), max_length=30)
    used = make_tokenizer()
    used(["two", "two plus"], max_length=2, truncation=True, padding=True)
    fast = look(rows, used, max_length=30)
    assert slow.to_dict() == fast.to_dict()
    assert fast.codes == ["truncated_away", "truncated_partly", "all_unk"]


def test_of_an_answer_of_unk_or_pad_ids_a_collator_leaves_at_most_the_eos():
    tokenizer = make_tokenizer()
    (finding,) = look(pairs(chosen=PAD * 3), tokenizer)
    assert finding.message.endswith("leaves at most the eos to learn from.")
    ids = tokenizer(PAD * 3)["input_ids"]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    for end, left in (([], 0), ([tokenizer.eos_token_id], 1)):
        labels = collator([{"input_ids": ids + end}])["labels"]
        assert (labels != -100).sum() == left


# ---------------------------------------------------------------------------------------------------------------- clean

BITS = st.sampled_from(["", " ", None, 3, " paris", " four", PAD, END, LONG, math.nan])
ROW = st.fixed_dictionaries({"prompt": BITS, "chosen": BITS, "rejected": BITS})
ANSWER = st.fixed_dictionaries(
    {"prompt": st.just("a"), "completion": st.sampled_from(["b", "", None]), "group": st.integers(0, 3)}
    | {"reward": st.sampled_from([0.0, 1.0, None, math.nan, "high"])}
)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.lists(ROW, min_size=1, max_size=6), st.lists(ANSWER, min_size=1, max_size=10)))
def test_clean_rows_have_nothing_left_to_clean(rows):
    cleaned = look(rows, max_length=30).clean(rows)
    dropped = {check.code for check in (*ROW_CHECKS, *WHOLE_CHECKS) if check.drop}
    assert all(row in rows for row in cleaned)
    if cleaned:
        assert not dropped & set(look(cleaned, max_length=30).codes)


def test_clean_counts_each_row_once_and_keeps_the_kind_of_data(capsys):
    rows = pairs({**PAIR, "chosen": "", "prompt": None}, {**PAIR, "rejected": PAIR["chosen"]}, {**PAIR, "chosen": LONG})
    findings = look(rows, max_length=30)
    assert findings.clean(rows) == [*rows[:4], rows[6]]
    assert capsys.readouterr().out == "kept 5 of 7 rows; dropped 1 missing_text, 1 identical_pair\n"
    table = Dataset.from_list(rows)
    assert findings.clean(table).to_list() == [*rows[:4], rows[6]]


def test_a_set_up_fault_drops_no_row(capsys):
    look(args=make_args(logging_nan_inf_filter=True)).clean(pairs())
    assert capsys.readouterr().out == "kept 4 of 4 rows\n"


def test_one_row_is_told_in_the_singular(capsys):
    rows = [{**PAIR, "prompt": None}]
    findings = look(rows)
    assert findings.subject == "1 row and the set-up"
    assert findings.clean(rows) == []
    assert capsys.readouterr().out == "kept 0 of 1 row; dropped 1 missing_text\n"
    with pytest.raises(InputError, match=r"clean\(\) got 2 rows, preflight saw 1"):
        findings.clean(rows * 2)


@pytest.mark.parametrize("pad", [PAD, END])
@pytest.mark.parametrize("max_length", [1, 2, 3, 6, 60])
def test_clean_keeps_the_rows_that_our_trainers_train_on(max_length, pad):
    """Also those without a prompt; whitespace is a prompt of its own."""
    from nanlab.trainers import DPOTrainer as OurTrainer

    rows = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt in ("", " ", "\n", "two", None)
        for chosen, rejected in [(" paris", "s"), ("a", "b"), ("", "b"), (None, "b"), (LONG, "b")]
    ]
    data, args = Dataset.from_list(rows), make_args(max_length=max_length)
    findings = look(rows, make_tokenizer(pad), args=args)
    kept = len(findings.clean(rows))
    try:
        trainer = OurTrainer(make_model(), args=args, train_dataset=data, processing_class=make_tokenizer(pad))
    except InputError:  # none is left
        assert kept == 0
    else:
        assert kept == len(rows) - trainer.dropped_rows["train"] > 0


def test_an_over_long_prompt_leaves_no_room_for_an_answer():
    prompts = [{"prompt": "two"}, {"prompt": LONG}, {"prompt": None}, {"prompt": ""}, {"prompt": 3}]
    found = {finding.code: list(finding.rows) for finding in look(prompts, max_length=20)}
    assert found == {"truncated_away": [1], "missing_text": [2], "empty_prompt": [3], "not_text": [4]}
    length = len(TOKENIZER(LONG)["input_ids"])
    assert look([{"prompt": LONG}], max_length=length).codes == ["truncated_away"]
    assert look([{"prompt": LONG}], max_length=length + 1).codes == []
    assert look(
        [{"prompt": [{"role": "user", "content": LONG}]}, {"prompt": []}], chat_tokenizer(), max_length=9
    ).codes == [
        "empty_prompt",
        "truncated_away",
    ]


def test_a_row_of_tokens_without_labels_has_no_label_and_a_class_is_one():
    rows = [{"input_ids": [5, 6, 7], "labels": labels} for labels in ([5, 6, 7], None)]
    assert {f.code: list(f.rows) for f in look(rows)} == {"no_label": [1]}
    assert look([{"input_ids": [5, 6, 7], "labels": 1}] * 2).codes == []


def test_a_label_outside_the_vocabulary_is_seen():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, label]} for label in (7, 999, -1)]
    assert {f.code: list(f.rows) for f in look(rows, model=make_model())} == {"id_outside_vocabulary": [1, 2]}


@pytest.mark.parametrize(
    ("row", "tokenizer"),
    [
        ({**PAIR, "chosen": "\ud800 hi"}, TOKENIZER),
        ({"text": "hi \udfff"}, TOKENIZER),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
    ],
)
def test_half_a_surrogate_pair_is_no_text(row, tokenizer):
    assert look([row], tokenizer or chat_tokenizer()).codes == ["not_text"]


def test_a_message_without_content_is_missing_text_unless_it_calls_a_tool():
    said = [{"role": "assistant", "content": None}, {"role": "assistant", "content": None, "tool_calls": ["f()"]}]
    findings = look([{"messages": [*MESSAGES, one]} for one in said], chat_tokenizer())
    assert {f.code: list(f.rows) for f in findings} == {"missing_text": [0]}


@pytest.mark.parametrize("args", [None, SFTConfig], ids=["alone", "SFT"])
def test_only_an_empty_end_leaves_nothing_to_learn(args, tmp_path):
    """An empty system message is common, and TRL trains on it."""
    turns = lambda system, answer: [{"role": "system", "content": system}, *MESSAGES, *chat(answer)]
    rows = [{"messages": turns("", "four")}, {"messages": turns("be kind", "")}, {"messages": turns("be kind", " ")}]
    findings = look(rows, chat_tokenizer(), args=args and args(str(tmp_path), use_cpu=True, bf16=False))
    assert {f.code: list(f.rows) for f in findings if f.code != "nan_filter_on"} == {"empty_text": [1, 2]}


def test_answers_that_share_no_beginning_have_no_prompt(tmp_path):
    rows = [{"chosen": "two and two is four", "rejected": "two and two is five"}, {"chosen": "four", "rejected": "six"}]
    assert {f.code: list(f.rows) for f in look(rows)} == {"empty_prompt": [1]}
    assert "empty_prompt" not in look(rows, args=RewardConfig(str(tmp_path), use_cpu=True, bf16=False)).codes


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, KTOConfig, RewardConfig])
def test_rewards_that_a_trainer_does_not_read_are_not_looked_at(config, tmp_path):
    rows = [{**PAIR, "reward": None, "group": 1}, {**PAIR, "reward": 1.0, "group": [2]}]
    assert not {"bad_reward", "group_of_one"} & {
        *look(rows, args=config(str(tmp_path), use_cpu=True, bf16=False)).codes
    }
    assert "bad_reward" in look([{**row, "group": 1} for row in rows]).codes


def test_a_number_beyond_all_floats_is_a_bad_reward():
    findings = look([*SCORED, {**SCORED[0], "reward": 10**400}])
    assert {f.code: list(f.rows) for f in findings} == {"bad_reward": [8]}


def test_one_reward_a_token_is_bad_if_one_of_them_is():
    rows = [{**PAIR, "rewards": one} for one in ([0.5, 1], (0.5, 1.0), [0.5, None], [0.5, math.inf], [])]
    assert {f.code: list(f.rows) for f in look(rows)} == {"bad_reward": [2, 3, 4]}


def test_a_limit_beyond_all_lengths_is_no_limit():
    assert look(max_length=10**30).codes == look().codes == []


def test_csv_cells_may_be_long_and_the_limit_of_the_module_is_left_as_it_was():
    import csv

    from nanlab.files import csv_rows

    before = csv.field_size_limit()
    assert csv_rows('a,b\n"x\ny\u2028z",' + "w" * 200_000 + "\n") == [{"a": "x\ny\u2028z", "b": "w" * 200_000}]
    assert csv.field_size_limit() == before


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: look(tokenizer="tiny"), "tokenizer: got a str"),
        (lambda: look(tokenizer=None), "tokenizer: got a NoneType"),
        (lambda: look(tokenizer=make_model()), "tokenizer: got a GPTNeoXForCausalLM"),
        (lambda: look(model="tiny"), "model: got a str"),
        (lambda: look(model=GPTNeoXForCausalLM), "model: got a GPTNeoXForCausalLM class"),
        (lambda: look(args={"learning_rate": math.nan}), "args: got a dict; give the TrainingArguments"),
        (lambda: look(args=DPOConfig), "args: got a DPOConfig class"),
        (lambda: look({"prompt": ["a"], "chosen": ["b"]}), "from_dict"),
        (lambda: look(frame()), "a DataFrame cannot be read by row.*from_pandas"),
    ],
)
def test_a_wrong_thing_is_named(call, words):
    with pytest.raises(InputError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def frame():
    import pandas

    return pandas.DataFrame(pairs())


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([], {}, "no rows"),
        ([{"question": "a"}], {}, "found question"),
        ([PAIR, "text"], {}, "row 1 is a str"),
        ({"train": [PAIR]}, {}, "splits"),
        (iter([PAIR]), {}, "cannot be read by row"),
        ([PAIR], {"max_length": 0}, "max_length is 0"),
        ([PAIR], {"max_length": "512"}, "max_length is '512'"),
        ([{"messages": MESSAGES}], {}, "row 0 holds chat messages"),
        ([{**PAIR, "chosen": chat("a")}], {}, r"\(chosen of row 0\) and text \(prompt of row 0\) are mixed"),
        ([{**SCORED[0], "group": [1]}], {}, "row 0: the group is a list"),
        ([*[PAIR] * 3, TALK], {}, r"\(prompt of row 3\) and text \(prompt of row 0\) are mixed"),
        ([*[PAIR] * 1000, TALK], {}, r"\(prompt of row 1000\) and text \(prompt of row 0\) are mixed"),
        ([TALK, PAIR], {"tokenizer": CHATTING}, r"\(prompt of row 0\) and text \(prompt of row 1\) are mixed"),
        ([PAIR], {"max_length": True}, "max_length is True"),
    ],
)
def test_bad_input_is_one_line_that_says_where(rows, options, words):
    with pytest.raises(InputError, match=words) as caught:
        look(rows, **options)
    assert "\n" not in str(caught.value)


def test_clean_refuses_another_data_set():
    with pytest.raises(InputError, match="got 3 rows, preflight saw 4"):
        look().clean(pairs()[:3])


# ------------------------------------------------------------------------------------------------------------- casebook

# Public report → what preflight would have said, or why nothing before training can say it.
CASEBOOK = {
    "trl-5662": "truncated_away",
    "trl-6668": "truncated_away",
    "trl-1053": "no_label",
    "verl-785": "truncated_away",
    "instructlab-547": "no_label",
    "axolotl-3026": "no: the slice of one rank is only known once the batch is split",
    "hf-16711": "no: which tokens are masked is drawn at random in the collator",
    "pt-70348": "no_label",
    "trl-1386": "no: how classes fall on ranks is only known in the run",
    "trl-1380": "one_class_labels",
    "trl-5775": "bad_reward",
    "peft-3530": "no: the adapters are merged after training",
    "trl-2564": "no: it depends on how sure the model is of an answer",
    "trl-3015": "no: the policy drifts during training",
    "pt-2421": "no: an operation in the loss",
    "unsloth-9848": "no: the attention backend's own fault",
    "pt-103749": "no: the attention backend's own fault",
    "hf-23530": "eos_lost",
    "trl-1371": "overflows_in_fp16",
    "trl-1789": "fp16_adam_eps",
    "ptforum-1765": "fp16_adam_eps",
    "tropt-8": "fp16_adam_eps",
    "llm-dojo-23": "fp16_weights",
    "trl-878": "fp16_weights",
    "nemo-3232": "no: the attention backend's own fault",
    "hf-48932": "bad_buffers",
    "llm-foundry-1745": "uninitialised_weights",
    "chatglm2-519": "huge_learning_rate",
    "trl-6702": "nan_filter_on",
    "hf-13758": "nan_filter_on",
}


def test_the_casebook_is_judged_report_by_report():
    casebook = SHARED / "casebook.jsonl"
    if not casebook.exists():
        pytest.skip("needs ../shared/casebook.jsonl")
    assert set(CASEBOOK) == {json.loads(line)["id"] for line in casebook.read_text(encoding="utf-8").splitlines()}
    assert all(verdict.startswith("no: ") or verdict in PLANTED for verdict in CASEBOOK.values())


def test_real_rows_have_only_identical_pairs():
    data = SHARED / "data" / "instruction-preferences.json"
    if not data.exists():
        pytest.skip("needs ../shared/data/instruction-preferences.json")
    source = json.loads(data.read_text(encoding="utf-8"))
    rows = [
        {"prompt": f"{r['instruction']}\n{r['input']}", "chosen": r["chosen"], "rejected": r["rejected"]}
        for r in source
    ]
    same = [number for number, row in enumerate(rows) if row["chosen"] == row["rejected"]]
    findings = look(rows, max_length=2048)
    assert findings.codes == ["identical_pair"]
    assert list(findings[0].rows) == same


def test_a_group_may_be_a_tensor():
    rows = [{**row, "group": torch.tensor(row["group"]), "reward": torch.tensor(row["reward"])} for row in SCORED]
    assert look(rows).codes == look(SCORED).codes == []
