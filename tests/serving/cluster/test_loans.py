"""The books of lent pages: no loan is left, none ends twice, and the limit
holds, in every order of events.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from serving.cluster.loans import Loans

CAPACITY, LEASE_S = 100, 10.0


class LoansMachine(RuleBasedStateMachine):
    """Compare with a list of (number, bytes, end) of the open loans."""

    numbers = Bundle("numbers")

    def __init__(self):
        super().__init__()
        self.loans = Loans(CAPACITY, LEASE_S)
        self.open: dict[int, tuple[int, float]] = {}
        self.now = self.count = self.ended = self.expired = 0

    def pass_over(self) -> None:
        over = [number for number, (_, end) in self.open.items() if end <= self.now]
        for number in over:
            del self.open[number]
        self.expired += len(over)

    @rule(target=numbers, num_bytes=st.integers(0, 60))
    def lend(self, num_bytes):
        self.count += 1
        self.pass_over()
        room = sum(size for size, _ in self.open.values()) + num_bytes <= CAPACITY
        assert self.loans.open(self.count, num_bytes, self.now) == room
        if room:
            self.open[self.count] = num_bytes, self.now + LEASE_S
        return self.count

    @rule(number=numbers)
    def acknowledge(self, number):
        """Also late, twice, and of a loan that was refused."""
        assert self.loans.end(number) == (self.open.pop(number, None) is not None)

    @rule(seconds=st.integers(0, 7))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def expire(self):
        over = {number for number, (_, end) in self.open.items() if end <= self.now}
        assert set(self.loans.expire(self.now)) == over
        self.pass_over()

    @precondition(lambda self: self.open)
    @rule()
    def lend_an_open_number_again(self):
        number, (_, end) = next(iter(self.open.items()))
        if end > self.now:
            with pytest.raises(ValueError):
                self.loans.open(number, 1, self.now)
            self.pass_over()

    @invariant()
    def the_books_agree(self):
        assert len(self.loans) == len(self.open)
        assert self.loans.bytes == sum(size for size, _ in self.open.values()) <= CAPACITY
        assert self.loans.expired == self.expired

    def teardown(self):
        """Whatever is left ends with its lease."""
        self.loans.expire(self.now + LEASE_S)
        assert len(self.loans) == self.loans.bytes == 0


TestLoans = LoansMachine.TestCase
