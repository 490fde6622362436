"""Frames arrive whole and bounded, and only between two ends that know the secret."""

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.parallel.frames import FrameError, frame, greet, read_frame, send_frame, welcome
from jaxflow.parallel.processes import differences

NONCES = bytes(range(32)), bytes(range(32, 64))


@given(
    st.lists(st.tuples(st.sampled_from([b"C", b"B"]), st.binary(max_size=3000)), max_size=8),
    st.integers(1, 900),
)
def test_frames_arrive_in_order_however_they_are_cut(frames, piece):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        whole = b"".join(frame(kind, payload) for kind, payload in frames)

        def send() -> None:
            for i in range(0, len(whole), piece):
                ours.sendall(whole[i : i + piece])
            ours.close()

        sender = threading.Thread(target=send)
        sender.start()
        assert [read_frame(theirs) for _ in frames] == frames
        with pytest.raises(FrameError):
            read_frame(theirs)
        sender.join()


class Slow:
    """A socket that takes a few bytes of a message."""

    def __init__(self, link: socket.socket, most: int):
        self.link, self.most, self.sendall = link, most, link.sendall

    def sendmsg(self, parts: tuple[bytes, bytes]) -> int:
        return self.link.send(b"".join(parts)[: self.most])


@given(st.binary(max_size=40), st.integers(1, 50))
def test_a_frame_is_sent_whole_whatever_the_first_call_takes(payload, most):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(Slow(ours, most), b"C", payload)  # type: ignore[arg-type]
        assert read_frame(theirs) == (b"C", payload)


def test_a_long_frame_is_refused_before_it_is_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(b"C", bytes(101))[:5])  # the header alone
        with pytest.raises(FrameError):
            read_frame(theirs, most_bytes=100)


def shake(secret: bytes, other: bytes, rank: int) -> tuple[list, list]:
    """Return what both ends found in a handshake with these secrets: results or errors."""
    ours, theirs = socket.socketpair()
    welcomed, greeted = [], []

    def run(found: list, end: socket.socket, work) -> None:
        try:
            found.append(work())
        except OSError as error:
            found.append(error)
            end.close()

    with ours, theirs:
        thread = threading.Thread(
            target=run, args=(greeted, ours, lambda: greet(ours, other, rank, NONCES[0]))
        )
        thread.start()
        run(welcomed, theirs, lambda: welcome(theirs, secret, NONCES[1]))
        thread.join()
    return welcomed, greeted


def test_both_ends_prove_the_secret():
    assert shake(b"secret", b"secret", 3) == ([3], [None])


def test_another_secret_is_turned_away():
    (welcomed,), (greeted,) = shake(b"secret", b"guess", 3)
    assert isinstance(welcomed, FrameError) and isinstance(greeted, OSError)


@given(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from("12")),
    st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("12")), max_size=3),
)
def test_processes_agree_if_and_only_if_their_values_are_equal(first, others):
    found = differences([first, *others])
    assert (found == "") == all(other == first for other in others)
    for rank, other in enumerate(others, start=1):
        if len(others) == 1:
            assert all(f"{name} is" in found for name in "abc" if other.get(name) != first.get(name)), rank
