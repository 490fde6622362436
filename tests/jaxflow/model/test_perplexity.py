"""The default chat model in 8 bits: what its perplexity on real text loses."""

import numpy as np
import paths
import pytest

from jaxflow.bench.perplexity import measure
from jaxflow.config import EngineConfig


def test_what_8_bits_cost(smollm2_gguf):
    """The report under benchmarks/ is of all eight windows."""
    settings = {"max_model_len": 320, "max_num_batched_tokens": 64, "max_num_seqs": 1, "num_kv_pages": 6, "enable_prefix_caching": False}
    windows = np.load(paths.PPL / "wikitext2_8x1024.npy")[:1, :256].astype(np.int64)
    config = EngineConfig(str(smollm2_gguf), **settings)
    found = {way["way"]: way for _, way in measure(config, windows, ("wide", "fp8", "fp8, fp8 KV", "fp8 KV"))}
    wide = found["wide"]["perplexity"]
    lost = {name: way["perplexity"] / wide - 1 for name, way in found.items()}
    assert 15 < wide < 40
    assert lost["fp8"] == pytest.approx(0.02, abs=0.04)
    assert lost["fp8, fp8 KV"] == pytest.approx(0.03, abs=0.05)
    assert lost["fp8 KV"] == pytest.approx(0.01, abs=0.03)
    # It is 8 bits that ran: tokens moved, and the more of it the further.
    moved = {name: way["mean_moved"] for name, way in found.items()}
    assert 0.02 < moved["fp8 KV"] < moved["fp8"] < moved["fp8, fp8 KV"] < 0.3
