"""The default of `max_num_seqs`: the sequences that a full step serves and that the memory holds."""

from jaxflow.model.composition import Composition

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 512  # of the request whose steady state decides the sequences of a step
TOKENS_OF_SEQ = 512  # tokens of KV that a sequence of a chat holds on average
FEWEST_USEFUL = 64  # so many decodes read all weights once, as one decode does
TILE_ROWS = 128  # rows of a tile of a GEMM


def default_max_num_seqs(step_tokens: int, kv_bytes: float, seq_bytes: float) -> int:
    """Return the number of sequences that run at the same time by default.

    In the steady state of 1,024 prompt and 512 output tokens, a third of a full step's tokens are decodes
    (NanoFlow §3.1). With fewer sequences the prompts end too early to fill every step. More sequences leave
    no room for the prompts that must replace those that end. So the cost model's requests per second are
    highest there. Longer sequences than `TOKENS_OF_SEQ` wait until their pages will last, so more sequences
    than fit at once are never admitted.

    The number is at least 1, grows with the memory and with the step, and is a multiple of a GEMM's tile, or
    a power of two below one tile.

    Args:
      step_tokens: most tokens of a step.
      kv_bytes: bytes that KV pages may use.
      seq_bytes: bytes of the pages of one sequence of `TOKENS_OF_SEQ` tokens.
    """
    steady = Composition.steady_state(step_tokens, PROMPT_TOKENS, OUTPUT_TOKENS).decode_tokens
    useful = max(FEWEST_USEFUL, _whole_tiles(int(steady)))
    fitting = _whole_tiles(max(1, int(kv_bytes // seq_bytes)))
    return min(step_tokens, useful, fitting)


def _whole_tiles(rows: int) -> int:
    """Return the largest number up to `rows` that is a multiple of a tile, or a power of two below a tile."""
    return rows - rows % TILE_ROWS if rows >= TILE_ROWS else 1 << max(0, rows.bit_length() - 1)
