"""The pages of a page group that a sequence's next queries see, by the group's window.

A window is a number of last keys, an elastic span (`jaxflow.config.Span`) or None for all keys.
The first key of a window never moves back while a sequence grows. So a page that the next query
does not see is never seen again.
"""

from typing import Any

import numpy as np

from jaxflow.config import Span, Window


def first_seen(position: Any, window: Window, block_size: int) -> Any:
    """Return the first page of the window of a query at `position`, sink tokens left out.

    position: int, or an array of int.
    """
    if window is None:
        return 0 * position
    last_keys = window.window(position) if isinstance(window, Span) else window
    return np.maximum(position - last_keys + 1, 0) // block_size


def sink_pages(window: Window, block_size: int) -> int:
    """Return the number of leading pages that every query sees: those of the sink tokens."""
    return -(-window.sinks // block_size) if isinstance(window, Span) else 0


def unseen(position: int, window: Window, block_size: int) -> range:
    """Return the pages that no query from `position` on sees."""
    sinks = sink_pages(window, block_size)
    return range(sinks, max(sinks, int(first_seen(position, window, block_size))))


def most_pages(tokens: Any, window: Window, block_size: int) -> Any:
    """Return the most pages that the next query of a sequence sees, while it grows to `tokens` positions.

    tokens: int, or an array of int.
    """
    pages = -(-tokens // block_size)
    if window is None:
        return pages
    last_keys = window.window(tokens - 1) if isinstance(window, Span) else window
    return np.minimum(pages, sink_pages(window, block_size) - (1 - last_keys) // block_size + 1)
