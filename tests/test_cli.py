"""The command line: exit status, one line for bad input, text and JSON."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

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
    marked = put("marked.jsonl", "\ufeff" + "\n".join(map(json.dumps, faulty)))  # a byte order mark
    misnamed = put("lines.json", "\n".join(map(json.dumps, faulty)))
    files = (lines, put("rows.json", faulty), str(tmp_path / "rows.parquet"), marked, misnamed)
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


def damaged_model(folder, damage):
    """A small model as saved, changed by `damage(config, weights)`, beside a tokenizer without its table of tokens."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    weights = folder / "model.safetensors"
    changed, cut = damage(json.loads((folder / "config.json").read_text()), weights.read_bytes())
    (folder / "config.json").write_text(json.dumps(changed))
    weights.write_bytes(cut)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return str(folder)


BAD = {
    "no command": [],
    "unknown command": ["chekc"],
    "unknown option": ["check", "--colour"],
    "no tokenizer": ["preflight", "{rows}"],
    "no number": ["preflight", "{rows}", "--tokenizer", "{tokenizer}", "--max-length", "many"],
    "bad length": ["preflight", "{rows}", "--tokenizer", "{tokenizer}", "--max-length", "0"],
    "unknown tokenizer": ["preflight", "{rows}", "--tokenizer", "{folder}/nothing"],
    "semicolons": ["preflight", "{semicolons}", "--tokenizer", "{tokenizer}"],
    "tabs": ["preflight", "{tabs}", "--tokenizer", "{tokenizer}"],
    "unknown model": ["preflight", "{rows}", "--tokenizer", "{tokenizer}", "--model", "{folder}/nothing"],
    "missing rows": ["preflight", "{folder}/nothing.json", "--tokenizer", "{tokenizer}"],
    "unknown kind": ["preflight", "{text}", "--tokenizer", "{tokenizer}"],
    "not JSON": ["preflight", "{broken}", "--tokenizer", "{tokenizer}"],
    "not a list": ["preflight", "{object}", "--tokenizer", "{tokenizer}"],
    "not Parquet": ["preflight", "{parquet}", "--tokenizer", "{tokenizer}"],
    "not UTF-8": ["preflight", "{latin}", "--tokenizer", "{tokenizer}"],
    "a folder": ["preflight", "{folder}", "--tokenizer", "{tokenizer}"],
    "a long name": ["preflight", "{folder}/" + "x" * 300 + ".json", "--tokenizer", "{tokenizer}"],
    "deep": ["preflight", "{deep}", "--tokenizer", "{tokenizer}"],
    "deep lines": ["preflight", "{deep}l", "--tokenizer", "{tokenizer}"],
    "a long number": ["preflight", "{number}", "--tokenizer", "{tokenizer}"],
    "no rows": ["preflight", "{empty}", "--tokenizer", "{tokenizer}"],
    "cut model": ["preflight", "{rows}", "--tokenizer", "{tokenizer}", "--model", "{cut}"],
    "odd model": ["preflight", "{rows}", "--tokenizer", "{tokenizer}", "--model", "{odd}"],
    "odd tokenizer": ["preflight", "{rows}", "--tokenizer", "{odd}"],
    "long run name": ["autopsy", "x" * 300],
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
        "semicolons": put("semicolons.csv", "prompt;chosen;rejected\na, b;c;d\n"),
        "tabs": put("tabs.csv", "prompt\tchosen\trejected\na\tb\tc\n"),
        "deep": put("deep.json", "[" * 100_000),
        "deepl": put("deep.jsonl", "[" * 100_000),
        "number": put("number.jsonl", '{"prompt": "a", "reward": ' + "9" * 5000 + "}"),
        "empty": put("empty.jsonl", ""),
        "cut": damaged_model(tmp_path / "cut", lambda config, weights: (config, weights[:500])),
        "odd": damaged_model(tmp_path / "odd", lambda config, weights: ({**config, "hidden_size": "x"}, weights)),
    }
    capsys.readouterr()  # saving a model draws a progress bar where another test has turned them on
    assert cli.main([argument.format(**places) for argument in BAD[name]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nanlab: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("semicolons.csv", ["preflight", "{file}", "--tokenizer", "{tokenizer}"], "a semicolon stands between"),
        (
            "rows.json",
            ["preflight", "{file}", "--tokenizer", "./nothing"],
            "'./nothing': no such folder, and no hub id",
        ),
        ("rows.json", ["preflight", "{file}", "--tokenizer", "tiny"], "a model of the course and a folder here"),
        ("rows.json", ["run", "--method", "dpo", "--model", "tiny"], "write ./tiny if you mean the folder"),
        (
            "asked.json",
            ["preflight", "{file}", "--tokenizer", "{tokenizer}"],
            "found question; wanted e.g. prompt, chosen",
        ),
    ],
)
def test_bad_input_is_told_what_to_do(name, arguments, words, put, tokenizer_dir, tmp_path, capsys, monkeypatch):
    contents = {"semicolons.csv": "prompt;chosen\na;b\n", "rows.json": ROWS, "asked.json": [{"question": "why?"}]}
    file = put(name, contents[name])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert cli.main([argument.format(file=file, tokenizer=tokenizer_dir) for argument in arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_model_is_loaded_without_a_word_on_stderr(put, tokenizer_dir, tmp_path):
    folder = damaged_model(tmp_path / "whole", lambda config, weights: (config, weights))
    rows, command = put("rows.json", ROWS), [sys.executable, "-m", "nanlab", "preflight"]
    done = subprocess.run(
        [*command, rows, "--tokenizer", tokenizer_dir, "--model", folder], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")  # its vocabulary is too small


def test_a_broken_line_is_named(put, tokenizer_dir, capsys):
    file = put("broken.jsonl", '{"prompt": "a"}\n\n{"prompt"')
    cli.main(["preflight", file, "--tokenizer", tokenizer_dir])
    assert "broken.jsonl, line 3: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": ' + "9" * 5000 + "}", "line 2: a number that cannot be read (Exceeds the limit"),
        ('{"prompt": "a"}\n' + "[" * 100_000, "line 2: brackets nested too deeply to be read"),
        ("\n\n", "odd.jsonl: holds no rows"),
        ('{"prompt": "a"}\n\n3\n', "odd.jsonl, line 3: expected a row as {column: value}, got int"),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_line(content, words, put, tokenizer_dir, capsys):
    assert cli.main(["preflight", put("odd.jsonl", content), "--tokenizer", tokenizer_dir]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("labels", "rows"), [(["True", "False", ""], {"bad_label": [2]}), (["1", "1"], {"one_class_labels": [0, 1]})]
)
def test_csv_rows_have_labels_that_are_true_or_false(labels, rows, put, tokenizer_dir, capsys):
    file = put("rows.csv", "\n".join(["prompt,completion,label", *[f"2,4,{label}" for label in labels]]))
    assert cli.main(["preflight", file, "--tokenizer", tokenizer_dir, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["findings"]
    assert {finding["code"]: finding["rows"] for finding in told} == rows


def test_csv_rows_have_rewards_in_numbers(put, tokenizer_dir, capsys):
    lines = ["prompt,completion,reward,group", "2,4,0.5,a", '"two\nlines",4,1,a', "1,,0.5,b", "1,2,much,b"]
    arguments = ["preflight", put("rows.csv", "\ufeff" + "\n".join(lines)), "--tokenizer", tokenizer_dir, "--json"]
    assert cli.main(arguments) == 1
    told = json.loads(capsys.readouterr().out)["findings"]
    assert {finding["code"]: finding["rows"] for finding in told} == {"empty_text": [2], "bad_reward": [3]}


def test_prompts_alone_are_looked_at(put, tokenizer_dir, capsys):
    rows = [{"prompt": "two", "label": 1}, {"prompt": "two " * 50}]
    file = put("prompts.json", rows)
    assert cli.main(["preflight", file, "--tokenizer", tokenizer_dir, "--max-length", "32", "--json"]) == 1
    assert [f["code"] for f in json.loads(capsys.readouterr().out)["findings"]] == ["truncated_away"]


def piped(reader, *arguments, **environment):
    """Exit status and stderr of a command whose output goes to `reader`, a line of shell."""
    command = f'"$@" {reader}; exit ${{PIPESTATUS[0]}}'
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | environment
    shell = ["bash", "-c", command, "bash", sys.executable, "-m", "nanlab", *arguments]
    return subprocess.run(shell, capture_output=True, text=True, env=clean, timeout=120, check=False)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_output_that_nobody_takes_is_no_traceback(put):
    commands = (["check"], ["autopsy", put("dead.json", DEAD)], ["--help"])
    for command in commands:
        gone = piped("| true", *command)
        assert (gone.returncode in (0, 1, 141), gone.stderr) == (True, "")
        full = piped("> /dev/full", *command)
        assert full.returncode == 2
        assert "No space left" in full.stderr.splitlines()[0]
        assert "Traceback" not in full.stderr
        assert "Exception ignored" not in full.stderr


def test_a_reader_that_leaves_ends_the_command_as_any_other(put):
    """Many findings, more than a pipe holds back."""
    lost = [{"step": n, "loss": 1.0, f"eval_{'long' * 20_000}": float("nan")} for n in range(1, 9)]
    left = piped("| head -c 1", "autopsy", put("lost.json", lost))
    assert (left.returncode, left.stderr, left.stdout) == (141, "", "1")


def test_a_terminal_without_utf8_gets_every_character_in_some_form(put):
    odd = put("odd.json", [{"step": 1, "loss": 1.0, "eval_\ud800": float("nan")}])
    for encoding in ("ascii", "latin-1", "utf-8"):
        told = piped("", "autopsy", odd, PYTHONIOENCODING=encoding)
        assert (told.returncode, told.stderr) == (1, "")
        assert "eval_\\ud800" in told.stdout
        data = piped("", "autopsy", odd, "--json", PYTHONIOENCODING=encoding)
        assert "eval_\ud800" in json.loads(data.stdout)["findings"][0]["message"]


def test_what_the_system_refuses_is_one_line(monkeypatch, capsys):
    def fail(args):
        os.listdir("/nothing/here")

    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("fail", "fails", (), fail),))
    assert cli.main(["fail"]) == 2
    assert capsys.readouterr().err == "nanlab: /nothing/here: No such file or directory\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_ctrl_c_ends_any_command_with_one_line(tmp_path):
    """The file is a pipe: once it can be opened for writing, the command is reading from it."""
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from nanlab.cli import main; sys.exit(main(sys.argv[1:]))"
    for command in (["preflight", str(pipe), "--tokenizer", "tiny"], ["autopsy", str(pipe)]):
        start = [sys.executable, "-c", code, *command]
        with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            writer = None
            while writer is None and run.poll() is None:
                with contextlib.suppress(OSError):
                    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                time.sleep(0.02)
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=120)
        os.close(writer)
        assert (run.returncode, out, err) == (130, "", "nanlab: stopped\n")


def test_ctrl_c_during_a_check_keeps_the_lines_that_were_told(monkeypatch, capsys):
    def stop(everything):
        yield cli.Line("first", "told")
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_lines", stop)
    assert cli.main(["check", "--all"]) == 130
    assert capsys.readouterr() == ("ok    first         told\n", "nanlab: stopped\n")


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
