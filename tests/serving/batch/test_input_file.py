"""The check of an input file: each refusal names its line, and what passes is read back as written."""

import json
import os

import pytest
from batch_fakes import check, opened, request, write_input
from hypothesis import given
from hypothesis import strategies as st

from serving.batch.input_file import MAX_ERRORS, FileLimits, InvalidInput, open_input


def errors_of(path, **settings):
    with pytest.raises(InvalidInput) as found:
        open_input(path, check, **settings)
    return [(error.line, error.code) for error in found.value.errors]


GOOD = json.dumps(request(0)).encode()
FAULTS = {
    "invalid_json_line": [
        b"{",
        b"[]",
        b"\xff",
        b"nonsense",
        b"[" * 3000,
        json.dumps(request(1) | {"more": 1}).encode(),
        json.dumps({k: v for k, v in request(1).items() if k != "body"}).encode(),
        json.dumps(request(1) | {"custom_id": 7}).encode(),
        json.dumps(request(1)).encode() + b" {}",
    ],
    "invalid_custom_id": [json.dumps(request(1) | {"custom_id": name}).encode() for name in ("", "x" * 513)],
    "duplicate_custom_id": [GOOD],
    "invalid_method": [json.dumps(request(1) | {"method": "GET"}).encode()],
    "invalid_url": [json.dumps(request(1) | {"url": "/v1/embeddings"}).encode()],
    "invalid_request": [json.dumps(request(1) | {"body": {"model": "fake"}}).encode()],
    "line_too_large": [json.dumps(request(1) | {"body": {"prompt": "x" * 5000}}).encode()],
}


@pytest.mark.parametrize(("code", "line"), [(code, line) for code, lines in FAULTS.items() for line in lines])
def test_each_fault_names_its_line(tmp_path, code, line):
    last = json.dumps(request(2)).encode()
    (tmp_path / "in").write_bytes(b"\n".join([GOOD, b"", line, last]))
    assert errors_of(tmp_path / "in", limits=FileLimits(line_bytes=4096)) == [(3, code)]


@pytest.mark.parametrize(
    ("limits", "content", "code"),
    [
        (FileLimits(file_bytes=100), GOOD * 2, (None, "file_too_large")),
        (
            FileLimits(lines=2),
            b"\n".join(json.dumps(request(i)).encode() for i in range(9)),
            (3, "too_many_tasks"),
        ),
        (FileLimits(), b"", (None, "empty_file")),
        (FileLimits(), b"\n \n", (None, "empty_file")),
    ],
)
def test_limits_of_the_file(tmp_path, limits, content, code):
    (tmp_path / "in").write_bytes(content)
    assert errors_of(tmp_path / "in", limits=limits) == [code]


def test_many_faults_are_counted_and_the_first_are_kept(tmp_path):
    (tmp_path / "in").write_bytes(b"{\n" * 1000)
    with pytest.raises(InvalidInput) as found:
        opened(tmp_path / "in")
    assert (len(found.value.errors), found.value.count) == (MAX_ERRORS, 1000)


@given(
    bodies=st.lists(
        st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20), max_size=4),
        min_size=1,
        max_size=9,
    ),
    gaps=st.lists(st.sampled_from([b"", b"\r", b"  \n\n"]), min_size=9, max_size=9),
    mark=st.booleans(),
)
def test_lines_are_read_back(bodies, gaps, mark, tmp_path_factory):
    path = tmp_path_factory.mktemp("read") / "in"
    lines = [request(i) | {"body": body | {"prompt": "p"}} for i, body in enumerate(bodies)]
    content = b"".join(
        json.dumps(line).encode() + gap + b"\n" for line, gap in zip(lines, gaps, strict=False)
    )
    path.write_bytes(b"\xef\xbb\xbf" * mark + content)
    source = opened(path)
    found = [source.read(i) for i in range(1, source.num_lines + 1) if source.has_request(i)]
    assert [line.custom_id for line in found] == [line["custom_id"] for line in lines]
    assert [json.loads(bytes(line.body)) for line in found] == [line["body"] for line in lines]
    assert source.num_requests == len(lines)
    source.close()


def test_a_file_that_changes_under_way_is_an_error(tmp_path):
    source = opened(write_input(tmp_path / "in", 3))
    os.truncate(tmp_path / "in", 20)
    with pytest.raises(OSError, match="changed while it was in use"):
        source.read(2)
