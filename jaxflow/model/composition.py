"""The composition of a step: the counts of its batch that the work of its ops is linear in."""

import dataclasses
import math
from typing import Literal

Count = Literal[
    "step", "tokens", "samples", "decode_tokens", "decode_keys", "chunk_tokens", "chunk_keys", "chunk_pairs"
]


@dataclasses.dataclass(frozen=True)
class Composition:
    """The batch of one step. Means and fractions are accepted, to describe an average step.

    decode_tokens: sequences that decode, one token each.
    decode_keys: the mean number of keys that a decode reads, its new key included.
    chunks: prefill chunks as (tokens, position of the first token).
    samples: rows with a drawn token; None for every decode and every chunk.
    """

    decode_tokens: float = 0
    decode_keys: float = 0.0
    chunks: tuple[tuple[float, float], ...] = ()
    samples: float | None = None

    @property
    def chunk_tokens(self) -> float:
        """Return the number of prefill tokens."""
        return sum(tokens for tokens, _ in self.chunks)

    @property
    def tokens(self) -> float:
        """Return NanoFlow's dense batch B_Dense."""
        return self.decode_tokens + self.chunk_tokens

    def count(self, what: Count, window: int | None = None) -> float:
        """Return a count of the step, for a layer whose queries see `window` keys (None for all).

        The window is applied to the mean of the decodes' keys. The result is an upper bound if their keys
        differ.
        """
        limit = math.inf if window is None else window
        match what:
            case "step":
                return 1.0 if self.tokens else 0.0
            case "samples":
                return self.decode_tokens + len(self.chunks) if self.samples is None else self.samples
            case "decode_keys":
                return self.decode_tokens * min(self.decode_keys, limit)
            case "chunk_keys":
                return sum(tokens + min(start, limit - 1) for tokens, start in self.chunks if tokens)
            case "chunk_pairs":
                return sum(_pairs(tokens, start, limit) for tokens, start in self.chunks)
            case _:
                return getattr(self, what)

    @classmethod
    def steady_state(cls, tokens: float, prompt_tokens: float, output_tokens: float) -> "Composition":
        """Return the average step of `tokens` tokens while requests arrive and end (NanoFlow §3.1).

        Requests have p prompt and d output tokens. A share d / (p + d) of the step's tokens decodes, at p +
        (d + 1) / 2 keys. Prompt tokens see (p + 1) / 2 keys each.
        """
        p, d = prompt_tokens, output_tokens
        decoding = tokens * d / (p + d)
        prefilling = tokens - decoding
        pieces = max(1, math.ceil(prefilling / p)) if prefilling else 0
        chunks = ((prefilling / pieces, (p - prefilling / pieces) / 2),) * pieces if pieces else ()
        return cls(decoding, p + (d + 1) / 2, chunks, tokens / (p + d) * d)


def _pairs(tokens: float, start: float, limit: float) -> float:
    """Return the query-key pairs of a causal chunk: the token at position p sees min(p + 1, limit) keys."""
    full = min(max(start + tokens - limit, 0.0), tokens)  # tokens that see `limit` keys
    rest = tokens - full
    return rest * start + rest * (rest + 1) / 2 + (full * limit if full else 0.0)
