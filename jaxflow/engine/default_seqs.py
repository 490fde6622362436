"""The defaults of `max_num_batched_tokens` and `max_num_seqs` on a GPU."""

from jaxflow.model.composition import Composition

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 512  # of the request whose steady state decides the sequences of a step
TOKENS_OF_SEQ = 512  # tokens of KV that a sequence of a chat holds on average
FEWEST_USEFUL = 64  # so many decodes read all weights once, as one decode does
TILE_ROWS = 128  # rows of a tile of a GEMM
STEP_TOKENS, MOST_STEP_TOKENS = 2048, 4096
EXPERT_ROWS = 256  # fp8 products of so many rows take longer than the read of their weight


def default_step_tokens(experts: int, chosen: int, ranks: int) -> int:
    """Return the most tokens of a step by default, on each data-parallel rank: 2,048 to 4,096.

    A mixture's step gives each expert a share of its rows. A step of 2,048 tokens gives an expert of
    Qwen3-30B-A3B 128 rows, and most of the time of its product is the read of its weights. So the step grows
    until an expert has 256 rows. Larger steps would delay the next token of running requests further.

    Args:
      experts: experts of a mixture layer; 0 for a dense model.
      chosen: experts of a token.
      ranks: data-parallel ranks, whose rows the experts share.
    """
    wanted = EXPERT_ROWS * experts // (chosen * ranks) if experts else 0
    return min(max(STEP_TOKENS, wanted), MOST_STEP_TOKENS)


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
