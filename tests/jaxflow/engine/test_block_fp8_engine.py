"""An engine with experts in e4m3 blocks: near the same numbers in 32 bits, and
the same tokens on any devices.

In the usual suite test_block_fp8_experts compares the weights, and a layer on several devices.
"""

import numpy as np
import pytest
import toy
from block_checkpoint import write
from test_goldens import ONE_SIZE, requests

from pallas_kernels.quantized import BlockFp8

# Rows in e4m3, and sums of devices in bfloat16, move logits by less, also where they choose another expert.
NEAR = 0.3


def run(folder, golden, tp=1, ep=False):
    engine = toy.loop(str(folder), tp=tp, budget=ONE_SIZE, ep=ep)
    return engine.executor.weights["layers"][-1], toy.run(engine, requests(golden, max_tokens=6))


def agree(one, other):
    """Compare the tokens and logits of two engines up to the first choice between equals."""
    compared = 0
    for name, result in one.items():
        for at, (found, wanted) in enumerate(zip(other[name].logprobs[0], result.logprobs[0], strict=True)):
            best, second = sorted((token.logprob for token in wanted.values()), reverse=True)[:2]
            off = [found[token].logprob - wanted[token].logprob for token in found.keys() & wanted.keys()]
            assert np.abs(off).max() < NEAR, (name, at)
            if other[name].tokens[at] != result.tokens[at]:
                assert best - second < NEAR, (name, at)
                break
            compared += 1
    assert compared >= len(one)


# Dense matrices of whole blocks on four devices, too.
WIDTHS = {"tiny-qwen3_moe": {"head_dim": 128}, "tiny-deepseek_v3": {"intermediate_size": 512}}


@pytest.mark.slow
@pytest.mark.parametrize("model", WIDTHS)
def test_blocks_give_the_tokens_of_one_device_near_those_of_32_bits(model, tmp_path, goldens):
    golden = goldens(model)
    kept_in, wide_in = (
        write(tmp_path / str(blocks), model, blocks=blocks, **WIDTHS[model]) for blocks in (True, False)
    )
    layer, one = run(kept_in, golden)
    assert isinstance(layer["expert_up_gate"], BlockFp8) and isinstance(layer["expert_down"], BlockFp8)
    _, wide = run(wide_in, golden)
    for name in one:
        first, exact = (found[name].logprobs[0][0] for found in (one, wide))
        both = first.keys() & exact.keys()
        off = [first[token].logprob - exact[token].logprob for token in both]
        assert len(both) >= 3 and 0 < np.abs(off).max() < NEAR, name
    for tp, ep in ((2, False), (4, True)):
        agree(one, run(kept_in, golden, tp, ep)[1])
