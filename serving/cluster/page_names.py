"""The content names of a prompt's pages, which a router and its replicas compute alike."""

from collections.abc import Sequence

import numpy as np

from jaxflow.kv import prefix


def page_names(prompt: Sequence[int], salt: bytes, block_size: int) -> list[bytes]:
    """Return the content names of a prompt's full pages."""
    names = [prefix.root(salt)]
    prefix.extend(names, np.asarray(prompt, np.int32), len(prompt) // block_size, block_size)
    return names[1:]
