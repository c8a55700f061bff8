"""The command line: exit status, one line for bad input, text and JSON."""

import json
import os
import subprocess
import sys

import pytest
from datasets import Dataset

from nanlab import cli

LOG = [{"step": n, "loss": 2.0 - 0.01 * n, "grad_norm": 1.0} for n in range(1, 9)]
DEAD = [*LOG, *[{"step": n, "loss": 0.0, "grad_norm": float("nan")} for n in (9, 10)]]
ROWS = [{"prompt": f"{n} and", "chosen": " one", "rejected": " two"} for n in range(3)]


@pytest.fixture
def put(tmp_path):
    """Writes text to a file of the temporary folder and returns its path as text."""

    def write(name, content):
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return str(tmp_path / name)

    return write


@pytest.fixture
def tokenizer_dir(tmp_path):
    from nanlab.course.materials import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<|padding|>"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_autopsy_has_the_exit_status_of_what_it_found(put, capsys):
    assert cli.main(["autopsy", put("good.json", LOG)]) == 0
    assert capsys.readouterr().out.startswith("Nothing found in 8 log entries")
    assert cli.main(["autopsy", put("dead.json", DEAD)]) == 1
    out, err = capsys.readouterr()
    assert "filter_footprint" in out
    assert err == ""


def test_json_is_the_same_findings(put, capsys):
    assert cli.main(["autopsy", put("dead.json", DEAD), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["unit"] == "step"
    assert told["findings"][0]["code"] == "filter_footprint"
    assert told["findings"][0]["rows"] == [9, 10]


def test_preflight_reads_rows_as_they_are(put, tokenizer_dir, tmp_path, capsys):
    faulty = [*ROWS, {**ROWS[0], "chosen": None}, {**ROWS[0], "prompt": "long " * 50}]
    lines = put("rows.jsonl", "\n".join(map(json.dumps, faulty)))
    Dataset.from_list(faulty).to_parquet(tmp_path / "rows.parquet")
    files = (lines, put("rows.json", faulty), str(tmp_path / "rows.parquet"))
    for file in files:
        assert cli.main(["preflight", file, "--tokenizer", tokenizer_dir, "--max-length", "32", "--json"]) == 1
        told = json.loads(capsys.readouterr().out)["findings"]
        assert {finding["code"]: finding["rows"] for finding in told} == {"missing_text": [3], "truncated_away": [4]}
    assert cli.main(["preflight", put("good.json", ROWS), "--tokenizer", tokenizer_dir]) == 0
    assert capsys.readouterr().out.startswith("Nothing found in 3 rows")


def test_preflight_looks_at_a_model_as_it_is_stored(put, tokenizer_dir, tmp_path, capsys):
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=2000, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    GPTNeoXForCausalLM(config).to(torch.float16).save_pretrained(tmp_path / "model")
    arguments = ["preflight", put("good.json", ROWS), "--tokenizer", tokenizer_dir, "--model", str(tmp_path / "model")]
    assert cli.main(arguments) == 1
    assert "fp16_weights" in capsys.readouterr().out


def test_check_prints_one_line_a_thing(capsys):
    assert cli.main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok ") for line in lines)
    names = [line.split()[1] for line in lines]
    assert names[:2] == ["nanlab", "python"]
    assert {"torch", "transformers", "trl", "datasets", "device"} <= set(names)
    assert len(set(lines)) == len(lines)
    assert cli.main(["check", "--json"]) == 0
    assert [line["name"] for line in json.loads(capsys.readouterr().out)] == names


def test_check_says_what_is_missing_or_too_old(monkeypatch, capsys):
    from importlib import metadata

    def version(name, installed=metadata.version):
        if name == "tqdm":
            raise metadata.PackageNotFoundError(name)
        return "0.9.0" if name == "trl" else installed(name)

    monkeypatch.setattr(metadata, "version", version)
    assert cli.main(["check"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 2
    assert "trl" in failed[0]
    assert "0.9.0" in failed[0]
    assert "pip install 'trl>=" in failed[0]
    assert "tqdm" in failed[1]
    assert "missing" in failed[1]


# --- check --all: is a room's machine ready -------------------------------------------------------------------------


def room_lines(capsys):
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[1]: line for line in lines if line.startswith(("ok ", "FAIL"))}


def test_check_all_does_what_a_lesson_does(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "--all"]) == 0
    lines = room_lines(capsys)
    assert {"torch", "imports", "memory", "disk", "training", "locate", "plots", "kernel"} <= set(lines)
    before, after = lines["training"].split("loss ")[1].split(" in")[0].split(" → ")
    assert float(after) < float(before)
    assert not list(tmp_path.iterdir())


def _no_kernel(patch):
    patch.setattr(sys, "executable", "another-python")


def _no_memory(patch):
    import psutil

    patch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 0.4e9}))


def _no_disk(patch):
    import shutil

    patch.setattr(shutil, "disk_usage", lambda path: type("Disk", (), {"free": 0.1e9}))


def _no_package(patch):
    patch.setitem(sys.modules, "nbconvert", None)


def _no_letters(patch):
    import matplotlib

    patch.setitem(matplotlib.rcParams, "font.sans-serif", ["cmr10"])
    patch.setitem(matplotlib.rcParams, "font.family", ["cmr10"])


def _no_training(patch):
    from nanlab import trainers

    patch.setattr(trainers.TPOTrainer, "evaluate", lambda self: {"eval_loss": float("nan")})


def _no_locate(patch):
    import nanlab

    patch.setattr(nanlab, "locate", lambda step: type("Report", (), {"cause": "unknown"}), raising=False)


TROUBLES = {
    "kernel": (_no_kernel, "ipykernel install --sys-prefix"),
    "memory": (_no_memory, "0.4 GB of memory are free"),
    "disk": (_no_disk, "0.1 GB of disk are free"),
    "imports": (_no_package, "pip install nbconvert"),
    "plots": (_no_letters, "pip install --force-reinstall matplotlib"),
    "training": (_no_training, "should be finite and fall"),
    "locate": (_no_locate, "was called 'unknown'"),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_check_all_names_what_is_wrong_and_goes_on(name, monkeypatch, capsys):
    from nanlab.course import room

    spoil, words = TROUBLES[name]
    spoil(monkeypatch)
    monkeypatch.setattr(room, "CHECKS", {name: room.CHECKS[name], "last": lambda: "came here"})
    assert cli.main(["check", "--all"]) == 1
    lines = room_lines(capsys)
    assert lines[name].startswith("FAIL")
    assert words in lines[name]
    assert lines["last"] == "ok    last          came here"


BAD = {
    "no command": [],
    "unknown command": ["chekc"],
    "unknown option": ["check", "--colour"],
    "no tokenizer": ["preflight", "{rows}"],
    "no number": ["preflight", "{rows}", "--tokenizer", "{tokenizer}", "--max-length", "many"],
    "bad length": ["preflight", "{rows}", "--tokenizer", "{tokenizer}", "--max-length", "0"],
    "unknown tokenizer": ["preflight", "{rows}", "--tokenizer", "{folder}/nothing"],
    "unknown model": ["preflight", "{rows}", "--tokenizer", "{tokenizer}", "--model", "{folder}/nothing"],
    "missing rows": ["preflight", "{folder}/nothing.json", "--tokenizer", "{tokenizer}"],
    "unknown kind": ["preflight", "{text}", "--tokenizer", "{tokenizer}"],
    "not JSON": ["preflight", "{broken}", "--tokenizer", "{tokenizer}"],
    "not a list": ["preflight", "{object}", "--tokenizer", "{tokenizer}"],
    "not Parquet": ["preflight", "{parquet}", "--tokenizer", "{tokenizer}"],
    "not UTF-8": ["preflight", "{latin}", "--tokenizer", "{tokenizer}"],
    "missing run": ["autopsy", "{folder}/nothing"],
    "empty folder": ["autopsy", "{folder}"],
    "not a log": ["autopsy", "{text}"],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_on_stderr_and_status_2(name, put, tokenizer_dir, tmp_path, capsys):
    (tmp_path / "latin.json").write_bytes('["é"]'.encode("latin-1"))
    places = {
        "folder": str(tmp_path),
        "tokenizer": tokenizer_dir,
        "rows": put("rows.json", ROWS),
        "text": put("notes.txt", "hello"),
        "broken": put("broken.jsonl", '{"prompt": "a"}\n{"prompt"'),
        "object": put("object.json", {"a": 1}),
        "parquet": put("rows.parquet", "hello"),
        "latin": str(tmp_path / "latin.json"),
    }
    assert cli.main([argument.format(**places) for argument in BAD[name]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nanlab: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_a_broken_line_is_named(put, tokenizer_dir, capsys):
    file = put("broken.jsonl", '{"prompt": "a"}\n\n{"prompt"')
    cli.main(["preflight", file, "--tokenizer", tokenizer_dir])
    assert "broken.jsonl, line 3: not JSON" in capsys.readouterr().err


def in_a_shell(*arguments):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=clean, timeout=120, check=False)


def test_the_shell_sees_the_same(put, tokenizer_dir, tmp_path):
    bad = in_a_shell("-m", "nanlab.cli", "preflight", put("r.json", ROWS), "--tokenizer", str(tmp_path / "nothing"))
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    found = in_a_shell("-m", "nanlab.cli", "autopsy", put("dead.json", DEAD))
    assert (found.returncode, found.stderr) == (1, "")


def test_help_loads_no_heavy_library():
    code = "import sys, nanlab.cli as c\ntry: c.main(['--help'])\nexcept SystemExit as e: assert e.code == 0\n"
    code += (
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'numpy', 'matplotlib'} & set(sys.modules)\nprint(heavy)"
    )
    done = in_a_shell("-c", code)
    assert done.stderr == ""
    for command in cli.COMMANDS:
        assert command.name in done.stdout
    assert done.stdout.endswith("set()\n")


def test_autopsy_loads_neither_torch_nor_matplotlib(put):
    code = f"import sys, nanlab.cli as c\nc.main(['autopsy', {put('good.json', LOG)!r}])\n"
    code += "print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    assert in_a_shell("-c", code).stdout.endswith("set()\n")


def test_a_message_of_several_lines_is_told_on_one(monkeypatch, capsys):
    from nanlab.errors import InputError

    def fail(args):
        raise InputError("first\n  second")

    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("fail", "fails", (), fail),))
    assert cli.main(["fail"]) == 2
    assert capsys.readouterr().err == "nanlab: first second\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("nanlab ")
