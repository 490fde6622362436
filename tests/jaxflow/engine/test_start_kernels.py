"""The kernels of an engine: refused settings, warned settings, and the log of the choice."""

import dataclasses
import logging
import types

import jax
import paths
import pytest

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine import kernel_choice as start_kernels
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.kernel_choice import choose_kernels, tell_kernels
from jaxflow.engine.settings import resolve
from jaxflow.model.checkpoints.checkpoint import Checkpoint, open_checkpoint
from pallas_kernels.gemm.api import HopperGemm, product_of
from pallas_kernels.gemm.tuned_table import Choice, Rule, Shape, Table
from pallas_kernels.kernel_set import CPU, MOSAIC, PAGED, REFERENCE, KernelSet, kernel_set_for

LLAMA = str(paths.MODELS / "tiny-llama")
EIGHT_B = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
PAGED_FALL = f"kernels: {', '.join(PAGED)}: the slower reference runs, since "
ATTENTION = "kernels: decode_attention: the slower reference runs, since "


@pytest.fixture
def gpu(monkeypatch):
    """This machine, as one with a GPU of a compute capability."""

    def become(capability: str):
        device = types.SimpleNamespace(device_kind="a GPU", compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda *_: [device])
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    return become


def choose(model=EIGHT_B, **settings) -> KernelSet:
    return choose_kernels(resolve(EngineConfig(model="a model", plan="sequential", **settings), model), model)


@pytest.mark.parametrize(
    ("capability", "settings", "lines"),
    [
        ("9.0", {}, []),
        ("9.0", {"kv_cache_dtype": "fp8", "quantization": "fp8"}, []),
        ("9.0", {"kernels": "reference", "block_size": 16}, []),
        ("9.0", {"block_size": 16}, [PAGED_FALL + "block_size=16; the kernels take only 64"]),
        (
            "9.0",
            {"kv_cache_dtype": "float32"},
            [PAGED_FALL + "kv_cache_dtype=float32; the kernels take only bfloat16, fp8 or int8"],
        ),
        (
            "9.0",
            {"block_size": 128, "kv_cache_dtype": "float32"},
            [
                PAGED_FALL + "block_size=128; the kernels take only 64",
                PAGED_FALL + "kv_cache_dtype=float32; the kernels take only bfloat16, fp8 or int8",
            ],
        ),
        ("8.0", {"block_size": 16}, [ATTENTION + "block_size=16; the kernels take only 64"]),
        (
            "8.0",
            {"kv_cache_dtype": "fp8"},
            [ATTENTION + "kv_cache_dtype=fp8; the kernels take only bfloat16, the dtype of the weights"],
        ),
        ("8.0", {"dtype": "float32"}, []),
    ],
)
def test_a_setting_that_keeps_ops_from_their_kernels_is_warned_of(gpu, caplog, capability, settings, lines):
    gpu(capability)
    choose(**settings)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", line) for line in lines
    ]


def test_one_op_without_a_kernel_is_no_reason_to_refuse(gpu, caplog):
    gpu("9.0")
    wide = dataclasses.replace(EIGHT_B, head_dim=256)
    assert choose(wide, kernels="mosaic", kv_cache_dtype="int8").name == MOSAIC
    (line,) = caplog.messages
    assert line.startswith("kernels: chunk_attention: ") and line.endswith(
        "head_dim=256; the kernels take only 64 or 128 with a cache of int8"
    )


def test_layers_of_another_head_width_have_kernels_of_their_own(gpu, caplog):
    """Heads of 512 columns run the attention kernels, and the reference writes their keys and values."""
    gpu("9.0")
    kernels = choose(open_checkpoint("gemma-4-26b-a4b", load_format="dummy").model_config)
    narrow, wide = kernels.for_heads(256), kernels.for_heads(512)
    assert {*PAGED} <= {*narrow.kernel_ops} and {*PAGED} - {*wide.kernel_ops} == {"rope_append"}
    assert kernels.rope_append is narrow.rope_append and kernels.gemm == wide.gemm
    fall = "kernels: rope_append: the slower reference runs, since head_dim=512; the kernels take only "
    assert caplog.messages == [fall + "64, 128 or 256"]
    assert "heads of 256 columns (rope_append: mosaic" in kernels.describe()
    assert "heads of 512 columns (rope_append: reference" in kernels.with_pdl().describe()


def test_only_ops_that_the_model_runs_are_warned_of(gpu, caplog):
    gpu("9.0")
    small = dataclasses.replace(EIGHT_B, head_dim=64, num_heads=9, num_kv_heads=3, hidden_size=608)
    choose(small)
    assert len(caplog.messages) == 1 and "add_norm" in caplog.text and "hidden_size=608" in caplog.text
    caplog.clear()
    choose(small, quantization="fp8")
    assert [line.split(":")[1] for line in caplog.messages] == [" quantize_rows", " add_norm"]
    caplog.clear()
    choose(dtype="float32")
    assert "rope_append, decode_attention, chunk_attention" in caplog.text and "dtype=float32" in caplog.text
    assert "grouped_gemm" not in caplog.text and "quantize_rows" not in caplog.text


@pytest.mark.parametrize(
    ("kernels", "settings", "model", "words"),
    [
        ("mosaic", {"block_size": 16}, {}, "block_size=16 is not supported: only 64 with kernels='mosaic'"),
        (
            "mosaic",
            {"kv_cache_dtype": "float32"},
            {},
            "kv_cache_dtype='float32' is not supported: only bfloat16, fp8 or int8 with",
        ),
        (
            "mosaic",
            {},
            {"head_dim": 96},
            "head_dim=96 is not supported: only 64, 128, 256 or 512 with kernels='mosaic'",
        ),
        (
            "mosaic",
            {},
            {"num_kv_heads": 1},
            "queries_per_kv_head=32 is not supported: only up to 16 with kernels='mosaic'",
        ),
        ("triton", {"block_size": 16}, {}, "block_size=16 is not supported: only 64 with kernels='triton'"),
        (
            "triton",
            {"kv_cache_dtype": "fp8"},
            {},
            "kv_cache_dtype='fp8' is not supported: only bfloat16, the dtype of the weights with",
        ),
        ("triton", {"kv_cache_dtype": "int8"}, {}, "kv_cache_dtype='int8' is not supported: only bfloat16"),
    ],
)
def test_a_set_that_was_asked_for_and_has_no_attention_is_refused(
    gpu, caplog, kernels, settings, model, words
):
    gpu("9.0")
    with pytest.raises(ConfigError) as caught:
        choose(dataclasses.replace(EIGHT_B, **model), kernels=kernels, **settings)
    assert str(caught.value).startswith(words) and caught.value.field == words.partition("=")[0]
    choose(dataclasses.replace(EIGHT_B, **model), **settings)  # nobody asked for a set: it runs


def test_it_is_refused_before_weights_are_read(monkeypatch):
    checkpoint = open_checkpoint(LLAMA)
    config = resolve(EngineConfig(LLAMA, kernels="mosaic"), checkpoint.model_config)
    monkeypatch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("it loads"))
    with pytest.raises(ConfigError, match=r"kernels='mosaic' .* this is cpu"):
        make_executor(config, checkpoint, {})


def test_kernels_go_by_the_device_unless_forced():
    model = open_checkpoint(LLAMA).model_config
    config = resolve(EngineConfig(model=LLAMA), model)
    assert choose_kernels(config, model) is CPU
    assert choose_kernels(dataclasses.replace(config, kernels="reference"), model) is REFERENCE
    for kernels, need in (
        ("mosaic", "GPUs of compute capability 9.0"),
        ("triton", "NVIDIA GPUs, with the extra `triton`"),
    ):
        with pytest.raises(
            ConfigError, match=f"^kernels='{kernels}' is not supported: accepted are {need}, this is cpu$"
        ):
            choose_kernels(dataclasses.replace(config, kernels=kernels), model)
    with pytest.raises(ConfigError, match="kernels='fast'"):
        EngineConfig(model=LLAMA, kernels="fast")


class TestTold:
    """pytest has its own handlers at the root logger, with level WARNING unless a test sets another."""

    QKV = Shape(6144, 4096)
    KERNELS = dataclasses.replace(
        REFERENCE, name="some", gemm=HopperGemm(Table("a GPU", (Rule(QKV, (Choice(1, "fma"),)),)))
    )
    PRODUCTS = {"qkv": product_of(QKV, 1)}  # noqa: RUF012

    def test_beside_the_progress(self, caplog, capsys):
        tell_kernels(self.KERNELS, self.PRODUCTS, progress=True)
        out, err = capsys.readouterr()
        assert (out, err) == ("", self.KERNELS.describe(self.PRODUCTS) + "\n") and "qkv [6144, 4096]" in err
        assert not caplog.records

    def test_in_a_log_that_keeps_it_and_then_nowhere_else(self, caplog, capsys):
        with caplog.at_level(logging.INFO):
            for progress in (True, False):
                tell_kernels(self.KERNELS, self.PRODUCTS, progress)
        assert caplog.messages == [self.KERNELS.describe(self.PRODUCTS)] * 2
        assert capsys.readouterr() == ("", "")

    def test_a_level_without_a_handler_shows_nothing(self, monkeypatch, capsys):
        """A process with a log level and no handler: Python's last resort prints warnings only."""
        alone = logging.Logger("alone", logging.INFO)
        monkeypatch.setattr(start_kernels, "log", alone)
        tell_kernels(self.KERNELS, self.PRODUCTS, progress=True)
        assert capsys.readouterr().err.startswith("kernels: some (")

    def test_without_progress_nothing(self, caplog, capsys):
        tell_kernels(self.KERNELS, self.PRODUCTS, progress=False)
        assert capsys.readouterr() == ("", "") and not caplog.records

    def test_twins_alone_are_a_line(self, capsys):
        float32 = {"page_size": 64, "dtype": "float32", "kv_dtype": "float32"}
        hopper = kernel_set_for("gpu", "9.0", head_dim=128, queries_per_kv_head=4, **float32)
        for kernels in (REFERENCE, hopper):
            tell_kernels(kernels, self.PRODUCTS, progress=True)
            assert capsys.readouterr().err == f"kernels: {kernels.name}, for every op\n"
