"""Batches in parquet files: rows are lines, whatever the size of the row groups, and
a wrong file is refused first.
"""

import json

import pytest
from batch_fakes import URL, request
from fake_llm import FakeLLM

from jaxflow.config import ConfigError
from serving.batch import parquet
from serving.batch.input_file import FileLimits, InvalidInput
from serving.batch.parquet import json_lines, write_parquet
from serving.batch_command import Options, answer_file
from serving.batch_engine import LocalEngine

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")


def write(path, rows: list[dict], **options):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def rows_of(count: int) -> list[dict]:
    return [request(i) | {"body": json.dumps(request(i)["body"], indent=2)} for i in range(count)]


def read_lines(path, **options) -> list[dict]:
    with json_lines(path, **options) as lines:
        assert lines != path
        found = [json.loads(each) for each in lines.read_text("utf-8").splitlines()]
    assert not lines.exists()
    return found


@pytest.mark.parametrize("group", [1, 7, 1000])
def test_rows_are_lines(tmp_path, monkeypatch, group):
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 4)
    path = write(tmp_path / "in.parquet", rows_of(23), row_group_size=group)
    assert read_lines(path) == [request(i) for i in range(23)]


def test_a_struct_is_a_body_without_its_nulls(tmp_path):
    rows = [
        {"custom_id": "a", "url": URL, "body": {"prompt": "p", "stop": None, "options": {"x": None, "y": 1}}},
        {"custom_id": "b", "url": URL, "body": {"prompt": "q", "stop": ["z"], "options": None}},
    ]
    found = read_lines(write(tmp_path / "in.parquet", rows))
    assert [each["body"] for each in found] == [
        {"prompt": "p", "options": {"y": 1}},
        {"prompt": "q", "stop": ["z"]},
    ]
    assert {each["method"] for each in found} == {"POST"}


@pytest.mark.parametrize("missing", ["custom_id", "url", "body"])
def test_a_file_without_a_column_is_refused(tmp_path, missing):
    rows = [{name: value for name, value in row.items() if name != missing} for row in rows_of(2)]
    path = write(tmp_path / "in.parquet", rows)
    with pytest.raises(ConfigError) as error, json_lines(path):
        pass
    assert error.value.field == "input_file" and str(path) in str(error.value)
    assert missing in str(error.value) and "method" in str(error.value)


def test_a_column_of_another_type_is_refused(tmp_path):
    path = write(tmp_path / "in.parquet", [row | {"custom_id": i} for i, row in enumerate(rows_of(2))])
    with pytest.raises(ConfigError, match="custom_id") as error, json_lines(path):
        pass
    assert "int64" in str(error.value) and "string" in str(error.value)


def test_wrong_bodies_are_named_by_row(tmp_path):
    rows = rows_of(5)
    rows[1]["body"], rows[4]["body"] = "{", "{} {}"
    with pytest.raises(InvalidInput) as error, json_lines(write(tmp_path / "in.parquet", rows)):
        pass
    assert [each.line for each in error.value.errors] == [2, 5]


@pytest.mark.parametrize("limits", [FileLimits(lines=4), FileLimits(file_bytes=100)])
def test_the_limits_of_a_file_hold(tmp_path, limits):
    with pytest.raises(InvalidInput), json_lines(write(tmp_path / "in.parquet", rows_of(5)), limits):
        pass


def test_a_file_that_is_not_parquet_is_refused(tmp_path):
    (tmp_path / "in.parquet").write_text("{}")
    with pytest.raises(ConfigError, match="input_file"), json_lines(tmp_path / "in.parquet"):
        pass


def test_a_failed_write_leaves_no_file(tmp_path):
    def outputs():
        response = b'{"status_code": 200, "request_id": "c", "body": {}}'
        yield b'{"id": "a", "custom_id": "b", "response": ' + response + b"}"
        raise OSError("the journal is gone")

    with pytest.raises(OSError, match="gone"):
        write_parquet(outputs(), tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []


def never():
    raise AssertionError("the model is loaded")


def test_parquet_and_json_lines_give_the_same_answers_and_share_a_journal(tmp_path, capsys):
    requests = [request(i, max_tokens=3, seed=i) for i in range(30)]
    for each in requests:
        each["body"]["prompt"] = [5, 6, 7]
    (tmp_path / "in.jsonl").write_bytes(
        b"".join(json.dumps(each, separators=(",", ":")).encode() + b"\n" for each in requests)
    )
    rows = [each | {"body": json.dumps(each["body"])} for each in requests]
    write(tmp_path / "in.parquet", rows)

    def run(source: str, output: str, load=lambda: LocalEngine(FakeLLM())) -> int:
        options = Options(
            tmp_path / source,
            tmp_path / output,
            "fake",
            journal=tmp_path / f"{source}.journal",
            progress=False,
        )
        return answer_file(options, load)

    assert run("in.jsonl", "lines.jsonl") == 0
    assert run("in.parquet", "out.parquet") == 0
    assert run("in.parquet", "again.jsonl", never) == 0
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    lines = [json.loads(each) for each in (tmp_path / "lines.jsonl").read_text().splitlines()]
    again = [json.loads(each) for each in (tmp_path / "again.jsonl").read_text().splitlines()]
    for row, line, other in zip(table, lines, again, strict=True):
        assert row["custom_id"] == line["custom_id"] == other["custom_id"]
        assert row["status_code"] == line["response"]["status_code"] == 200
        assert json.loads(row["body"]) == other["response"]["body"]
        assert json.loads(row["body"])["choices"] == line["response"]["body"]["choices"]
        assert (row["id"], row["request_id"]) == (other["id"], other["response"]["request_id"])
    write(tmp_path / "in.parquet", rows[:-1])
    assert run("in.parquet", "out.parquet", never) == 1
    assert "another input file" in capsys.readouterr().err
