"""The multipart parser gives back each form, however the form is cut into pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.batch.multipart import FormField, MultipartError, MultipartParser, boundary_of

BOUNDARY = b"-x-"
CONTENT = st.binary(max_size=60) | st.lists(
    st.sampled_from([b"\r\n", b"--", BOUNDARY, b"\r\n--", b"-x", b"a"]), max_size=8
).map(b"".join)


@given(
    contents=st.lists(CONTENT.filter(lambda c: b"\r\n--" + BOUNDARY not in b"\r\n" + c), max_size=4),
    cuts=st.lists(st.integers(0, 600), max_size=12),
    preamble=st.booleans(),
)
def test_any_cutting_gives_the_same_form(contents, cuts, preamble):
    body = b"a preamble\r\n" if preamble else b""
    for i, content in enumerate(contents):
        head = (
            b'Content-Type: text/x\r\ncontent-disposition: form-data; name="f%d"; filename="\xc3\xa9.txt"' % i
        )
        body += b"--" + BOUNDARY + b"\r\n" + head + b"\r\n\r\n" + content + b"\r\n"
    body += b"--" + BOUNDARY + b"--\r\nan epilogue"
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    parser, found = MultipartParser(BOUNDARY), []
    for begin, end in itertools.pairwise(places):
        for one in parser.feed(body[begin:end]):
            if isinstance(one, FormField):
                found.append((one, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + one)
    assert parser.ended
    assert [(part.name, content) for part, content in found] == [(f"f{i}", c) for i, c in enumerate(contents)]


@pytest.mark.parametrize(
    "header",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary="é"',
    ],
)
def test_a_header_without_a_boundary(header):
    with pytest.raises(MultipartError):
        boundary_of(header)


def test_boundaries():
    assert boundary_of("multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of('Multipart/Form-Data; charset=utf-8; boundary="a b:c"') == b"a b:c"
