"""New ids of requests."""

import itertools
import random

_PROCESS = f"{random.getrandbits(64):016x}"
_NUMBERS = itertools.count(random.getrandbits(63))


def new_id() -> str:
    """Return 32 hexadecimal digits that no other request of this process has. The ids are no secret."""
    return f"{_PROCESS}{next(_NUMBERS):016x}"
