"""Low precisions beside one wide precision: laws of the comparison, with tiny mixtures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from paths import MODELS

from benchmarks import check_precision
from benchmarks.check_plan import Lengths, check_sizes, drawn_lengths, steps_of
from benchmarks.check_precision import Precision, changed_experts, precisions_of
from jaxflow.config import ConfigError

SMALL = "--tokens 32 --other_tokens 16 --sequences 6 --prompt 20 --output 8 --longest 60 --block_size 16"


def checked(model: str, **flags: str) -> dict:
    """Return the report of a tiny model, with the checkpoint's weights."""
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    folder = str(MODELS / f"tiny-{model}")
    given = check_precision.parse(["--model", folder, "--load_format", "auto", *SMALL.split(), *words])
    return check_precision.check(given)


def mean_kl(report: dict) -> dict[str, float]:
    ways = report["heads"][report["head"]]["ways"]
    return {name: way["kl"]["mean"] for name, way in ways.items()}


@given(st.data(), array_shapes(min_dims=3, max_dims=3, max_side=4))
def test_choices_are_sets_and_a_replaced_expert_is_counted_once(data, shape):
    n, layers, chosen = shape
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    one = rng.permuted(np.tile(np.arange(8), (n, layers, 1)), axis=-1)[..., :chosen]
    same = changed_experts(one, rng.permuted(one, axis=-1))
    assert (same["sets_changed"], same["experts_replaced"]) == (0, 0)
    other = one.copy()
    other[0, 0, 0] = 8
    found = changed_experts(one, other)
    assert found["sets_changed"] == pytest.approx(1 / (n * layers))
    assert found["experts_replaced"] == pytest.approx(1 / one.size)
    assert np.mean(found["sets_changed_by_layer"]) == pytest.approx(found["sets_changed"])


def test_the_wide_precision_is_not_compared_with_itself():
    found = precisions_of("none,fp8", "auto,int8")
    assert found == [Precision(None, "int8"), Precision("fp8"), Precision("fp8", "int8")]


def test_in_float32_only_the_format_changes_tokens_and_experts():
    """Steps of two sizes agree, int8 keys and values cost less than e4m3 ones, and both precisions together
    cost more than one."""
    report = checked("qwen3_moe", against="float32", quantization="none,fp8", kv_cache_dtype="int8,fp8")
    kl, experts = mean_kl(report), report["experts"]
    assert kl["noise"] < 1e-6 and experts["noise"]["sets_changed"] == 0
    assert kl["noise"] < kl["wide, int8 KV"] < kl["wide, fp8 KV"] < kl["fp8, fp8 KV"]
    assert experts["wide, int8 KV"]["sets_changed"] <= experts["fp8, fp8 KV"]["sets_changed"]


def test_mxfp4_of_a_checkpoint_in_mxfp4_costs_nothing_and_8_bit_keys_are_refused():
    report = checked("gpt_oss", quantization="none,mxfp4", kv_cache_dtype="auto,fp8", rounded="mxfp4")
    kl = mean_kl(report)
    assert max(kl.values()) < 1e-3 and kl["mxfp4 rounded"] == pytest.approx(0, abs=1e-6)
    assert set(report["refused"]) == {"wide, fp8 KV", "mxfp4, fp8 KV"}


@pytest.mark.parametrize("model", ["mixtral", "glm4_moe"])
def test_rounded_weights_cost_part_of_what_fp8_costs(model):
    """Weights of e4m3 in the wide engine leave out the error of the activations."""
    report = checked(model, quantization="fp8,mxfp4", kv_cache_dtype="auto,fp8", rounded="fp8")
    kl = mean_kl(report)
    assert kl["noise"] < kl["fp8 rounded"] < kl["fp8"] < kl["fp8, fp8 KV"]
    assert kl["noise"] < kl["fp8 beyond rounding"]
    assert set(report["refused"]) == {"mxfp4", "mxfp4, fp8 KV"}


def test_dummy_weights_are_the_same_numbers_before_their_quantization():
    words = ["--model", str(MODELS / "tiny-qwen3_moe"), *SMALL.split()]
    flags = check_precision.parse(words)
    lengths = Lengths(np.array([20]), np.array([28]))
    wide = check_precision.executor_of(flags, Precision(), lengths)
    low = check_precision.executor_of(flags, Precision("fp8"), lengths)
    made = check_precision.widened(low.weights, low, "fp8", "bfloat16")
    for one, other in zip(jax.tree.leaves(wide.weights), jax.tree.leaves(made), strict=True):
        limit = 0.04 * float(jnp.abs(one).max())
        assert float(jnp.abs(one.astype(jnp.float32) - other.astype(jnp.float32)).max()) <= limit


@pytest.mark.parametrize("field", ["tokens", "other_tokens"])
def test_a_step_that_the_prompts_cannot_fill_is_refused_before_a_weight_is_read(field, monkeypatch, capsys):
    monkeypatch.setattr(check_precision, "executor_of", lambda *_: pytest.fail("a weight was read"))
    words = [
        "--sequences",
        "2",
        "--prompt",
        "20",
        "--tokens",
        "16",
        "--other_tokens",
        "8",
        f"--{field}",
        "4096",
    ]
    assert check_precision.main(words) == 2
    assert "tokens=4096" in capsys.readouterr().err


@given(st.integers(0, 2**32 - 1), st.integers(1, 400))
def test_the_step_sizes_that_pass_are_those_with_a_full_step(seed, tokens):
    lengths = drawn_lengths(3, 40, 8, 90, seed)
    if list(steps_of(lengths, tokens)):
        check_sizes(lengths, [tokens])
    else:
        with pytest.raises(ConfigError):
            check_sizes(lengths, [tokens])
