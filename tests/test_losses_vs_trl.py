"""Our losses equal TRL's own compute_loss on the same batch, value and gradient, wherever TRL is finite."""

import copy

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer
from trl.trainer.utils import nanstd, selective_log_softmax

from nanlab.losses import dpo_loss, triple_preference_loss
from nanlab.numerics import group_advantages, masked_mean, masked_sum, token_logps

ROWS = {
    "prompt": ["the capital of France is", "two plus three is", "the capital of Italy is"],
    "chosen": [" Paris", " five", " Rome and Rome is the capital of Italy"],
    "rejected": [" Bern and Rome", " six", " Paris"],
    "reference": [" the capital of France is Paris", " two plus three is five and five is five", " Rome"],
}
WORDS = sorted({word for column in ROWS.values() for text in column for word in text.split()})
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<eos>", "<pad>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<eos>", eos_token="<eos>", pad_token="<pad>"
    )


def tiny_model(vocabulary, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=vocabulary, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=32, max_position_embeddings=64, bos_token_id=1, eos_token_id=1, pad_token_id=2,
            )
        )  # fmt: skip
        for parameter in model.parameters():  # at the default scale all log-probs would be alike
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def trl_batch(trainer):
    return trainer._prepare_inputs(trainer.data_collator(list(trainer.train_dataset)))


def trl_loss_and_gradient(trainer, batch):
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, copy.copy(batch))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def log_probs_and_mask(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    mask = batch["completion_mask"][:, 1:]
    return token_logps(logits[:, :-1], batch["input_ids"][:, 1:], mask), mask


def assert_same(loss, model, trl_loss, trl_gradient):
    assert trl_loss.isfinite()
    assert_close(loss.detach(), trl_loss, **TOLERANCE)
    loss.backward()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    assert gradient.keys() == trl_gradient.keys()
    assert max(g.abs().max() for g in gradient.values()) > 1e-3  # there is something to compare
    for name, expected in trl_gradient.items():
        assert_close(gradient[name], expected, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def settings_for(config, folder, **options):
    return config(output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, fp16=False,
                  per_device_train_batch_size=3, max_length=32, **options)  # fmt: skip


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo(tokenizer, tmp_path, beta):
    policy, reference = tiny_model(len(tokenizer), seed=1), tiny_model(len(tokenizer), seed=2)
    args = settings_for(DPOConfig, tmp_path, loss_type="sigmoid", beta=beta)
    data = Dataset.from_dict({name: ROWS[name] for name in ("prompt", "chosen", "rejected")})
    trainer = DPOTrainer(policy, reference, args, train_dataset=data, processing_class=tokenizer)
    batch = trl_batch(trainer)
    expected = trl_loss_and_gradient(trainer, batch)

    own = tiny_model(len(tokenizer), seed=1)  # untouched by the trainer
    with torch.no_grad():
        ref_log_probs, mask = log_probs_and_mask(tiny_model(len(tokenizer), seed=2), batch)
    log_probs, _ = log_probs_and_mask(own, batch)
    sums = [*masked_sum(log_probs, mask, dim=1).chunk(2), *masked_sum(ref_log_probs, mask, dim=1).chunk(2)]
    assert_same(dpo_loss(*sums, beta=beta).mean(), own, *expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize(
    ("loss_type", "per_sequence", "gamma"), [("sigmoid", masked_sum, 0.0), ("tpo-l", masked_mean, 0.5)]
)
def test_tpo(tokenizer, tmp_path, loss_type, per_sequence, gamma, label_smoothing):
    policy = tiny_model(len(tokenizer), seed=1)
    args = settings_for(TPOConfig, tmp_path, loss_type=loss_type, beta=0.3, tpo_alpha=0.7, tpo_l_gamma=0.5,
                        label_smoothing=label_smoothing)  # fmt: skip
    trainer = TPOTrainer(policy, args=args, train_dataset=Dataset.from_dict(ROWS), processing_class=tokenizer)
    batch = trl_batch(trainer)
    expected = trl_loss_and_gradient(trainer, batch)

    own = tiny_model(len(tokenizer), seed=1)
    log_probs, mask = log_probs_and_mask(own, batch)
    chosen, rejected, _ = per_sequence(log_probs, mask, dim=1).chunk(3)
    gold, gold_mask = log_probs.chunk(3)[2], mask.chunk(3)[2]
    loss = triple_preference_loss(
        chosen, rejected, -masked_mean(gold, gold_mask), 0.3, 0.7, gamma, label_smoothing
    )  # fmt: skip
    assert_same(loss.mean(), own, *expected)


def test_token_logps_where_trl_is_finite():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 50, generator=generator, requires_grad=True)
    labels = torch.randint(50, (3, 7), generator=generator)
    mask = torch.rand(3, 7, generator=generator) > 0.5
    ours, theirs = token_logps(logits, labels, mask), selective_log_softmax(logits, labels) * mask
    assert_close(ours, theirs, **TOLERANCE)
    gradients = [torch.autograd.grad(x.square().sum(), logits)[0] for x in (ours, theirs)]
    assert_close(*gradients, **TOLERANCE)


def test_group_advantages_use_the_std_of_trl():
    rewards = torch.tensor([[1.0, 2.0, 4.0, float("nan")], [0.5, -3.0, 0.0, 9.0]])
    std = nanstd(rewards, dim=1, keepdim=True)
    expected = ((rewards - rewards.nanmean(dim=1, keepdim=True)) / std).nan_to_num(nan=0.0)
    ours = group_advantages(rewards.flatten(), torch.arange(2).repeat_interleave(4)).values
    assert_close(ours.view(2, 4), expected, **TOLERANCE)
