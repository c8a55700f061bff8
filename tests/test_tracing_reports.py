"""Public reports of NaN and inf beyond the casebook, each in miniature; the docstring says where it was reported."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from marks import leaf, lines_of, verdict
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from torch.distributions import Categorical, Normal
from transformers.trainer_pt_utils import LabelSmoother
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.trainer.utils import entropy_from_logits

from nanlab import locate

line = lines_of(__file__)
INF, NAN = math.inf, math.nan


def llama(kind=transformers.LlamaForCausalLM, **more):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return kind(transformers.LlamaConfig(**sizes, **tokens, max_position_embeddings=64, **more))


def half_mlp_overflows():
    model = llama().eval()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data.fill_(200.0)
        layer.mlp.gate_proj.weight.data.fill_(200.0)
    return model.half()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    np.random.seed(0)


# -- preference tuning ------------------------------------------------------------------------------------------------
def test_trl_3339():
    """huggingface/trl#3339: SimPO averages over a response that was cut away."""
    logits, labels = leaf(shape=(2, 6, 8)), torch.randint(0, 8, (2, 6))
    labels[1] = -100

    def step():
        kept, y = labels[:, 1:] != -100, labels[:, 1:].clamp(min=0)
        per_token = torch.gather(logits[:, :-1].log_softmax(-1), 2, y.unsqueeze(2)).squeeze(2)
        average = (per_token * kept).sum(-1) / kept.sum(-1)  # trl-3339
        chosen, rejected = average.chunk(2)
        (-F.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean()).backward()

    report = locate(step)
    assert verdict(report) == ("empty_mean", "forward", line("trl-3339")), str(report)
    assert report.rows == [1]


def test_trl_1033():
    """huggingface/trl#1033: IPO divides by the length of a response; a cut one has length 0."""
    logits, kept, labels = leaf(shape=(4, 6, 8)), torch.ones(4, 6, dtype=torch.bool), torch.randint(0, 8, (4, 6))
    kept[2] = False

    def step():
        per_token = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
        per_token[~kept] = 0
        average = per_token.sum(-1)
        average = average / kept.sum(-1)  # trl-1033
        chosen, rejected = average.chunk(2)
        (chosen - rejected - 5.0).pow(2).mean().backward()

    report = locate(step)
    assert verdict(report) == ("empty_mean", "forward", line("trl-1033")), str(report)
    assert report.rows == [2]


def test_trl_3248():
    """huggingface/trl#3248: the filter for long completions masks every one of a batch."""
    logp, advantages, mask = leaf(shape=(4, 5)), torch.randn(4, 1), torch.ones(4, 5)
    ended = torch.zeros(4, 5, dtype=torch.bool)

    def step():
        kept = mask * ended.any(1).unsqueeze(1).int()
        per_token = -torch.exp(logp - logp.detach()) * advantages
        loss = ((per_token * kept).sum(1) / kept.sum(1)).mean()  # trl-3248
        loss.backward()

    report = locate(step)
    assert verdict(report) == ("empty_mean", "forward", line("trl-3248")), str(report)
    assert report.rows == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [torch.Tensor.sum, lambda mask: mask.sum().item()], ids=["tensor", "number"])
def test_unsloth_zoo_1286(count):
    """unslothai/unsloth-zoo#1286: DAPO's normaliser is a count of 0 divided by the number of processes."""
    logp, advantages, mask = leaf(shape=(4, 5)), torch.randn(4, 1), torch.zeros(4, 5)

    def step():
        normalizer = count(mask) / 2
        per_token = -torch.exp(logp - logp.detach()) * advantages
        loss = (per_token * mask).sum() / normalizer  # unsloth-zoo-1286
        loss.backward()

    report = locate(step)
    assert verdict(report) == ("empty_mean", "forward", line("unsloth-zoo-1286")), str(report)


def test_openrlhf_1293():
    """OpenRLHF/OpenRLHF#1293: the ratio of a sequence overflows, min takes the clipped one, its gradient is 0 * inf."""
    logp, old, mask = leaf(shape=(2, 4)), torch.zeros(2, 4), torch.ones(2, 4)
    old[1] = -200.0

    def step():
        ratio = ((logp - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        ratio = ratio.exp().unsqueeze(-1) * mask  # openrlhf-1293
        (-torch.min(ratio, ratio.clamp(0.8, 1.2)) * mask).sum().backward()

    report = locate(step)
    assert verdict(report) == ("gradient_at_edge", "backward", line("openrlhf-1293")), str(report)


@pytest.mark.parametrize(
    ("advantage", "cause", "phase"), [(1.0, "gradient_at_edge", "backward"), (-1.0, "overflow", "forward")]
)
def test_soup_342(advantage, cause, phase):
    """MakazhanAlpamys/Soup#342 and #1084: the ratio overflows at padding; the advantage decides where it shows."""
    logp, old, mask = leaf(shape=(2, 4)), torch.zeros(2, 4), torch.ones(2, 4)
    mask[1, 2:], old[1, 2:] = 0, -200.0
    advantages = torch.tensor([[0.5], [advantage]])

    def step():
        ratio = torch.exp(logp - old)  # soup-342
        per_token = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        ((per_token * mask).sum() / mask.sum()).backward()

    report = locate(step)
    assert verdict(report) == (cause, phase, line("soup-342")), str(report)


def test_prime_rl_2085():
    """PrimeIntellect-ai/prime-rl#2085: a mask of 0 multiplies a ratio that overflowed for a rare token."""
    logp, sampled = leaf(shape=(12,)), torch.full((12,), -1.0)
    sampled[3] = -110.0

    def step():
        importance = torch.exp(logp - sampled)  # prime-rl-2085
        kept = (importance < 8.0) & (importance > 0.125)
        (-(importance * kept).sum()).backward()

    report = locate(step)
    assert verdict(report) == ("overflow", "forward", line("prime-rl-2085")), str(report)


def test_nemo_rl_4154():
    """NVIDIA-NeMo/RL#4154: the filter leaves -inf at a sampled token; its error times a mask of 0 is NaN."""
    logits, ids, mask = leaf(shape=(2, 4, 8)), torch.zeros(2, 4, 1, dtype=torch.long), torch.ones(2, 4)
    dropped = torch.zeros(2, 4, 8, dtype=torch.bool)
    mask[0, 1], dropped[0, 1, 0] = 0, True

    def step():
        logp = logits.masked_fill(dropped, -INF).log_softmax(-1).gather(-1, ids).squeeze(-1)
        error = (-1.0 - logp).abs()
        (torch.exp(error * mask).sum() / mask.sum()).backward()  # nemo-rl-4154

    report = locate(step)
    assert verdict(report) == ("zero_times_inf", "forward", line("nemo-rl-4154")), str(report)
    assert report.rows == [0]


def test_skyrl_2259():
    """NovaSky-AI/SkyRL#2259: unused entries of the vocabulary are -inf; the entropy of such a row is NaN."""
    hidden, head = torch.randn(3, 4), nn.Linear(4, 10)

    def step():
        logits = head(hidden)
        logits[:, 8:] = -INF
        logp = F.log_softmax(logits, -1)
        entropy = -(logp.exp() * logp).sum(-1)  # skyrl-2259
        (-entropy.mean()).backward()

    report = locate(step)
    assert verdict(report) == ("zero_times_inf", "forward", line("skyrl-2259")), str(report)


def test_trl_7221():
    """huggingface/trl#7221: the same in TRL's own entropy."""
    logits = leaf(shape=(2, 3, 8))

    def step():
        masked = logits.masked_fill(torch.arange(8) > 5, -INF)
        (-entropy_from_logits(masked).mean()).backward()  # trl-7221

    report = locate(step)
    assert verdict(report) == ("zero_times_inf", "forward", line("trl-7221")), str(report)
    assert "trl/trainer/utils.py" in report.library


def test_soup_719_reverse_kl():
    """MakazhanAlpamys/Soup#719: the target of a kl_div wants a gradient and underflows at temperature 0.05."""
    student, teacher = leaf(10.0, 0.0, -10.0), torch.tensor([1.0, 0.5, 0.1])

    def step():
        target = F.softmax(student / 0.05, -1)
        F.kl_div(F.log_softmax(teacher / 0.05, -1), target, reduction="sum").backward()  # soup-719 kl

    report = locate(step)
    assert verdict(report) == ("gradient_at_edge", "backward", line("soup-719 kl")), str(report)


def test_soup_719_mixture():
    """MakazhanAlpamys/Soup#719: the clamp of a mixture in float16 is 1e-12, which float16 holds as 0."""
    student, teacher = leaf(30.0, 0.0, -30.0, dtype=torch.float16), torch.tensor([30.0, 0.0, -30.0]).half()

    def step():
        p, q = torch.softmax(student, -1), torch.softmax(teacher, -1)
        mixture = torch.log((0.5 * (p + q)).clamp(min=1e-12))  # soup-719 mixture
        (p * (torch.log_softmax(student, -1) - mixture)).sum().backward()

    report = locate(step)
    assert verdict(report) == ("log_of_zero", "forward", line("soup-719 mixture")), str(report)


def test_axolotl_3910():
    """axolotl-ai-cloud/axolotl#3910: ORPO's log(1 - exp(logp)) in bfloat16; the loss is finite, its gradient is not."""
    chosen, rejected = leaf(-0.001, -1.0, dtype=torch.bfloat16), torch.tensor([-1.0, -2.0]).bfloat16()

    def step():
        odds = torch.log(1 - torch.exp(chosen)) - torch.log(1 - torch.exp(rejected))  # axolotl-3910
        loss = -torch.log(torch.sigmoid(chosen - rejected - odds)).mean()
        loss.backward()

    report = locate(step)
    assert verdict(report) == ("gradient_at_edge", "backward", line("axolotl-3910")), str(report)
    assert report.rows == [0]


def test_colossalai_6407():
    """hpcaitech/ColossalAI#6407: ORPO's log(1.0001 - exp(logp)) where logp is a little above 0."""
    chosen, rejected = leaf(-0.5, 0.01), torch.tensor([-1.0, -1.0])

    def step():
        odds = chosen - torch.log(-torch.exp(chosen) + 1.0001)  # colossalai-6407
        (-F.logsigmoid(odds - rejected).mean()).backward()

    report = locate(step)
    assert verdict(report) == ("log_of_zero", "forward", line("colossalai-6407")), str(report)
    assert report.rows == [1]


def test_deepspeed_examples_338():
    """deepspeedai/DeepSpeedExamples#338, huggingface/trl#2274: log(sigmoid(x) + eps) with an eps that float16 drops."""
    chosen, rejected = leaf(1.0, -20.0, dtype=torch.float16), torch.tensor([0.0, 10.0]).half()

    def step():
        loss = -torch.log(torch.sigmoid(chosen - rejected) + 1e-8).float().mean()  # deepspeed-examples-338
        loss.backward()

    report = locate(step)
    assert verdict(report) == ("log_of_zero", "forward", line("deepspeed-examples-338")), str(report)
    assert report.rows == [1]


def test_r1_v_69():
    """StarsfieldAI/R1-V#69: one completion per prompt; the spread of one reward is NaN."""
    logp, rewards = leaf(shape=(3, 5)), torch.tensor([0.25, 0.0, 1.0])

    def step():
        std = rewards.view(-1, 1).std(dim=1)  # r1-v-69
        advantages = (rewards - rewards) / (std + 1e-4)
        (-(torch.exp(logp - logp.detach()) * advantages[:, None]).mean()).backward()

    report = locate(step)
    assert verdict(report) == ("zero_over_zero", "forward", line("r1-v-69")), str(report)


def test_roll_475():
    """alibaba/ROLL#475: Bessel's correction n / (n - 1) of one valid token."""
    logp, advantages, mask = leaf(shape=(2, 4)), torch.randn(2, 4), torch.zeros(2, 4)
    mask[0, 0] = 1

    def step():
        count = mask.sum()
        centred = advantages - (advantages * mask).sum() / count
        variance = (centred**2 * mask).sum() / count
        bessel = count / (count - 1)  # roll-475
        (-(logp * centred * torch.rsqrt(variance * bessel + 1e-8) * mask).sum()).backward()

    report = locate(step)
    assert verdict(report) == ("division_by_zero", "forward", line("roll-475")), str(report)


def test_trl_6693():
    """huggingface/trl#6693: the server returns no log-probability for a token; its row is named by the stack."""
    logp, returned = leaf(shape=(2, 3)), [[-0.1, -0.2, None], [-0.3, -0.1, -0.2]]

    def step():
        sampling = torch.stack([torch.tensor([NAN if x is None else x for x in row]) for row in returned])  # trl-6693
        (-(torch.exp(logp.detach() - sampling) * logp).mean()).backward()

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("trl-6693")), str(report)
    assert (report.op, report.rows) == ("sampling", [0])


def test_unirl_330():
    """Tencent-Hunyuan/UniRL#330: one reward is NaN; mean and spread hand it to the group."""
    logp, rewards = leaf(shape=(3,)), torch.tensor([1.0, NAN, 3.0])

    def step():
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)  # unirl-330
        (-(logp * advantages).mean()).backward()

    report = locate(step, batch={"rewards": rewards})
    assert verdict(report) == ("bad_input", "data", line("unirl-330")), str(report)
    assert (report.op, report.rows) == ("batch rewards", [1])


def test_unirl_330_numpy():
    """Tencent-Hunyuan/UniRL#330, michaelnny/deep_rl_zoo#17: the rewards come from numpy and change their dtype."""
    logp, scores = leaf(shape=(3,)), np.array([1.0, np.nan, 0.5])

    def step():
        rewards = torch.tensor(scores, dtype=torch.float32)  # unirl-330 numpy
        (-(logp * rewards).mean()).backward()

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("unirl-330 numpy")), str(report)
    assert report.op in ("rewards", "scores")


def test_verl_6349():
    """verl-project/verl#6349: a NaN at a masked token; the product with the mask keeps it."""
    scale, advantages, mask = leaf(1.0), torch.randn(2, 4), torch.ones(2, 4)
    advantages[1, 3], mask[1, 3] = NAN, 0

    def step():
        per_token = -scale * advantages  # verl-6349
        ((per_token * mask).sum() / mask.sum()).backward()

    report = locate(step, batch={"advantages": advantages})
    assert verdict(report) == ("bad_input", "data", line("verl-6349")), str(report)
    assert (report.op, report.rows) == ("batch advantages", [1])


def test_verl_6349_mended():
    """verl-project/verl#6349, as it was mended: a selection before the product."""
    scale, advantages, mask = leaf(1.0), torch.randn(2, 4), torch.ones(2, 4)
    advantages[1, 3], mask[1, 3] = NAN, 0

    def step():
        given = torch.where(mask.bool(), advantages, torch.zeros(()))
        ((-scale * given * mask).sum() / mask.sum()).backward()

    assert not locate(step, batch={"advantages": advantages}).found


def test_llamafactory_2916():
    """hiyouga/LlamaFactory#2916: LoRA weights in float16 under AdamW."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(llama().half(), lora, autocast_adapter_dtype=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, foreach=False)
    ids = torch.randint(3, 64, (2, 6))

    def step():
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()  # llamafactory-2916

    report = locate(step)
    assert verdict(report) == ("optimizer_underflow", "optimizer", line("llamafactory-2916")), str(report)


def test_peft_2049():
    """huggingface/peft#2049: DoRA divides by the norm of a row of zeros."""
    base, x = nn.Sequential(), torch.randn(3, 6)
    base.add_module("o_proj", nn.Linear(6, 4, bias=False))
    base.o_proj.weight.data[2] = 0
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["o_proj"], use_dora=True))
    report = locate(lambda: model(x).pow(2).mean().backward())  # peft-2049
    assert verdict(report) == ("zero_over_zero", "forward", line("peft-2049")), str(report)
    assert "dora.py" in report.library


# -- trainers ---------------------------------------------------------------------------------------------------------
WORDS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 63)), "<unk>"]


def tokenizer():
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


def arguments(folder, kind=transformers.TrainingArguments, **more):
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return kind(str(folder), **quiet, **more)


def test_automodel_3797_trainer(tmp_path):
    """NVIDIA-NeMo/Automodel#3797: a window of gradient accumulation without a label."""
    rows = [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6] if i < 4 else [-100] * 4} for i in range(8)]
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2)
    data = {"train_dataset": Dataset.from_list(rows), "data_collator": transformers.default_data_collator}
    trainer = transformers.Trainer(llama(), args, **data)
    trainer._get_train_sampler = lambda *_, **__: torch.utils.data.SequentialSampler(trainer.train_dataset)
    report = locate(trainer)  # window
    assert verdict(report) == ("empty_mean", "forward", line("window")), str(report)
    assert "loss_utils.py" in report.library
    assert report.batch in (2, 3)


def test_soup_342_evaluation(tmp_path):
    """MakazhanAlpamys/Soup#342: generation inside an evaluation raises; the MLP overflowed before."""

    class Sampling(transformers.Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            out = model.generate(inputs["input_ids"], do_sample=True, max_new_tokens=2)  # sampled in an evaluation
            return torch.tensor(0.0), out, out

    model = llama()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data.fill_(1e19)
        layer.mlp.gate_proj.weight.data.fill_(1e19)
        layer.mlp.down_proj.weight.data.fill_(1e38)
    rows = Dataset.from_list([{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]}] * 2)
    collator = transformers.default_data_collator
    args = arguments(tmp_path, per_device_eval_batch_size=2)
    report = locate(Sampling(model, args, eval_dataset=rows, data_collator=collator), mode="eval")
    assert isinstance(report.exception, RuntimeError)
    assert verdict(report) == ("overflow", "forward", line("sampled in an evaluation")), str(report)


def test_trl_3714(tmp_path):
    """huggingface/trl#3714: the weights of a GRPO run are NaN; its generation raises."""
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.data[0] = NAN
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "max_steps": 1}
    args = arguments(tmp_path, GRPOConfig, bf16=False, gradient_checkpointing=False, **sizes)
    data = Dataset.from_list([{"prompt": "w3 w4"}] * 4)
    reward = lambda completions, **_: [1.0] * len(completions)
    report = locate(GRPOTrainer(model, reward, args, data, processing_class=tokenizer()))  # trl-3714
    assert verdict(report) == ("bad_state", "state", line("trl-3714")), str(report)
    assert "layers.0.mlp.up_proj.weight" in report.op
    assert "modeling_llama.py" in report.library


def test_trl_discopop(tmp_path):
    """huggingface/trl's loss_type "discopop": exp of a strongly preferred pair overflows."""
    policy, data = llama(), {"prompt": "w3 w4", "chosen": " w5 w6", "rejected": " w7 w8"}
    policy.lm_head.weight.data.mul_(200)
    rows = [data, {**data, "chosen": data["rejected"], "rejected": data["chosen"]}]
    sizes = {
        "per_device_train_batch_size": 2,
        "max_length": 32,
        "max_steps": 1,
        "loss_type": ["discopop"],
        "beta": 50.0,
    }
    args = arguments(tmp_path, DPOConfig, bf16=False, gradient_checkpointing=False, **sizes)
    trainer = DPOTrainer(policy, llama(), args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
    report = locate(trainer)  # discopop
    assert verdict(report) == ("overflow", "forward", line("discopop")), str(report)
    assert "dpo_trainer.py" in report.library


# -- transformers -----------------------------------------------------------------------------------------------------
def test_automodel_3797():
    """NVIDIA-NeMo/Automodel#3797: a model of transformers is told that its batch holds 0 labels."""
    model, ids = llama(), torch.randint(3, 64, (2, 6))
    inputs = {"input_ids": ids, "labels": torch.full_like(ids, -100), "num_items_in_batch": torch.tensor(0)}
    report = locate(lambda: model(**inputs).loss.backward())  # automodel-3797
    assert verdict(report) == ("empty_mean", "forward", line("automodel-3797")), str(report)
    assert "loss_utils.py" in report.library


def test_automodel_3797_in_place():
    """NVIDIA-NeMo/Automodel#3797: a sum is divided in place by a count that is a number."""
    per_token, mask = leaf(shape=(2, 4)), torch.zeros(2, 4, dtype=torch.long)

    def step():
        loss, count = 0.0, 0
        for row, m in zip(per_token, mask, strict=True):
            loss = loss + (row * m).sum()
            count += int(m.sum())
        loss /= count  # automodel-3797 in place
        loss.backward()

    report = locate(step)
    assert verdict(report) == ("empty_mean", "forward", line("automodel-3797 in place")), str(report)


def test_label_smoother():
    """huggingface/transformers' LabelSmoother (label_smoothing_factor): every label is -100."""
    logits, labels = leaf(shape=(1, 5, 8)), torch.full((1, 5), -100)
    report = locate(lambda: LabelSmoother(0.1)({"logits": logits}, labels).backward())  # smoother
    assert verdict(report) == ("empty_mean", "forward", line("smoother")), str(report)


def test_mixtral_router():
    """huggingface/transformers' load_balancing_loss_func: a batch of padding on one rank."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    router = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=64, **sizes, **router))
    ids = torch.randint(3, 64, (2, 5))
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.zeros_like(ids)}
    report = locate(lambda: model(**inputs).loss.backward())  # router
    assert verdict(report) == ("empty_mean", "forward", line("router")), str(report)


def test_hf_19044():
    """huggingface/transformers#19044: a transcript longer than its audio allows."""
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (8, 4), "conv_stride": (4, 4), "num_feat_extract_layers": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    position = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    switches = {"ctc_zero_infinity": False, "apply_spec_augment": False, "layerdrop": 0.0}
    config = transformers.Wav2Vec2Config(vocab_size=12, **convolutions, **sizes, **position, **switches)
    model, audio, labels = transformers.Wav2Vec2ForCTC(config), torch.randn(1, 200), torch.randint(1, 11, (1, 60))
    report = locate(lambda: model(audio, labels=labels).loss.backward())  # hf-19044
    assert verdict(report) == ("log_of_zero", "forward", line("hf-19044")), str(report)


def test_hf_46002():
    """huggingface/transformers#46002: the weight of a new classification head is NaN."""
    model, ids = llama(transformers.LlamaForSequenceClassification, num_labels=2), torch.randint(3, 64, (2, 6))
    model.score.weight.data[1] = NAN
    report = locate(lambda: model(input_ids=ids, labels=torch.tensor([0, 1])).loss.backward())  # hf-46002
    assert verdict(report) == ("bad_state", "state", line("hf-46002")), str(report)
    assert (report.op, report.rows) == ("parameter score.weight", [1])


def test_hf_22890():
    """huggingface/transformers#22890 and #27676: constrained generation leaves no token; sampling raises."""
    model, ids = llama().eval(), torch.randint(3, 64, (1, 4))
    nothing = [lambda _, scores: torch.full_like(scores, -INF)]
    report = locate(lambda: model.generate(ids, do_sample=True, max_new_tokens=2, logits_processor=nothing))  # hf-22890
    assert isinstance(report.exception, RuntimeError)
    assert verdict(report) == ("masked_row", "forward", line("hf-22890")), str(report)


def test_colossalai_3732():
    """hpcaitech/ColossalAI#3732: a model in float16 overflows while it generates; sampling raises."""
    model, ids = half_mlp_overflows(), torch.randint(3, 64, (2, 4))
    report = locate(lambda: model.generate(ids, do_sample=True, max_new_tokens=2))  # colossalai-3732
    assert isinstance(report.exception, RuntimeError)
    assert verdict(report) == ("overflow", "forward", line("colossalai-3732")), str(report)


def test_hf_33312():
    """huggingface/transformers#33312, QwenLM/Qwen3#761: greedy generation from NaN answers with token 0."""
    model, ids = half_mlp_overflows(), torch.randint(3, 64, (1, 5))
    report = locate(lambda: model.generate(ids, do_sample=False, max_new_tokens=3))  # hf-33312
    assert report.exception is None
    assert verdict(report) == ("overflow", "forward", line("hf-33312")), str(report)
    assert "modeling_llama.py" in report.library


# -- losses, layers and policies --------------------------------------------------------------------------------------
def test_number_token_loss_73():
    """tum-ai/number-token-loss#73: no token of the batch is a number; the mean comes after the loss."""
    logits, labels, numbers = leaf(shape=(2, 4, 8)), torch.randint(0, 4, (2, 4)), torch.full((8,), NAN)
    numbers[6], numbers[7] = 1.0, 2.0

    def step():
        wanted = numbers[labels]
        valid = ~torch.isnan(wanted)
        expected = (torch.softmax(logits[..., 6:], -1) * numbers[6:]).sum(-1)
        torch.mean(F.mse_loss(expected[valid], wanted[valid], reduction="none")).backward()  # number-token-loss-73

    report = locate(step)
    assert verdict(report) == ("empty_mean", "forward", line("number-token-loss-73")), str(report)


def test_superedit_3():
    """bytedance/SuperEdit#3: the mask of a triplet loss sums to 0, under detect_anomaly; here divided in place."""
    a, mask = leaf(shape=(4,)), torch.zeros(4)

    def step():
        with torch.autograd.detect_anomaly(check_nan=True):
            loss = (F.relu(a + 0.1) * mask).sum()
            loss /= mask.sum()  # superedit-3
            loss.backward()

    report = locate(step)
    assert isinstance(report.exception, RuntimeError)
    assert verdict(report) == ("empty_mean", "forward", line("superedit-3")), str(report)


def test_tokenlearn_22():
    """MinishLab/tokenlearn#22: pooling in place over a text that is all padding."""
    hidden, mask = leaf(shape=(2, 4, 3)), torch.ones(2, 4, 1)
    mask[1] = 0

    def step():
        pooled = (hidden * mask).sum(1)
        pooled /= mask.sum(1)  # tokenlearn-22
        pooled.pow(2).sum().backward()

    report = locate(step)
    assert verdict(report) == ("empty_mean", "forward", line("tokenlearn-22")), str(report)
    assert report.rows == [1]


def power(x):
    return x.pow_(-0.5)  # power


def rsqrt(x):
    return x.rsqrt_()  # rsqrt


def reciprocal(x):
    return x.reciprocal_()  # reciprocal


@pytest.mark.parametrize("invert", [power, rsqrt, reciprocal])
def test_an_inverse_in_place(invert):
    """ModelCloud/GPTQModel#1529: a scale of 0; its inverse, taken in place in three spellings, is no overflow."""
    w, scale = leaf(shape=(2, 3)), torch.tensor([[0.5], [0.0]])
    report = locate(lambda: (w * invert(scale.clone())).sum().backward())
    assert verdict(report) == ("division_by_zero", "forward", line(invert.__name__)), str(report)
    assert report.rows == [1]


def test_pyg_61():
    """pyg-team/pytorch_geometric#61: a negative degree to the power of -0.5 is NaN; the inf beside it is removed."""
    weights, source, target = torch.tensor([-1.0, 0.5, 0.2]), torch.tensor([0, 1, 2]), torch.tensor([1, 0, 0])
    h = leaf(shape=(3, 2))

    def step():
        inverse = torch.zeros(3).scatter_add_(0, target, weights).pow(-0.5)  # pyg-61
        inverse[inverse == INF] = 0
        (h[source] * (inverse[source] * weights * inverse[target])[:, None]).sum().backward()

    report = locate(step)
    assert verdict(report) == ("unknown", "forward", line("pyg-61")), str(report)
    assert report.op == "pow"


def half_head():
    head = nn.Linear(3, 4).half()
    head.weight.data.fill_(60000.0)
    return head, torch.full((2, 3), 100.0).half()


def categorical(head, x):
    return Categorical(logits=head(x), validate_args=True).sample()  # categorical


def multinomial(head, x):
    return torch.multinomial(torch.softmax(head(x).float(), -1), 1)  # multinomial


@pytest.mark.parametrize(("sample", "error"), [(categorical, ValueError), (multinomial, RuntimeError)])
def test_tianshou_823(sample, error):
    """thu-ml/tianshou#823: a distribution refuses the answer of a policy that no variable holds."""
    head, x = half_head()
    report = locate(lambda: sample(head, x))
    assert isinstance(report.exception, error)
    assert verdict(report) == ("overflow", "forward", line(sample.__name__)), str(report)


def test_sb3_156():
    """DLR-RM/rl-baselines3-zoo#156: Normal refuses the mean of an observation that the environment made NaN."""
    actor, seen = nn.Linear(3, 2), np.zeros((4, 3), dtype=np.float32)
    seen[2, 1] = np.nan

    def step():
        return Normal(actor(torch.as_tensor(seen)), 1.0, validate_args=True).sample()  # sb3-156

    report = locate(step)
    assert isinstance(report.exception, ValueError)
    assert verdict(report) == ("bad_input", "data", line("sb3-156")), str(report)
    assert report.rows == [2]


@pytest.mark.parametrize("read", [lambda loss: loss, torch.Tensor.item], ids=["tensor", "number"])
def test_open_lm_7(read):
    """mlfoundations/open_lm#7: the loop raises on a loss that a helper returned."""
    logits, labels = leaf(shape=(2, 3, 5)), torch.full((2, 3), -100)

    def compute():
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # open-lm-7

    def step():
        if not math.isfinite(read(compute())):
            raise FloatingPointError("non-finite loss")

    report = locate(step)
    assert isinstance(report.exception, FloatingPointError)
    assert verdict(report) == ("empty_mean", "forward", line("open-lm-7")), str(report)


class NorMuon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            update = p.grad / (p.grad.norm() + 1e-7)
            scaled = update / (update.square().mean(-1, keepdim=True).sqrt() + 1e-8)
            p.sub_(scaled * (update.norm() / scaled.norm()))  # dion-24


def test_dion_24():
    """microsoft/dion#24: NorMuon compares two norms of a gradient that is 0."""
    hidden, out, x = nn.Linear(4, 4), nn.Linear(4, 2), torch.randn(3, 4)
    nn.init.zeros_(out.weight)
    optimizer = NorMuon([hidden.weight, out.weight], {})

    def step():
        out(hidden(x)).pow(2).sum().backward()
        optimizer.step()

    report = locate(step)
    assert verdict(report) == ("zero_over_zero", "optimizer", line("dion-24")), str(report)


# -- buffers, whole numbers, settings ---------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [True, False])
def test_sparseconvnet_190(bad):
    """facebookresearch/SparseConvNet#190, pytorch/pytorch#1206: the loss is skipped, the running statistics are not."""
    net, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), torch.randn(5, 4)
    x[2, 3] = NAN if bad else 0.0

    def step():
        loss = net(x).mean()  # sparseconvnet-190
        if loss.isfinite():
            loss.backward()

    report = locate(step, model=net)
    expected = ("bad_input", "data", line("sparseconvnet-190")) if bad else ("", "", "")
    assert verdict(report) == expected, str(report)
    assert report.rows == [2] * bad


def test_a_buffer_that_was_nan_on_arrival_and_reaches_nothing_is_no_finding():
    net, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), torch.randn(5, 4)
    net[1].running_mean.fill_(NAN)
    assert not locate(lambda: net(x).mean().backward(), model=net).found  # in training it is written, not read


def whole(low, high, shape):
    return torch.randint(low, high, shape).float()


def by_maximum():
    """cytomining/DeepProfiler#298: a black crop."""
    x = whole(0, 255, (2, 16))
    x[1] = 0
    x = x - x.amin(1, keepdim=True)
    return x / x.amax(1, keepdim=True)  # by_maximum


def flipped():
    """albumentations-team/albumentations#1742: a black picture that was flipped before."""
    x = torch.flip(torch.zeros(1, 16), (-1,))
    return x / x.max()  # flipped


def ndvi():
    """danforthcenter/plantcv#1563: a pixel without data."""
    near, red = whole(1, 4000, (2, 16)), whole(1, 4000, (2, 16))
    near[1, 2] = red[1, 2] = 0
    return (near - red) / (near + red)  # ndvi


def si_sdr():
    """csteinmetz1/auraloss#25: a silent target."""
    estimate, silent = torch.randn(16), torch.zeros(16)
    return torch.dot(estimate, silent) / torch.dot(silent, silent) * silent  # si_sdr


@pytest.mark.parametrize("scaled", [by_maximum, flipped, ndvi, si_sdr])
def test_whole_numbers_that_are_measured_are_no_counts(scaled):
    net = nn.Linear(16, 1)
    report = locate(lambda: net(scaled()).mean().backward(), model=net)
    assert verdict(report) == ("zero_over_zero", "forward", line(scaled.__name__)), str(report)


class Normalised(torch.optim.Optimizer):
    """kozistr/pytorch_optimizer#431: a gradient divided by its norm, without an eps."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(p.grad / torch.linalg.norm(p.grad), alpha=-0.1)  # normalised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_zero_in_bfloat16_has_not_underflowed(dtype):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)
    net[0].bias.data.fill_(-90.0)  # every unit is dead
    optimizer, x = Normalised(net.parameters()), torch.rand(3, 4, dtype=dtype)

    def step():
        net(x).pow(2).mean().backward()
        optimizer.step()

    report = locate(step, model=net, optimizer=optimizer)
    assert verdict(report) == ("zero_over_zero", "optimizer", line("normalised")), str(report)


def test_a_nan_decay_of_a_moving_average_is_bad_input():
    net, average, decay = nn.Linear(3, 1), nn.Linear(3, 1), NAN

    @torch.no_grad()
    def step():
        for mean, p in zip(average.parameters(), net.parameters(), strict=True):
            mean.mul_(decay).add_(p, alpha=1 - decay)  # a decay of nan

    report = locate(step)
    assert verdict(report) == ("bad_input", "data", line("a decay of nan")), str(report)
    assert report.story[0].startswith("a number given to mul was already nan")


# -- two faults in one tensor, constants, fast paths -------------------------------------------------------------------
ZERO_OVER_ZERO = {
    "zeros": lambda w: torch.zeros(3) / torch.zeros(3),
    "zeros_like": lambda w: torch.zeros_like(w) / torch.zeros_like(w),
    "a difference": lambda w: (w - w) / torch.full((3,), 0.0),
    "a Python number": lambda w: torch.zeros(3) / 0,
    "a spread by a mean": lambda w: torch.zeros(3).std() / torch.zeros(3).mean(),
}


@pytest.mark.parametrize("made", ZERO_OVER_ZERO)
def test_constants_to_which_nothing_was_added_are_no_mean(made):
    w = leaf(1.0, 2.0, 3.0)
    report = locate(lambda: (ZERO_OVER_ZERO[made](w) * w).sum().backward())
    assert (report.cause, report.phase) == ("zero_over_zero", "forward"), str(report)


GUARDS = {
    "where": lambda ratio, numerator: torch.where(numerator == 0, 0.0, ratio).sum(),
    "nanmean": lambda ratio, numerator: ratio.nanmean(),
    "nan_to_num": lambda ratio, numerator: ratio.nan_to_num(nan=0.0, posinf=INF).sum(),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_of_two_faults_in_one_division_the_guarded_one_is_not_blamed(guard):
    numerator, denominator = torch.tensor([1.0, 0.0, 2.0, 3.0]), torch.tensor([2.0, 0.0, 0.0, 1.0])

    def step():
        ratio = numerator / denominator  # nan in row 1, inf in row 2
        return GUARDS[guard](ratio, numerator)

    report = locate(step)
    assert verdict(report) == ("division_by_zero", "forward", line("nan in row 1, inf in row 2")), str(report)
    assert (report.kind, report.rows) == ("inf", [2])


def test_of_many_events_the_deliberate_ones_are_forgotten_first():
    encoder, sequences = nn.Linear(4, 1), [torch.randn(2 + i % 3, 4) for i in range(12)]

    def step():
        rows = []
        for i, sequence in enumerate(sequences):
            row = encoder(sequence).squeeze(-1)
            if i == 11:
                row = torch.log(row * 0)  # the last of twelve
            rows.append(F.pad(row, (0, 5 - len(row)), value=-INF))
        padded = torch.stack(rows)
        (padded[:, 0].logsumexp(0) - padded[11, 0]).backward()

    report = locate(step)
    assert verdict(report) == ("log_of_zero", "forward", line("the last of twelve")), str(report)


def test_a_weight_normalised_in_place_inside_forward_is_forward():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 3))

        def forward(self, x):
            with torch.no_grad():
                self.w.div_(self.w.norm(dim=1, keepdim=True))  # normalised in forward
            return x @ self.w.T

    net, x = Normalised(), torch.randn(4, 3)
    report = locate(lambda: net(x).sum().backward(), model=net)
    assert verdict(report) == ("zero_over_zero", "forward", line("normalised in forward")), str(report)


def test_a_row_of_padding_in_the_fast_path_of_attention_is_a_masked_row():
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 4, 8)
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[1] = True

    @torch.no_grad()
    def step():
        return attention(x, x, x, key_padding_mask=padding, need_weights=False)[0].sum()  # a row of padding

    report = locate(step, model=attention)
    assert verdict(report) == ("masked_row", "forward", line("a row of padding")), str(report)


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum])
def test_minus_inf_that_is_a_mean_is_no_mask(reduce):
    right = torch.tensor([1.0, 0.0, 1.0])
    report = locate(lambda: reduce(right.log()))  # a likelihood of zero
    assert verdict(report) == ("log_of_zero", "forward", line("a likelihood of zero")), str(report)
