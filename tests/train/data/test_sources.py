"""All kinds of sources give the same records; damage is reported with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import DataSource
from dslaunch.train.data import json_array
from dslaunch.train.data.sources import iterate_records

ROWS = [{"prompt": f"p{i}", "completion": "ä 🎉\n" * i} for i in range(5)]


def read(path: Path, kind: Any = "file", split: str = "train") -> list[Any]:
    return [r.value for r in iterate_records(DataSource(path=str(path), kind=kind, split=split))]


def jsonl(rows: list[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def test_json_lines_with_bom_crlf_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + jsonl(ROWS).replace("\n", "\r\n\r\n").rstrip().encode())
    assert read(path) == ROWS
    assert [r.where for r in iterate_records(DataSource(path=str(path), kind="file"))][:2] == [
        f"{path}:1",
        f"{path}:3",
    ]


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl(ROWS).encode()))
    assert read(path) == ROWS


def test_truncated_gzip_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl(ROWS * 1000).encode())[:-20])
    with pytest.raises(ConfigError, match="cannot be read"):
        read(path)


@pytest.mark.parametrize("indent", [None, 2])
def test_json_array_with_line_numbers(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps(ROWS, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert read(path) == ROWS
    wheres = [r.where for r in iterate_records(DataSource(path=str(path), kind="file"))]
    assert wheres == [f"{path}:{1 if indent is None else 2 + 4 * i} record {i + 1}" for i in range(5)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_json_array_cut_anywhere_by_the_reading_window(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_CHUNK_BYTES", chunk)
    values = [*ROWS, 12.5e-3, -1234567, True, None, 'é\\u00e9 " ] ,', [], [[1], {"a": {}}], 0]
    path = tmp_path / "d.json"
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    assert read(path) == values


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_the_column_does_not_depend_on_the_reading_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(json_array, "_CHUNK_BYTES", chunk)
    path = tmp_path / "d.json"
    path.write_text('[{"a": 1}, {"a": 2},\n  {"\u00e4": 3}, {"a": x}]')
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.message.startswith(f"{path}:2:19: not a JSON array of records: Expecting value")


def test_json_array_in_memory_of_one_element(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "d.json"
    with open(path, "w", encoding="utf-8") as stream:
        stream.write("[" + ",\n".join(json.dumps({"text": "x" * 1000}) for _ in range(20_000)) + "]")
    tracemalloc.start()
    count = sum(1 for _ in iterate_records(DataSource(path=str(path), kind="file")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000
    assert peak < path.stat().st_size / 2


def test_empty_array(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(" [ ] \n")
    assert read(tmp_path / "d.json") == []


def test_json_lines_in_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(jsonl(ROWS), encoding="utf-8")
    assert read(path) == ROWS


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[\n{"a": 1},\n{"a": }\n]', "d.json:3:7: not a JSON array of records: Expecting value"),
        ('[\n{"a": 1}\n{"a": 2}]', "d.json:3:1: not a JSON array of records: expected ',', found '{'"),
        ('[{"a": 1},', "d.json:1:11: not a JSON array of records: Expecting value"),
        ('[{"a": 1}', "d.json:1:10: not a JSON array of records: expected ',', found the end of the file"),
        ('[{"a": 1}]\nmore', "d.json:2:1: not a JSON array of records: text after the end of the array"),
        ('[\n"ab\ncd"]', "d.json:2:4: not a JSON array of records: Invalid control character"),
        ('{\n"rows": []\n}', "d.json is neither a JSON array of records nor one JSON object a line"),
        ("", "d.json is neither"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_json_arrays(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert problem in caught.value.message


def test_a_broken_line_is_reported_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": \n\xff\xfe\n' + b"[" * 100_000 + b'\n{"text": "b"}\n')
    records = list(iterate_records(DataSource(path=str(path), kind="file")))
    assert [r.value for r in records] == [{"text": "a"}, None, None, None, {"text": "b"}]
    problems = [r.error.message for r in records if r.error]
    assert problems[0].startswith(f"{path}:2:10: not valid JSON: Expecting value")
    assert problems[1] == f"{path}:3: not UTF-8 text (byte 1 of the line is 0xff)"
    assert problems[2].startswith(f"{path}:4: ")


def nested_rows() -> list[dict[str, Any]]:
    def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]}

    return [{"messages": [call("f", {"a": 1})]}, {"messages": [call("g", {"b": "x"})]}]


def test_parquet_has_row_numbers_and_no_filled_arguments(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(nested_rows()), path)
    records = list(iterate_records(DataSource(path=str(path), kind="file")))
    assert [r.value for r in records] == nested_rows()
    assert records[1].where == f"{path} row 2"


def test_damaged_parquet(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="not readable parquet"):
        read(tmp_path / "d.parquet")


def test_saved_dataset_with_and_without_splits(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(nested_rows())
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "held_out": data.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert read(tmp_path / "one", "directory") == nested_rows()
    assert read(tmp_path / "two", "directory", "held_out") == nested_rows()[1:]
    with pytest.raises(ConfigError, match="has no split 'test'") as caught:
        read(tmp_path / "two", "directory", "test")
    assert caught.value.hint == "it has train, held_out"


def test_directory_of_data_files(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(jsonl(ROWS), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text(jsonl(ROWS[:1]), encoding="utf-8")
    assert read(tmp_path, "directory") == ROWS
    assert read(tmp_path, "directory", "test") == ROWS[:1]
    with pytest.raises(ConfigError, match="split 'dev'"):
        read(tmp_path, "directory", "dev")


def test_a_broken_file_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(jsonl(ROWS) + '{"prompt": \n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"\[train\] cannot be read after row"):
        read(tmp_path, "directory")


@pytest.mark.parametrize("name", ["missing.jsonl", "data.csv"])
def test_files_that_cannot_be_sources(tmp_path: Path, name: str) -> None:
    (tmp_path / "data.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=name):
        read(tmp_path / name)


def test_a_hub_id_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dslaunch.core.errors import DslaunchError

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(DslaunchError, match="nobody/nothing"):
        list(iterate_records(DataSource(path="nobody/nothing", kind="hub")))
