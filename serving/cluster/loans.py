"""Loans of KV pages: the copies that a prefill engine keeps until a decode engine has them.

A loan ends by its acknowledgement, or when its lease is over. A lease that is over takes no memory from
the borrower: the borrower reads a copy that never changes. So an early end costs the borrower the
pages, and never gives it others.
"""


class Loans:
    """The open loans of an engine.

    Args:
      capacity_bytes: limit of all open loans.
      lease_s: seconds after which a loan ends without an acknowledgement.

    Attributes:
      expired: loans that ended by their lease, since the start.
    """

    def __init__(self, capacity_bytes: int, lease_s: float):
        self.capacity_bytes, self.lease_s = capacity_bytes, lease_s
        self.expired = 0
        self._open: dict[int, tuple[int, float]] = {}  # bytes and end of the lease, oldest first

    def __len__(self) -> int:
        return len(self._open)

    @property
    def bytes(self) -> int:
        """Return the bytes of the open loans."""
        return sum(num_bytes for num_bytes, _ in self._open.values())

    def open(self, number: int, num_bytes: int, now_s: float) -> bool:
        """Open a loan with a new number. Return False beyond the limit."""
        self.expire(now_s)
        if number in self._open:
            raise ValueError(f"loan {number} is open")
        if self.bytes + num_bytes > self.capacity_bytes:
            return False
        self._open[number] = num_bytes, now_s + self.lease_s
        return True

    def end(self, number: int) -> bool:
        """End a loan. Return False if it has ended before: an acknowledgement can come late, or twice."""
        return self._open.pop(number, None) is not None

    def expire(self, now_s: float) -> list[int]:
        """End the loans whose lease is over, and return their numbers."""
        over = [number for number, (_, end_s) in self._open.items() if end_s <= now_s]
        for number in over:
            del self._open[number]
        self.expired += len(over)
        return over
