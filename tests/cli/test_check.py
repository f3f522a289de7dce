"""dslaunch check from the command line: output, exit codes, --fix, --against."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.main import main
from tests.config.check.test_mistakes import GOOD

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    write("good.json", GOOD)
    write("warned.json", GOOD | {"zero_optimization": {"stage": 2, "sub_group_size": 1}})
    write("wrong.json", GOOD | {"gradient_clipp1ng": 1.0})
    return tmp_path


def write(name: str, config: dict[str, Any]) -> None:
    Path(name).write_text(json.dumps(config, indent=2) + "\n")


def test_exit_codes(capsys: Capture) -> None:
    assert main(["check", "good.json"]) == 0
    assert main(["check", "warned.json"]) == 0
    assert main(["check", "warned.json", "--strict"]) == 1
    assert main(["check", "good.json", "wrong.json"]) == 1
    Path("broken.json").write_text("{")
    assert main(["check", "broken.json", "wrong.json"]) == 2


def test_a_line_names_file_place_severity_and_code(capsys: Capture) -> None:
    assert main(["check", "wrong.json"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == (
        "wrong.json:17:3: error: gradient_clipp1ng: is no key of DeepSpeed;"
        " DeepSpeed ignores it without a word [unknown-key]"
    )
    assert out.splitlines()[1] == "    hint: did you mean gradient_clipping?"
    assert "1 error" in err


def test_the_json_of_a_program(capsys: Capture) -> None:
    assert main(["check", "wrong.json", "good.json", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["schema_version"] == 1
    assert [(file["path"], file["kind"]) for file in report["files"]] == [
        ("wrong.json", "deepspeed-config"),
        ("good.json", "deepspeed-config"),
    ]
    (finding,) = report["files"][0]["findings"]
    assert set(finding) == {"code", "severity", "key", "line", "column", "message", "hint", "fix"}
    assert (finding["key"], finding["line"]) == ("gradient_clipp1ng", 17)
    assert report["files"][1]["findings"] == []


def test_stdin(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    data = io.TextIOWrapper(io.BytesIO(Path("wrong.json").read_bytes()))
    monkeypatch.setattr("sys.stdin", data)
    assert main(["check", "-"]) == 1
    assert capsys.readouterr().out.startswith("<stdin>:17:3: error")


def test_a_path_that_is_not_there(capsys: Capture) -> None:
    Path("playground").mkdir()
    Path("playground/z2.json").write_text("{}")
    assert main(["check", "playgroundd/z2.json", "good.json"]) == 2
    out = capsys.readouterr().out
    assert "playgroundd/z2.json: error: not found" in out
    assert "did you mean playground/z2.json?" in out


def test_flags_are_the_target(capsys: Capture) -> None:
    write("batch.json", GOOD | {"train_batch_size": 10})
    assert main(["check", "batch.json", "--world-size", "10"]) == 0
    assert main(["check", "batch.json", "--world-size", "4"]) == 1
    assert main(["check", "good.json", "--gpu", "v100", "--strict"]) == 1
    assert main(["check", "good.json", "--gpu", "v1000"]) == 2
    write("auto.json", GOOD | {"train_micro_batch_size_per_gpu": "auto"})
    assert main(["check", "auto.json"]) == 1
    assert main(["check", "auto.json", "--for", "hf-trainer"]) == 0
    capsys.readouterr()
    assert main(["check", "good.json", "--deepspeed-version", "0.99.0"]) == 0
    assert "[unknown-version]" in capsys.readouterr().out
    assert main(["check", "good.json", "--deepspeed-version", "newest"]) == 2
    assert "--deepspeed-version 'newest' is no version" in capsys.readouterr().err


def test_lenient_lets_pass_what_deepspeed_ignores(capsys: Capture) -> None:
    write("ours.json", GOOD | {"our_own_key": 1})
    assert main(["check", "ours.json"]) == 1
    assert ": error: our_own_key: is no key of DeepSpeed" in capsys.readouterr().out
    assert main(["check", "ours.json", "--lenient"]) == 0
    assert ": warning: our_own_key: is no key of DeepSpeed" in capsys.readouterr().out
    assert main(["check", "ours.json", "--lenient", "--strict"]) == 1
    write("stops.json", GOOD | {"zero_optimization": {"stage": 2, "our_own_key": 1}})
    assert main(["check", "stops.json", "--lenient"]) == 1, "DeepSpeed refuses it"
    Path("run.yaml").write_text("model: m\ndeepspeed: {our_own_key: 1}\n")
    assert main(["check", "run.yaml", "--lenient"]) == 1
    assert "our_own_key" in capsys.readouterr().out


def test_fix_writes_a_new_file(capsys: Capture) -> None:
    write(
        "old.json", {k: v for k, v in GOOD.items() if k != "gradient_clipping"} | {"gradient_clipp1ng": 0.5}
    )
    assert main(["check", "old.json", "--fix", "-o", "new.json"]) == 0
    assert "wrote new.json\n" in capsys.readouterr().err
    assert json.loads(Path("new.json").read_text())["gradient_clipping"] == 0.5
    assert "gradient_clipp1ng" in Path("old.json").read_text()
    assert main(["check", "old.json", "--fix", "-o", "new.json"]) == 2, "-o replaces nothing without --force"
    assert main(["check", "old.json", "--fix", "-o", "new.json", "--force"]) == 0
    capsys.readouterr()
    assert main(["check", "old.json", "--fix", "-o", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["gradient_clipping"] == 0.5
    assert "wrote" not in err


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("data.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n', "data (JSON lines)"),
        ("one.jsonl", '{"prompt": "a"}\n', "data (JSON lines)"),
        ("lines.json", '{"prompt": "a"}\n{"prompt": "b"}\n', "data (JSON lines)"),
        ("array.json", '[{"prompt": "a"}]', "data (a JSON array)"),
    ],
)
def test_training_data_is_called_so(capsys: Capture, name: str, text: str, what: str) -> None:
    Path(name).write_text(text)
    assert main(["check", name]) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: error: this is {what}, not a config [unknown-kind]\n")
    assert "data.train" in out


def test_a_broken_config_is_no_data(capsys: Capture) -> None:
    Path("broken.json").write_text('{"train_batch_size": 8}\n}')
    assert main(["check", "broken.json"]) == 2
    assert "this is data" not in capsys.readouterr().out


def test_fix_in_place_exits_by_what_remains(capsys: Capture) -> None:
    write("two.json", GOOD | {"zero_optimization": {"stage": 2, "sub_group_size": 1}, "what_is_this": 1})
    assert main(["check", "two.json", "--fix", "--in-place"]) == 1
    out = capsys.readouterr().out
    assert "what_is_this" in out and "sub_group_size" not in out
    assert "sub_group_size" not in Path("two.json").read_text()


def test_fix_in_place_leaves_a_right_file_alone(capsys: Capture) -> None:
    before = Path("good.json").stat()
    assert main(["check", "good.json", "--fix", "--in-place"]) == 0
    after = Path("good.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_diff_shows_and_writes_nothing(capsys: Capture) -> None:
    before = Path("warned.json").read_text()
    assert main(["check", "warned.json", "--diff"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("--- warned.json\n") and '\n-    "sub_group_size": 1' in out
    assert Path("warned.json").read_text() == before


@pytest.mark.parametrize(
    "flags",
    [
        ["--fix"],
        ["-o", "x.json"],
        ["--in-place"],
        ["--fix", "-o", "x", "--in-place"],
        ["--fix", "--against", "good.json"],
    ],
)
def test_flags_that_make_no_sense(flags: list[str], capsys: Capture) -> None:
    assert main(["check", "good.json", *flags]) == 2


def test_against_another_config(capsys: Capture) -> None:
    write("same.json", GOOD | {"gradient_clipping": 1, "wall_clock_breakdown": False})
    assert main(["check", "good.json", "--against", "same.json"]) == 0
    assert main(["check", "good.json", "--against", "warned.json"]) == 1
    assert (
        "zero_optimization.sub_group_size: 1000000000 in good.json, 1 in warned.json"
        in capsys.readouterr().out
    )
    assert main(["check", "good.json", "--against", "warned.json", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["differences"] == [{"key": "zero_optimization.sub_group_size", "a": 1000000000, "b": 1}]
    assert main(["check", "good.json", "--against", "none.json"]) == 2


def test_names_with_anything_in_them(capsys: Capture) -> None:
    name = "a b;$(x)\n'ü.json"
    write(name, GOOD)
    assert main(["check", name]) == 0


def test_a_directory_among_files(capsys: Capture) -> None:
    assert main(["check", ".", "good.json", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert [[f["code"] for f in file["findings"]] for file in report["files"]] == [["not-read"], []]


def test_what_has_no_end_is_not_read(capsys: Capture) -> None:
    assert [main([command, "/dev/zero"]) for command in ("check", "plan", "gen-config")] == [2, 2, 2]
    said = "".join(capsys.readouterr())
    assert said.count("cannot read run file /dev/zero: it has more than 16 MiB") == 2
    assert said.count("/dev/zero: error: cannot be read: it has more than 16 MiB") == 1
    assert said.count("hint: name a text of the usual size: data, logs and weights are not read here") == 3


def test_a_name_with_nul_is_an_error_of_the_file(capsys: Capture) -> None:
    Path("nul.yaml").write_text('model: {path: "a\\0b"}\ndata: {train: "b.jsonl"}\n')
    assert [main([command, "nul.yaml"]) for command in ("check", "plan")] == [1, 2]
    assert "".join(capsys.readouterr()).count("nul.yaml:1: model.path holds a NUL character (\\0)") == 1
    Path("pipe.yaml").write_text('model: {path: "a/b"}\ndata: {train: "pipe.jsonl"}\n')
    os.mkfifo("pipe.jsonl")
    assert main(["check", "pipe.yaml"]) == 1
    assert "pipe.jsonl is no regular file" in capsys.readouterr().out


def test_fix_with_diff_exits_by_what_would_remain(capsys: Capture) -> None:
    write(
        "old.json", {k: v for k, v in GOOD.items() if k != "gradient_clipping"} | {"gradient_clipp1ng": 0.5}
    )
    before = Path("old.json").read_text()
    assert main(["check", "old.json", "--diff"]) == 1
    assert main(["check", "old.json", "--fix", "--diff"]) == 0
    assert Path("old.json").read_text() == before


def test_json_stays_alone_on_stdout(capsys: Capture) -> None:
    assert main(["check", "warned.json", "--fix", "--diff", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["files"][0]["findings"] == []
    assert err.count("--- warned.json") == 1


def test_a_diff_beside_the_mended_config_on_stdout(capsys: Capture) -> None:
    assert main(["check", "warned.json", "--fix", "--diff", "-o", "-"]) == 0
    out, err = capsys.readouterr()
    assert "sub_group_size" not in json.loads(out)["zero_optimization"]
    assert '-    "sub_group_size": 1' in err


def test_fix_writes_nothing_for_other_files(capsys: Capture) -> None:
    Path("hosts").write_text("a slots=8\n")
    assert main(["check", "hosts", "--fix", "-o", "new"]) == 2
    assert "hosts is a hostfile; nothing was written" in capsys.readouterr().err
    assert not Path("new").exists()
    assert main(["check", "hosts", "warned.json", "--fix", "--in-place"]) == 0
    assert Path("hosts").read_text() == "a slots=8\n"


def test_only_configs_are_compared(capsys: Capture) -> None:
    Path("hosts").write_text("a slots=8\n")
    Path("run.yaml").write_text("model: a/b\ndata: {train: x/y}\n")
    assert main(["check", "good.json", "--against", "hosts"]) == 2
    assert "this is a hostfile" in capsys.readouterr().err
    assert main(["check", "run.yaml", "--against", "good.json"]) == 2
    assert "gen-config" in capsys.readouterr().err


def test_stdin_is_read_once(capsys: Capture) -> None:
    assert main(["check", "-", "-"]) == 2
    assert main(["check", "-", "--against", "-"]) == 2
    assert main(["check", "-", "--fix", "--in-place"]) == 2


def test_a_batch_script(capsys: Capture) -> None:
    Path("job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun python t.py --node_rank $SLURM_NODEID\n")
    assert main(["check", "job.sh", "--json"]) == 1
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert file["kind"] == "batch-script"
    assert [(f["code"], f["line"]) for f in file["findings"]] == [("rank-too-early", 3)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("empty.yaml", "", "empty.yaml: error: is empty; a run file needs model and data"),
        ("data.yaml", '[{"a": 1}]', "data.yaml: error: this is data (a JSON array), not a run file"),
    ],
)
def test_the_name_of_a_file_is_said_once(capsys: Capture, name: str, text: str, said: str) -> None:
    Path(name).write_text(text)
    assert main(["check", name]) == 1
    assert capsys.readouterr().out.startswith(said)


def test_findings_after_fix_name_the_file_that_has_their_lines(capsys: Capture) -> None:
    text = '{\n\n\n\n"train_batch_size": 8,\n"wall_clock_breakdown": true,\n"zero_optimization":'
    text += ' {"stage": 2, "sub_group_size": 1}\n}'
    Path("old.json").write_text(text)
    for options, name in (
        (["-o", "new.json"], "new.json"),
        (["--diff"], "old.json (mended)"),
        (["--in-place"], "old.json"),
    ):
        assert main(["check", "old.json", "--fix", *options, "--json"]) == 0
        out = capsys.readouterr().out
        (file,) = json.loads(out)["files"]
        assert file["path"] == name
        assert [f["line"] for f in file["findings"] if f["key"] == "wall_clock_breakdown"] == [3]
    assert main(["check", "new.json", "--fix", "-o", "-"]) == 0
    assert "<stdout>:3:3: info: wall_clock_breakdown" in capsys.readouterr().err


def test_a_pattern_is_no_device_for_check(capsys: Capture) -> None:
    assert main(["check", "good.json", "--gpu", "node-[1-4]=a100,*=v100"]) == 2
    err = capsys.readouterr().err
    assert "check knows no hosts to match a pattern with" in err
    assert "name the devices alone, such as a100,v100" in err


def test_batch_hints_are_those_of_plan(capsys: Capture) -> None:
    sizes = {
        "train_batch_size": 100,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": None,
    }
    write("batch.json", GOOD | sizes)
    assert main(["check", "batch.json", "--world-size", "5"]) == 1
    out = capsys.readouterr().out
    assert (
        "use train_batch_size 80 (gradient_accumulation_steps 2) or 120 (gradient_accumulation_steps 3),"
        " or train_micro_batch_size_per_gpu 5 (gradient_accumulation_steps 4) or 10"
        " (gradient_accumulation_steps 2)"
    ) in out
    assert main(["check", "batch.json"]) == 1
    assert (
        "use train_batch_size 96 (world_size x gradient_accumulation_steps 12) or 104"
        in capsys.readouterr().out
    )
    write("three.json", GOOD | sizes | {"gradient_accumulation_steps": 5})
    assert main(["check", "three.json", "--world-size", "2"]) == 1
    assert (
        "use train_batch_size 80, or train_micro_batch_size_per_gpu 10, or leave one of the three out"
        in capsys.readouterr().out
    )
