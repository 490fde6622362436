"""An engine with experts in int4 draws the same tokens on one device and with whole experts on two."""

import pytest
import toy
from test_goldens import ONE_SIZE, requests

from pallas_kernels.quantized import ExpertInt4


# In the usual suite test_int4_experts compares the logits, and the weights on several devices.
@pytest.mark.slow
def test_whole_experts_on_two_devices(goldens):
    drawn = []
    for devices, ep in ((1, False), (2, True)):
        engine = toy.loop("tiny-gpt_oss", tp=devices, budget=ONE_SIZE, ep=ep, quantization="int4")
        assert isinstance(engine.executor.weights["layers"][0]["expert_down"], ExpertInt4)
        finished = toy.run(engine, requests(goldens("tiny-gpt_oss")))
        drawn.append({name: one.tokens for name, one in finished.items()})
    assert drawn[0] == drawn[1] and len(drawn[0]) > 1
