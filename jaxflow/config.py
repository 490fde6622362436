"""What to run (`ModelConfig`: the architecture) and how to run it (`EngineConfig`). Both are frozen data.

Nothing here touches JAX or a file: `jaxflow.model.architectures.hf_config` reads a checkpoint's `config.json` into a
`ModelConfig`, the command lines and `jaxflow.LLM` fill an `EngineConfig`.
"""

import dataclasses
import math
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu"]


class ConfigError(ValueError):
    """A setting that cannot work. The message names the field, the value and what would be accepted."""

    def __init__(self, field: str, value: object, accepted: str):
        self.field, self.value, self.accepted = field, value, accepted
        super().__init__(f"{field}={value!r} is not supported: {accepted}")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one layer; `scaling` is `default`, `linear` or `llama3`."""

    theta: float
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one layer has that its neighbours may not."""

    window: int | None = None  # a query sees itself and the window - 1 keys before it; None: all
    rope: Rope | None = None  # None: learned positions, or none
    experts: bool = False  # a mixture of experts instead of a dense MLP


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of one decoder-only transformer; every family is a setting of these fields.

    Letters as in the design: D `hidden_size`, N `num_heads`, K `num_kv_heads`, H `head_dim`,
    F `intermediate_size`, V `vocab_size`, L `num_layers`.
    """

    architecture: str  # Hugging Face's model_type: llama, mistral, qwen2, gemma2, ...
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[Layer, ...]
    max_position: int  # the longest context the checkpoint was made for
    activation: Activation = "silu"
    gated_mlp: bool = True
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_eps: float = 1e-5
    norm_weight_offset: float = 0.0  # Gemma scales by 1 + w
    post_norms: bool = False  # norms after attention and after the MLP, before the residual is added
    qkv_bias: bool = False
    out_proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    learned_position_offset: int | None = None  # OPT: row of position 0 in its position table
    attention_scale: float | None = None  # None: 1 / sqrt(H)
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def scale(self) -> float:
        """What q·k is multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers, full attention first: the layer groups of the page table (axis
        G).
        """
        return tuple(sorted({layer.window for layer in self.layers}, key=lambda w: (w is not None, w or 0)))

    @property
    def gate_block(self) -> int:
        """Rows of gate, then rows of up, alternate in blocks of this many in the fused `up_gate` weight.

        A power of two, at most 64, such that 8 tensor-parallel shards still cut between blocks wherever F
        allows it.
        """
        return gate_block(self.intermediate_size)


def gate_block(intermediate_size: int) -> int:
    """The block of `ModelConfig.gate_block` for an MLP width F."""
    power_of_two = intermediate_size & -intermediate_size
    return max(1, min(64, power_of_two // 8))


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """The number of devices along each axis of parallelism.

    Raises:
      ConfigError: for a size below 1. For pp, ep or dp other than 1: no engine runs these axes yet.
    """

    tp: int = 1  # tensor parallelism: each device holds some heads and MLP columns of every layer
    pp: int = 1  # pipeline parallelism: each stage holds consecutive layers
    ep: int = 1  # expert parallelism: each device holds some experts of every layer
    dp: int = 1  # data parallelism: each replica holds the full model

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ConfigError("tp", self.tp, "a positive number of devices")
        for field in ("pp", "ep", "dp"):
            if (size := getattr(self, field)) != 1:
                raise ConfigError(field, size, "1, the only size that engines run today")


# The settings of `kv_cache_dtype`, and the array dtype each stands for; auto is the model's.
KV_DTYPES = {
    "auto": None,
    "bfloat16": "bfloat16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "int8": "int8",
}


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How to run a model. Names and meanings are those of vLLM where it has them.

    Raises:
      ConfigError: for a value no engine could run with, naming the field.
    """

    model: str
    tokenizer: str | None = None  # None: the model's own
    dtype: str = "auto"  # auto: bfloat16 on a GPU, float32 on CPU
    load_format: str = "auto"  # auto or dummy
    quantization: str | None = (
        None  # fp8: e4m3 products; int4: weights of 4 bits; from any checkpoint; None: as the checkpoint is
    )
    kv_cache_dtype: str = "auto"
    block_size: int = 64  # tokens a page; attention's kernels take no other number
    tensor_parallel_size: int = 1
    max_model_len: int | None = None  # None: what the checkpoint was made for
    max_num_batched_tokens: int | None = (
        None  # the dense batch of a step; None: 2048 on a GPU but for some models, 256 on CPU
    )
    step_sizes: str | None = (
        # "256,512": tokens of the steps compiled below that batch; None: powers of two, and what pads little
        None
    )
    max_num_seqs: int | None = None  # running sequences; None: 512 on a GPU, 8 on CPU
    max_waiting: int = 4096  # requests waiting at most; one more is refused
    gpu_memory_utilization: float = 0.9
    num_kv_pages: int | None = None  # None: as memory allows
    enable_prefix_caching: bool = True
    kv_offloading_size: float = 0.0  # GiB of host memory for KV pages; 0: none leave the device
    kv_disk_path: str | None = None  # a folder for KV pages that survive the process; None: none
    kv_disk_size: float | None = None  # GiB of files there, with kv_disk_path only
    seed: int = 0
    calibration: str | None = (
        None  # a file of jaxflow.model.checkpoints.calibrate; None: the one beside the model, if there is one; "": none
    )
    # auto: searched where that is sure to gain; sequential, searched, a plan file or a folder of them
    plan: str = "auto"
    # auto: by the device; reference; mosaic or triton, refused where they have no attention for this
    kernels: str = "auto"
    compilation_cache_dir: str | None = None  # None: ~/.cache/jaxflow/compiled; "": none

    @property
    def parallel(self) -> ParallelConfig:
        """Return the sizes of all axes of parallelism."""
        return ParallelConfig(tp=self.tensor_parallel_size)

    def __post_init__(self) -> None:
        def check(field: str, ok: bool, accepted: str) -> None:
            if not ok:
                raise ConfigError(field, getattr(self, field), accepted)

        check("model", bool(self.model), "a folder, a .gguf file, a hub id or the name of a shipped config")
        check("dtype", self.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16")
        check("load_format", self.load_format in ("auto", "dummy"), "auto or dummy")
        check(
            "quantization",
            self.quantization in (None, "fp8", "int4"),
            "fp8, int4, or unset for what the checkpoint is",
        )
        check("kv_cache_dtype", self.kv_cache_dtype in KV_DTYPES, ", ".join(KV_DTYPES))
        check("block_size", 1 <= self.block_size <= 1024, "1 to 1024 tokens a page")
        check("tensor_parallel_size", self.tensor_parallel_size >= 1, "a positive number of devices")
        for field in (
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "num_kv_pages",
        ):
            value = getattr(self, field)
            check(field, value is None or value >= 1, "a positive number")
        sizes = [] if self.step_sizes is None else self.step_sizes.split(",")
        check(
            "step_sizes",
            all(one.isdecimal() and int(one) for one in sizes),
            "numbers of tokens, like 256,512",
        )
        check("max_num_seqs", self.max_num_seqs is None or self.max_num_seqs <= 4096, "at most 4096")
        check("max_waiting", self.max_waiting >= 1, "a positive number")
        ratio = self.gpu_memory_utilization
        check("gpu_memory_utilization", math.isfinite(ratio) and 0 < ratio <= 1, "a fraction in (0, 1]")
        size = self.kv_offloading_size
        check("kv_offloading_size", math.isfinite(size) and size >= 0, "GiB of host memory, or 0")
        size, disk = self.kv_disk_size, self.kv_disk_path is not None
        check(
            "kv_disk_path", self.kv_disk_path != "", "a folder, or unset"
        )  # an empty path would be the working directory
        check(
            "kv_disk_path",
            not disk or self.kv_offloading_size > 0,
            "unset without kv_offloading_size: pages pass the host's memory",
        )
        check("kv_disk_size", disk == (size is not None), "GiB of files with kv_disk_path, and only with it")
        check("kv_disk_size", size is None or (math.isfinite(size) and size > 0), "a positive number of GiB")
        check(
            "kernels",
            self.kernels in ("auto", "reference", "mosaic", "triton"),
            "auto, reference, mosaic or triton",
        )
