"""An engine that keeps experts in MXFP4 gives the golden tokens, on one device, in
shares and with whole experts.
"""

import pytest
import toy
from test_goldens import ONE_SIZE, check, requests

from pallas_kernels.quantized import Mxfp4


# In the usual suite test_gpt_oss compares the logits, and test_mxfp4_experts the weights on several devices.
@pytest.mark.slow
@pytest.mark.parametrize(("devices", "ep"), [(1, False), (2, False), (2, True)])
def test_goldens(devices, ep, goldens):
    golden = goldens("tiny-gpt_oss")
    engine = toy.loop("tiny-gpt_oss", tp=devices, budget=ONE_SIZE, ep=ep, quantization="mxfp4")
    assert isinstance(engine.executor.weights["layers"][0]["expert_down"], Mxfp4)
    check(golden, toy.run(engine, requests(golden)))
