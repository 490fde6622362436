"""The journal: a crash at any byte loses no finished line and doubles none."""

import errno
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.batch import journal as module
from serving.batch.journal import AnsweredLine, Input, Journal, JournalError, frame, read_frames
from serving.batch.leases import Leases

LINES = 9
INPUT = Input("d" * 64, LINES, "fake")


def answers(*lines: int) -> list[AnsweredLine]:
    return [AnsweredLine(line, line % 3 == 0, b"%d:" % line + bytes([line]) * (3 * line)) for line in lines]


def written(folder, *commits: tuple[int, ...]) -> Journal:
    """A closed journal with these commits."""
    journal = Journal(folder, INPUT)
    for lines in commits:
        journal.append(answers(*lines))
    journal.close()
    return journal


def contents(journal: Journal) -> dict[int, bytes]:
    return dict(journal.outputs())


EXPECTED = {answer.line: answer.output for answer in answers(*range(1, LINES + 1))}


def records(folder) -> list[int]:
    """The lines of all complete answers in all segments."""
    found = []
    for path in folder.glob(f"*{module.SUFFIX}"):
        with open(path, "rb") as file:
            decoded = [module._decode(payload) for _, payload in read_frames(file, 0)]
            found += [one.line for one in decoded if isinstance(one, AnsweredLine)]
    return sorted(found)


def test_answers_are_found_again(tmp_path):
    written(tmp_path / "j", (3, 1), (7,))
    again = Journal(tmp_path / "j", INPUT)
    assert contents(again) == {line: EXPECTED[line] for line in (1, 3, 7)}
    assert (again.num_finished, again.num_failed) == (3, 1)
    assert [line for line, _ in again.outputs(failed=True)] == [3]
    assert [line for line, _ in again.outputs(failed=False)] == [1, 7]


@pytest.fixture
def no_fsync(monkeypatch):
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # thousands of them; the file system is not under test


def test_a_crash_at_every_byte(tmp_path, no_fsync):
    written(tmp_path / "whole", (1, 2), (3,), (4, 5, 6))
    (segment,) = (tmp_path / "whole").glob(f"*{module.SUFFIX}")
    data = segment.read_bytes()
    with open(segment, "rb") as file:
        ends = [end for end, _ in read_frames(file, 0)]
    assert ends[-1] == len(data)
    for cut in range(len(data) + 1):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / segment.name).write_bytes(data[:cut])
        journal = Journal(folder, INPUT)
        complete = sum(end <= cut for end in ends[1:])
        assert [line for line in EXPECTED if journal.finished(line)] == list(range(1, complete + 1))
        journal.append(answers(*(line for line in EXPECTED if not journal.finished(line))))
        journal.close()
        assert contents(Journal(folder, INPUT)) == EXPECTED
        assert records(folder) == list(EXPECTED)


@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=3))
def test_a_wrong_byte_makes_no_wrong_answer(flips, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flipped") / "j"
    written(folder, (1, 2), (3,), (4, 5, 6))
    (segment,) = folder.glob(f"*{module.SUFFIX}")
    data = bytearray(segment.read_bytes())
    for at, mask in flips:
        data[at % len(data)] ^= mask
    segment.write_bytes(data)
    found = contents(Journal(folder, INPUT))
    assert found.items() <= EXPECTED.items()
    assert list(found) == list(range(1, len(found) + 1))


def test_zeros_after_a_power_failure_are_no_answer(tmp_path):
    written(tmp_path / "j", (1,))
    (segment,) = (tmp_path / "j").glob(f"*{module.SUFFIX}")
    segment.write_bytes(segment.read_bytes() + bytes(4096))
    assert contents(Journal(tmp_path / "j", INPUT)) == {1: EXPECTED[1]}


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=8), st.binary(max_size=20))
def test_frames_are_read_as_written(payloads, tail):
    import io

    data = b"".join(map(frame, payloads))
    found = [payload for _, payload in read_frames(io.BytesIO(data + tail), 0)]
    assert found[: len(payloads)] == payloads


def test_several_writers_see_each_other(tmp_path):
    one, two = Journal(tmp_path, INPUT), Journal(tmp_path, INPUT)
    one.append(answers(1, 2))
    two.append(answers(3))
    assert not two.finished(1)
    two.refresh()
    one.append(answers(4))
    one.refresh()
    two.refresh()
    assert contents(one) == contents(two) == {line: EXPECTED[line] for line in (1, 2, 3, 4)}


def test_the_first_of_two_answers_counts(tmp_path):
    one, two = Journal(tmp_path, INPUT), Journal(tmp_path, INPUT)
    one.append([AnsweredLine(1, False, b"one")])
    two.append([AnsweredLine(1, True, b"two")])
    one.refresh()
    assert contents(one) == {1: b"one"} and (one.num_finished, one.num_failed) == (1, 0)


@pytest.mark.parametrize("field", ["digest", "lines", "model"])
def test_a_journal_of_other_work_is_refused(tmp_path, field):
    written(tmp_path, (1,))
    other = {"digest": "e" * 64, "lines": LINES + 1, "model": "another"}[field]
    with pytest.raises(JournalError, match=str(other)):
        Journal(tmp_path, msgspec.structs.replace(INPUT, **{field: other}))


@pytest.mark.parametrize("at", range(4))
def test_a_full_disk_finishes_nothing_and_later_writes_work(tmp_path, monkeypatch, at):
    """The write of the opening or of the answers fails after a part of its bytes."""
    journal = Journal(tmp_path, INPUT)
    if at >= 2:
        journal.append(answers(1))
    write, calls = os.write, iter(range(100))

    def full(descriptor, data):
        if next(calls) == at % 2:
            write(descriptor, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            for line in (2, 3):
                journal.append(answers(line))
    kept = set(contents(journal))
    journal.append(answers(*(line for line in (2, 3, 4) if not journal.finished(line))))
    journal.refresh()
    expected = {line: EXPECTED[line] for line in kept | {2, 3, 4}}
    assert contents(journal) == contents(Journal(tmp_path, INPUT)) == expected
    assert records(tmp_path) == sorted(expected)


def test_a_failed_fsync_finishes_nothing(tmp_path, monkeypatch):
    journal = Journal(tmp_path, INPUT)
    journal.append(answers(1))

    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(OSError, match="Input/output"):
            journal.append(answers(2))
    assert not journal.finished(2)
    journal.append(answers(2))
    assert records(tmp_path) == [1, 2]


def test_a_lease_has_one_holder_until_it_is_given_back(tmp_path):
    one, two = Leases(tmp_path / "leases"), Leases(tmp_path / "leases")
    assert one.take(0) and one.take(0) and two.take(1)
    assert not two.take(0) and not one.take(1)
    assert one.holds(0) and not two.holds(0)
    one.close()
    assert two.take(0)
    two.close()


def test_memory_grows_by_17_bytes_a_line(tmp_path):
    journal = Journal(tmp_path, Input("d" * 64, 50_000, "fake"))
    held = sum(map(len, (journal._offsets.tobytes(), journal._segments.tobytes(), journal._failed)))
    assert held <= 17 * 50_001
