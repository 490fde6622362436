"""The number of requests that devices hold next to a model's weights: the limit of a step's decodes.

The account follows the engine's (`jaxflow.engine.page_count`). Of the memory that the engine may use, the
weights, a spare, the state of the rows and a step's temporary space are subtracted; the rest is divided into
pages. A decoding request holds the pages of its tokens, and the remainder of its last page.
"""

import math

import jax

from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.program_memory import IN_FLIGHT, SPARE
from jaxflow.kv.device_cache import fit_pages, page_groups
from jaxflow.model.composition import Composition
from jaxflow.model.cost import GIGA, find_device
from jaxflow.model.graph import Widths
from jaxflow.model.sampling import rows_at_once
from jaxflow.model.slot_params import empty_slots
from jaxflow.model.stage import Stage
from search.cost import BYTES
from search.profile.clock import shipped_card
from search.profile.op_times import Profile
from search.regimes import request_bytes, weight_bytes

PAGE = EngineConfig.block_size
UTILIZATION = EngineConfig.gpu_memory_utilization
_LOGIT, _ADJUSTED = (
    4.0,
    6.1,
)  # bytes: of all rows, and of those that are sampled at once (benchmarks/notes/activation-memory.md)


def step_bytes(model: ModelConfig, tokens: int, rows: int, tp: int, memory_bytes: float) -> float:
    """Return the bytes that steps of these tokens and rows need next to weights and cache.

    They are the rows' state, the larger of the sampler's space and a layer's three buffers, and the results
    of steps in flight (`jaxflow.engine.program_memory`).
    """
    vocab, d, f = model.vocab_size, model.hidden_size, model.intermediate_size
    slots = jax.eval_shape(lambda: empty_slots(rows, vocab))
    state = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots))
    at_once = math.ceil(rows / math.ceil(rows / rows_at_once(int(memory_bytes), vocab)))
    sampler = vocab * (_LOGIT * rows + _ADJUSTED * at_once)
    buffers = tokens * (2 * d + f / tp) * 2
    return state + max(sampler, buffers) + IN_FLIGHT * (tokens + rows) * d * 2


def most_decodes(
    name: str,
    model: ModelConfig,
    profile: Profile,
    prompt: int,
    output: int,
    tokens: int,
    utilization: float = UTILIZATION,
    stages: tuple[int, ...] = (),
) -> float:
    """Return the requests of these lengths that decode in a step of an engine on the profile's devices.

    Steps have `tokens` tokens; the prompts that replace finished requests are counted. utilization: the
    engine's `gpu_memory_utilization`. stages: the layers of each pipeline stage, whose
    micro-batches share the requests; empty without stages. The result is inf without outputs, and
    where the device's memory is unknown.

    Raises: ConfigError where not even one request fits next to the weights.
    """
    device, tp = find_device(profile.device), profile.tensor_parallel_size
    if device is None:
        return math.inf
    card = shipped_card(device.name)
    limit = utilization * (card.memory_bytes if card and card.memory_bytes else device.memory_bytes)
    number = max(1, len(stages))
    if stages:  # the largest stage decides
        model = Stage(0, max(stages), model.num_layers).config(model)
    widths = Widths(weights=BYTES.get(profile.dtype, 2.0), kv=BYTES.get(profile.kv_cache_dtype, 2.0))
    weights, request = weight_bytes(model, widths), request_bytes(model, prompt, output, widths)
    step = Composition.steady_state(tokens, prompt, output)
    prompts = math.ceil(step.chunk_tokens / prompt) if step.chunk_tokens else 0
    rows = min(tokens, round(step.decode_tokens) + prompts)
    left = limit * (1 - SPARE) - step_bytes(model, tokens, rows, tp, limit) - weights / tp
    if tp * left < request:
        one = f"{request / GIGA:.1f} GB that the cache holds of one {prompt:g}/{output:g} request"
        had = f"{tp} x {device.name} is {tp * device.memory_bytes / GIGA:.1f} GB"
        used = (
            f"of which steps of {tokens} tokens leave {(tp * left + weights) / GIGA:.1f} GB at "
            f"gpu_memory_utilization={utilization:g}"
        )
        raise ConfigError(
            "gpus", tp, f"enough for {name}'s {weights / GIGA:.1f} GB of weights and the {one}; {had}, {used}"
        )
    if not output:
        return math.inf
    groups = page_groups(model, profile.kv_cache_dtype, tp)
    pages = fit_pages(
        groups,
        int(left),
        block_size=PAGE,
        tp=tp,
        max_num_seqs=rows * number,
        token_budget=tokens,
        max_model_len=prompt + output,
    )
    whole = [count for count, window in zip(pages, model.windows, strict=True) if window is None]
    held = (min(whole or pages) - 1) * PAGE - prompts * (prompt + PAGE)
    return max(1.0, held / (prompt + output / 2 + PAGE) / number)
