"""New ids of requests."""

import random


def new_id() -> str:
    """Return 32 hexadecimal digits that no other request of this process has. The ids are no secret.

    The system's random numbers would cost a system call, which also lets another thread take the interpreter lock.
    """
    return f"{random.getrandbits(128):032x}"
