"""Cases: special tokens."""

from __future__ import annotations

import torch

from nanlab.course.cases.frame import Case
from nanlab.course.materials import tiny_tokenizer
from nanlab.inspection import preflight

CASES: list[Case] = []


# -- hf-23530 --------------------------------------------------------------------------------------------------------
def answers():
    return [f"Question: what is {n} plus {n}? Answer: {2 * n}<|endoftext|>" for n in (2, 31, 4, 555)]


def labels_of_a_batch():
    from transformers import DataCollatorForLanguageModeling

    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)

    def step():
        batch = collate([tokenizer(text) for text in answers()])
        labels = batch["labels"]
        print(f"input_ids {tuple(batch['input_ids'].shape)}, labels that count {(labels != -100).sum()}")
        return {"labels that teach to stop": (labels == tokenizer.eos_token_id).sum()}

    return step


def labels_of_a_batch_fixed():
    from transformers import DataCollatorForLanguageModeling

    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<|padding|>"  # a token that means nothing else
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)

    def step():
        batch = collate([tokenizer(text) for text in answers()])
        return {"labels that teach to stop": (batch["labels"] == tokenizer.eos_token_id).sum()}

    return step


def look_at_answers():
    from datasets import Dataset

    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return preflight(Dataset.from_dict({"text": answers()}), tokenizer)


CASES.append(
    Case(
        id="hf-23530",
        title="It never stops talking",
        symptom="A finite loss that falls as it should, good answers, and then the model goes on and on until "
        "max_length. Every training text ends in the end-of-text token, I looked.",
        broken=labels_of_a_batch,
        fixed=labels_of_a_batch_fixed,
        reference=lambda: {"labels that teach to stop": torch.tensor(4)},  # one for each answer
        parts=(answers,),
        phase="data",
        line="tokenizer.pad_token = tokenizer.eos_token",
        link="https://github.com/huggingface/transformers/issues/23530",
        family="pad_unk_eos",
        trap="finite and wrong",
        tool="preflight",
        look=look_at_answers,
        finding="eos_lost",
        lesson="05_unk_pad",
        story="The collator finds padding by its id. With pad = eos the true end of each answer is padding too, gets "
        "the label −100, and is never taught. Give padding a token of its own, or mask by position.",
        difficulty=1,
    )
)
