"""The split of a model's layers into pipeline stages of equal predicted time."""

from collections.abc import Sequence

import numpy as np

from jaxflow.config import ConfigError, ModelConfig, check_has_own_inputs
from jaxflow.model.composition import Composition
from jaxflow.model.cost import Rates, op_times
from jaxflow.model.graph import Op, model_graph

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 512  # of the requests whose mean step is balanced


def split_layers(
    config: ModelConfig, stages: int, tp: int, rates: Rates, tokens: float = 256.0
) -> tuple[int, ...]:
    """Return the number of layers of each stage with the least longest stage, by predicted time.

    The embedding counts for the first stage and the head for the last. The step to balance is the mean step
    of requests of `PROMPT_TOKENS` and `OUTPUT_TOKENS`, because the head runs only for rows that draw a token.

    tokens: rows of the step to balance.

    Raises:
      ConfigError: for more stages than layers, and for a model whose layers read more than hidden values of
        the layer before.
    """
    if stages > 1:
        check_has_own_inputs(config, "pipeline_parallel_size", stages, "a pipeline stage")
    if not 1 <= stages <= config.num_layers:
        raise ConfigError("pipeline_parallel_size", stages, f"1 to {config.num_layers}, the model's layers")
    graph = model_graph(config, tp)

    step = Composition.steady_state(tokens, PROMPT_TOKENS, OUTPUT_TOKENS)

    def seconds(ops: Sequence[Op]) -> float:
        return sum(op_times(op, step, rates).longest_s for op in ops)

    each = np.array([seconds(layer) for layer in graph.layers])
    ends = np.zeros(len(each))
    ends[0], ends[-1] = ends[0] + seconds(graph.before), ends[-1] + seconds(graph.after)
    total = np.concatenate([[0.0], np.cumsum(each + ends)])
    # best[s][n]: the least longest stage of the first n layers in s stages.
    best = np.full((stages + 1, len(total)), np.inf)
    cut = np.zeros((stages + 1, len(total)), int)
    best[0][0] = 0.0
    for s in range(1, stages + 1):
        for n in range(s, len(total)):
            longest = np.maximum(best[s - 1][:n], total[n] - total[:n])
            cut[s][n] = int(longest.argmin())
            best[s][n] = longest[cut[s][n]]
    layers, n = [], len(each)
    for s in range(stages, 0, -1):
        layers.append(n - cut[s][n])
        n = cut[s][n]
    return tuple(int(number) for number in reversed(layers))
