"""Flags that a test's command defines, apart from all that others have left in the process."""

import contextlib
from collections.abc import Iterator

from absl import flags


@contextlib.contextmanager
def own_flags() -> Iterator[None]:
    """Keep only absl's own flags inside the block, as in a new process.

    The other flags return afterwards, with their modules.
    """
    state = vars(flags.FLAGS)
    before = {name: _copied(value) for name, value in state.items()}
    for name in list(flags.FLAGS):
        if not (flags.FLAGS.find_module_defining_flag(name) or "").startswith("absl"):
            delattr(flags.FLAGS, name)
    try:
        yield
    finally:
        state.clear()
        state.update(before)
        flags.FLAGS.unparse_flags()


def _copied(value):
    """Flags by name, or lists of them by module, in dicts and lists that nobody else changes."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value
