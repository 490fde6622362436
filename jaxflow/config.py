"""Frozen configurations: `ModelConfig` is an architecture, `EngineConfig` holds the settings of an engine.

This module imports no JAX and reads no file. `jaxflow.model.architectures.hf_config` reads `config.json` into
a `ModelConfig`. The command lines and `jaxflow.LLM` make an `EngineConfig`.
"""

import dataclasses
import difflib
import functools
import math
import numbers
import operator
import os
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Literal, get_args, get_type_hints

Activation = Literal["silu", "gelu_tanh", "relu", "clamped_swiglu"]  # the last one of experts only


class ConfigError(ValueError):
    """A setting that is not supported. The message names the field, the value and the accepted values."""

    def __init__(self, field: str, value: object, accepted: str):
        self.field, self.value, self.accepted = field, value, accepted
        super().__init__(f"{field}={value!r} is not supported: {accepted}")


# The types that a field of each annotated type accepts, and their name in an error.
_ACCEPTED: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
}


def check_types(settings: Any, error: Callable[[str, object, str], Exception]) -> None:
    """Check that each text, number and truth value of a dataclass has the type of its field.

    A path becomes the text of the path. Fields of other types are not checked.

    Raises:
      What `error` makes of the field, its value and the accepted values.
    """
    values_of, fields = _field_types(type(settings))
    for value, (field, types, abstract, words) in zip(values_of(settings), fields, strict=True):
        if type(value) in types:
            continue
        if abstract is str and isinstance(value, os.PathLike):
            object.__setattr__(settings, field, os.fspath(value))
        elif isinstance(value, bool) or not isinstance(value, abstract):
            raise error(field, value, words)


@functools.cache
def _field_types(kind: type) -> tuple[Callable, tuple[tuple[str, tuple[type, ...], type, str], ...]]:
    """Return a function that reads the fields of a dataclass that `check_types` checks, and these fields.

    Each field has its name, its usual types, the abstract type that further types belong to, and the words
    of an error.
    """
    found = []
    for field, hint in get_type_hints(kind).items():
        types = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        known = [each for each in types if each in _ACCEPTED]
        if len(known) != 1 or not set(types) <= {*_ACCEPTED, type(None)}:
            continue
        abstract, words = _ACCEPTED[known[0]]
        usual = (*types, int) if known[0] is float else types
        found.append((field, usual, abstract, words + (" or None" if type(None) in types else "")))
    return operator.attrgetter(*(field for field, *_ in found)), tuple(found)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one layer, and its context extension (`jaxflow.model.rope`).

    part: the part of a head's columns that rotates. In checkpoints these are the head's first columns, or
      with `proportional` the first columns of each half.
    """

    theta: float
    scaling: Literal["default", "linear", "llama3", "yarn", "proportional"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0  # yarn: planes with more turns in the original context keep their frequency
    beta_slow: float = 1.0  # yarn: planes with fewer turns are interpolated
    truncate: bool = True  # yarn: the two borders are whole planes
    attention_factor: float = 1.0  # yarn: of cos and sin; `ModelConfig.scale` applies it to queries and keys
    part: float = 1.0

    def width(self, head_dim: int) -> int:
        """Return the number of columns of a head that rotate."""
        return int(head_dim * self.part)


SPAN_UNITS = 1024  # `Span.beta` counts parts of a token of so many


@dataclasses.dataclass(frozen=True)
class Span:
    """The keys that a KV head sees (MoA; FlashDecoding++Next §III): sink tokens and a window that grows.

    A query at position p sees key j <= p if j < sinks or p - j < window(p). The window is
    alpha + beta · (p + 1) / 1024 tokens, rounded up: it depends on the query's position alone. So the result
    of attention does not depend on batches and chunks. beta is at most 1024. So the first key of the window
    never moves back, and a page that a query no longer sees is never seen again.
    """

    sinks: int
    alpha: int
    beta: int

    def window(self, position: Any) -> Any:
        """Return the last keys that a query sees, its own included. position: int, or an array of int."""
        return self.alpha - (-self.beta * (position + 1)) // SPAN_UNITS


Window = int | Span | None  # the last keys that a query sees, an elastic span, or None for all keys


@dataclasses.dataclass(frozen=True)
class Layer:
    """Settings that may differ between the layers of a model."""

    window: int | None = (
        None  # attention covers the token and the window - 1 tokens before it; None: full attention
    )
    rope: Rope | None = None  # None: learned positions, or no positions
    experts: bool = False  # a mixture of experts instead of a dense MLP
    spans: tuple[Span, ...] | None = None  # of each KV head; None: all heads have `window`
    head_groups: tuple[int, ...] = ()  # with spans: the page group of each KV head
    num_kv_heads: int | None = None  # None: the model's. Layers of one window have the same head shape.
    head_dim: int | None = None  # None: the model's
    keys_are_values: bool = False  # one projection makes the keys and the values
    shares_kv: bool = False  # makes no keys and values, and reads another layer's (`ModelConfig.cache_of`)
    intermediate_size: int | None = None  # of the dense MLP; None: the model's

    @property
    def group_heads(self) -> dict[int, tuple[int, ...]]:
        """Return the KV heads of each page group, with spans.

        Groups without a head of the layer are missing.
        """
        return {
            group: tuple(head for head, own in enumerate(self.head_groups) if own == group)
            for group in sorted(set(self.head_groups))
        }


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, §2.1).

    A token's keys and values of all heads are products of one latent vector. The cache holds this vector,
    and one rotary key for all heads.

    query_rank: width of the vector that the queries of all heads are products of.
    rank: width of the latent vector.
    plain_dim, rope_dim: columns of a head's query and key without and with rotary embedding.
    value_dim: columns of a head's value.
    interleaved: in checkpoints, rotary plane i is the columns 2i and 2i + 1, and not i and rope_dim / 2 + i.
    """

    query_rank: int
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True


@dataclasses.dataclass(frozen=True)
class SigmoidRouter:
    """A router that scores an expert by the sigmoid of its logit (DeepSeek-V3, arXiv:2412.19437, §2.1.2).

    A learned bias of each expert is added to the scores for the choice only. The experts lie in `groups`
    equal groups. A token goes to experts of its `groups_per_token` best groups. The score of a group is
    the sum of its two best scores.

    scale: the factor of the weights of the chosen experts.
    """

    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of one decoder-only transformer.

    Letters of array shapes: D `hidden_size`, N `num_heads`, K `num_kv_heads`, H `head_dim`,
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
    max_position: int  # context length in tokens that the checkpoint was trained for
    activation: Activation = "silu"
    gated_mlp: bool = True
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_eps: float = 1e-5
    norm_weight_offset: float = 0.0  # Gemma scales by 1 + w
    post_norms: bool = False  # norms after attention and after the MLP, before the residual add
    qkv_bias: bool = False
    out_proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    value_norm: bool = False  # values are normed, without a weight
    learned_position_offset: int | None = None  # OPT: row of position 0 in the position table
    attention_scale: float | None = None  # None: 1 / sqrt(H)
    attention_soft_cap: float | None = None
    attention_sinks: bool = False  # a learned logit of each query head in the softmax's denominator
    latent: Latent | None = None  # its H is plain_dim + rope_dim, and its K is 1
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    router: SigmoidRouter | None = None  # None: the scores are a softmax over all experts
    shared_expert_intermediate_size: int = 0  # the width of all shared experts together; 0 for none
    prediction_layers: int = 0  # layers after the last one, which predict further tokens and are ignored
    router_scales: bool = False  # factors of the router's input, by column, and of its weights, by expert
    branch_norms: bool = False  # norms of their own for the shared and the routed experts of a layer
    layer_scalars: bool = False  # a factor of the residual stream after each layer
    layer_input_size: int = 0  # the width of each layer's own embedding of a token; 0 for none
    router_bias: bool = False
    expert_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    span_classes: tuple[Window, ...] = ()  # with attention spans: the window of each page group of heads

    @property
    def num_layers(self) -> int:
        """Return L, the number of layers."""
        return len(self.layers)

    @property
    def head_shapes(self) -> set[tuple[int, int]]:
        """Return the distinct (number of KV heads, head width) of the layers."""
        layers = (self.for_layer(layer) for layer in set(self.layers))
        return {(own.num_kv_heads, own.head_dim) for own in layers}

    def for_layer(self, layer: Layer) -> "ModelConfig":
        """Return the config with the KV heads, the head width and the MLP width of a layer."""
        own = {
            name: value
            for name in ("num_kv_heads", "head_dim", "intermediate_size")
            if (value := getattr(layer, name)) is not None
        }
        return dataclasses.replace(self, **own) if own else self

    @property
    def widest_mlp(self) -> int:
        """Return the largest width of a dense MLP."""
        return max(self.for_layer(layer).intermediate_size for layer in set(self.layers))

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers with keys and values of their own in the cache."""
        return tuple(index for index, layer in enumerate(self.layers) if not layer.shares_kv)

    def cache_of(self, index: int) -> int:
        """Return the index of the layer whose keys and values layer `index` reads.

        A layer that shares keys and values reads those of the last layer of its window that has its own.
        """
        layer = self.layers[index]
        if not layer.shares_kv:
            return index
        return max(i for i in self.cached_layers if i < index and self.layers[i].window == layer.window)

    @property
    def scale(self) -> float:
        """Return the factor of q·k in attention. All layers have the same `Rope.attention_factor`.

        With latent attention the factor of the rope is part of the rotary queries.
        """
        base = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        rope = next((layer.rope for layer in self.layers), None)
        return base if rope is None or self.latent is not None else base * rope.attention_factor**2

    @property
    def kv_width(self) -> int:
        """Return the numbers of a token in the cache of one layer: its keys
        and values, or its latent vector.
        """
        latent = self.latent
        return 2 * self.num_kv_heads * self.head_dim if latent is None else latent.rank + latent.rope_dim

    @property
    def windows(self) -> tuple[Window, ...]:
        """Return the window of each page group: the layers' distinct ones, or the classes of attention spans.

        Full attention is first.
        """
        if self.span_classes:
            return self.span_classes
        return tuple(sorted({layer.window for layer in self.layers}, key=lambda w: (w is not None, w or 0)))

    @property
    def gate_block(self) -> int:
        """Return the block size of the fused `up_gate` weight, where blocks of
        gate rows and up rows alternate.

        The size is a power of two, at most 64. 8 tensor-parallel shards end at a block border if F allows it.
        """
        return gate_block(self.intermediate_size)


def check_has_heads(model: ModelConfig, what: str) -> None:
    """Refuse a model for what needs keys and values by head, of one shape in all layers.

    Raises: ConfigError.
    """
    if model.latent is not None:
        raise ConfigError(
            "model",
            model.architecture,
            f"a model without latent attention: {what} needs keys and values by head",
        )
    if len(model.head_shapes) > 1:
        accepted = f"a model whose layers have equal heads: {what} needs one head width in all layers"
        raise ConfigError("model", model.architecture, accepted)
    check_has_own_inputs(model, "model", model.architecture, what)


def check_has_own_inputs(model: ModelConfig, field: str, value: object, what: str) -> None:
    """Refuse a model whose layers read more than the layer before, for what needs such layers.

    Layers may share keys and values, or read embeddings of their own.

    Raises: ConfigError with this field and value.
    """
    if any(layer.shares_kv for layer in model.layers):
        accepted = f"a model whose layers have keys and values of their own: {what} needs them"
        raise ConfigError(field, value, accepted)
    if model.layer_input_size:
        accepted = f"a model without embeddings of each layer: {what} passes only hidden values to a layer"
        raise ConfigError(field, value, accepted)


def gate_block(intermediate_size: int) -> int:
    """Return `ModelConfig.gate_block` for an MLP width F."""
    power_of_two = intermediate_size & -intermediate_size
    return max(1, min(64, power_of_two // 8))


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """The number of devices along each axis of parallelism.

    Raises:
      ConfigError: for a size below 1, and for ep other than 1 or tp · dp.
    """

    tp: int = 1  # tensor parallelism: each device holds some heads and MLP columns of every layer
    pp: int = 1  # pipeline parallelism: each stage holds consecutive layers
    ep: int = 1  # expert parallelism: the devices of a stage that share whole experts, one or all
    dp: int = 1  # data parallelism: each rank holds all but the experts, and serves requests of its own

    @property
    def devices(self) -> int:
        """Return the number of devices that the model runs on."""
        return self.tp * self.pp * self.dp  # experts are spread over the same devices

    def __post_init__(self) -> None:
        for field, accepted in (("tp", "devices"), ("pp", "stages"), ("dp", "ranks")):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), f"a positive number of {accepted}")
        whole = self.tp * self.dp
        if self.ep not in (1, whole):
            raise ConfigError(
                "ep", self.ep, f"1, or tp · dp = {whole}: all devices of a stage share the experts"
            )


MAX_STEP_TOKENS = 2**20

# Array dtype of each value of `kv_cache_dtype`. None: the dtype of the model.
KV_DTYPES = {
    "auto": None,
    "bfloat16": "bfloat16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "int8": "int8",
}


# The values that `enforce_eager` accepts: field, test, words.
EAGER: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("plan", lambda plan: plan in ("auto", "sequential"), "auto or sequential"),
    ("step_sizes", lambda sizes: sizes is None, "unset"),
    ("lowering_processes", lambda count: not count, "0 or unset"),
    ("batch_tpot_ms", lambda limit: limit is None, "unset"),
    ("data_parallel_size", lambda size: size == 1, "1"),
)

# The values that data-parallel ranks accept: field, test, words.
RANKED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("enable_expert_parallel", bool, "True"),
    ("pipeline_parallel_size", lambda size: size == 1, "1"),
    ("attention_spans", lambda file: file is None, "unset"),
    ("batch_tpot_ms", lambda limit: limit is None, "unset"),
)


def _setting(default: Any, text: str) -> Any:
    """Return a dataclass field with its help text, which the command lines show."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine. Fields that vLLM has carry vLLM's names and meanings.

    Raises:
      ConfigError: a value that no engine can run with. The error names the field.
    """

    model: str = _setting(
        dataclasses.MISSING,
        "Model to run: a folder with config.json and safetensors, a .gguf file, a converted checkpoint, a "
        "hub id, or the name of a shipped config.",
    )
    tokenizer: str | None = _setting(None, "Folder or .gguf file of the tokenizer. Default: the model's.")
    dtype: str = _setting(
        "auto",
        "dtype of weights and activations: bfloat16, float32, or auto (bfloat16 on a GPU, float32 on CPU).",
    )
    load_format: str = _setting(
        "auto",
        "auto: load the weights of the checkpoint. dummy: random weights, which need only config.json.",
    )
    quantization: str | None = _setting(
        None,
        "Quantization at load: fp8 (e4m3 weights and activations), fp8_per_block (e4m3 with a scale for "
        "each 128 x 128 block), int4 (weights in groups of 64, experts too; AWQ, GPTQ and "
        "pack-quantized checkpoints keep their numbers), int4_zero_point (int4 with zero points, the format "
        "of these checkpoints) or mxfp4 (the experts of gpt-oss stay in the checkpoint's 4 bits). Default: "
        "the format of the checkpoint. Partial blocks of an fp8 checkpoint become 16 bits, and so do experts "
        "in MXFP4 on other devices than Hopper GPUs.",
    )
    kv_cache_dtype: str = _setting(
        "auto",
        "dtype of the KV cache: auto (the dtype of the model), bfloat16, float32, fp8 (e4m3, with the scales "
        "of the checkpoint or 1) or int8.",
    )
    block_size: int = _setting(
        64,
        "Tokens in a page of the KV cache. GPU attention kernels need 64; other sizes run the slower "
        "reference implementation.",
    )
    tensor_parallel_size: int = _setting(1, "Number of devices that the model is sharded over.")
    pipeline_parallel_size: int = _setting(
        1,
        "Number of pipeline stages. Each stage holds some consecutive layers, on tensor_parallel_size "
        "devices.",
    )
    data_parallel_size: int = _setting(
        1,
        "Number of data-parallel ranks of tensor_parallel_size devices each, with --enable_expert_parallel. "
        "A rank serves requests of its own with attention of its own, and all devices share the experts.",
    )
    enable_expert_parallel: bool = _setting(
        False,
        "Each device of tensor_parallel_size or data_parallel_size holds some experts of a mixture whole, "
        "instead of a share of every expert. Refused for a model without experts.",
    )
    enable_eplb: bool = _setting(
        False,
        "Place the experts anew by measured loads, with --enable_expert_parallel, so that all devices have "
        "about as many tokens.",
    )
    num_redundant_experts: int = _setting(
        0, "Further copies of busy experts in each mixture layer, with --enable_eplb."
    )
    eplb_step_interval: int = _setting(
        50, "Steps between two placements of the experts, with --enable_eplb. A placement reads their loads."
    )
    max_model_len: int | None = _setting(
        None, "Longest sequence in tokens, prompt and output together. Default: the limit of the model."
    )
    max_num_batched_tokens: int | None = _setting(
        None,
        "Most tokens of a step, on each data-parallel rank. Default: 2048 on a GPU, up to 4096 for "
        "mixtures of many experts, or the step of the shipped plan where another size is faster; 256 on CPU.",
    )
    step_sizes: str | None = _setting(
        None,
        "Sizes in tokens of the smaller compiled steps, as 256,512. Fewer sizes start faster and pad more. "
        "In Python also a list or a tuple of numbers. Default: powers of two and a few sizes between.",
    )
    max_num_seqs: int | None = _setting(
        None,
        "Most sequences that run at the same time, on each data-parallel rank. Default: a third of "
        "--max_num_batched_tokens in tiles of 128, at least 64, or fewer where the memory does not hold 512 "
        "tokens of each.",
    )
    max_waiting: int = _setting(4096, "Most requests in the waiting queue. Further requests are refused.")
    batch_tpot_ms: float | None = _setting(
        None,
        "Most predicted milliseconds of a step that serves both online and batch requests. Such a step takes "
        "batch tokens only up to this limit. Refused with more than one pipeline stage. Default: no limit.",
    )
    gpu_memory_utilization: float = _setting(0.9, "Fraction of the device memory that the engine uses.")
    num_kv_pages: int | None = _setting(
        None,
        "Pages of the KV cache, on each data-parallel rank. Default: as many as fit the memory; on a CPU for "
        "32,768 tokens, or 512 a sequence.",
    )
    attention_spans: str | None = _setting(
        None,
        "File of `python -m search spans`: the span of each KV head. A head then sees the first tokens and "
        "the last ones only, and its other pages are freed. Default: full attention.",
    )
    enable_prefix_caching: bool = _setting(True, "Share the KV of equal prompt prefixes between requests.")
    kv_offloading_size: float = _setting(
        0.0,
        "GiB of host memory for KV pages of evicted prefixes and pre-empted requests, of all data-parallel "
        "ranks together. 0: no KV offloading.",
    )
    kv_disk_path: str | None = _setting(
        None,
        "Folder of the disk tier, which keeps KV pages across restarts. Servers must not share a folder.",
    )
    kv_disk_size: float | None = _setting(None, "Most GiB of KV pages in --kv_disk_path.")
    seed: int = _setting(0, "Seed of dummy weights, and of requests without a seed.")
    calibration: str | None = _setting(
        None,
        "File of `python -m jaxflow.model.checkpoints.calibrate`. Default: the file next to the model, if it "
        "exists. Empty: no calibration.",
    )
    plan: str = _setting(
        "auto",
        "Plans of the steps: sequential, searched (the shipped plans for this model and device), a plan file "
        "or a folder of plans. auto: searched where a plan is certain to be faster, else sequential.",
    )
    kernels: str = _setting(
        "auto",
        "Kernels: reference (XLA), mosaic (Hopper), triton (other NVIDIA GPUs, with the extra triton), or "
        "auto (by device). A kernel set without attention for the model is refused.",
    )
    enforce_eager: bool = _setting(
        False,
        "Serve the first token sooner, with slower steps: equal layers share one compiled program, there are "
        "three sizes of steps, and on a GPU nothing is compiled in the background. Refused with a plan other "
        "than sequential, --step_sizes, --lowering_processes, --batch_tpot_ms and data-parallel ranks.",
    )
    compilation_cache_dir: str | None = _setting(
        None,
        "Folder of compiled and lowered programs. Default: ~/.cache/jaxflow/compiled. Empty: no cache.",
    )
    lowering_processes: int | None = _setting(
        None,
        "Processes that lower and compile programs at a start whose programs are not in the cache, each "
        "with 1 GiB of host memory, or 2 GiB for 80 layers. 0: the engine does. Default: on Hopper, half of "
        "the CPU cores, at most 8, or more with many programs or more than 32 layers; elsewhere 0.",
    )
    coordinator: str | None = _setting(
        None,
        "HOST:PORT of process 0, for one engine over several processes. auto: from the variables of Slurm, "
        "LeaderWorkerSet, MPI, torchrun or Ray Train. Default: one process.",
    )
    num_processes: int | None = _setting(
        None, "Processes of the engine, with --coordinator. Default: from the launcher's variables."
    )
    process_id: int | None = _setting(
        None,
        "Number of this process, from 0, with --coordinator. Process 0 serves; the others follow it. "
        "Default: from the launcher's variables.",
    )
    join_timeout_s: float = _setting(
        300.0, "Most seconds that a process waits for the others to start, with --coordinator."
    )
    step_timeout_s: float = _setting(
        60.0, "Most seconds of a step of several processes. Then all processes end, and name the stuck one."
    )

    @property
    def parallel(self) -> ParallelConfig:
        """Return the sizes of all axes of parallelism."""
        tp, dp = self.tensor_parallel_size, self.data_parallel_size
        ep = tp * dp if self.enable_expert_parallel else 1
        return ParallelConfig(tp, self.pipeline_parallel_size, ep, dp)

    def __post_init__(self) -> None:
        def check(field: str, ok: bool, accepted: str) -> None:
            if not ok:
                raise ConfigError(field, getattr(self, field), accepted)

        if isinstance(self.step_sizes, list | tuple):  # of the Python API; flags and files hold text
            object.__setattr__(self, "step_sizes", ",".join(map(str, self.step_sizes)))
        check_types(self, ConfigError)

        check("model", bool(self.model), "a folder, a .gguf file, a hub id or the name of a shipped config")
        check("dtype", self.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16")
        check("load_format", self.load_format in ("auto", "dummy"), "auto or dummy")
        check(
            "quantization",
            self.quantization in (None, "fp8", "fp8_per_block", "int4", "int4_zero_point", "mxfp4"),
            "fp8, fp8_per_block, int4, int4_zero_point, mxfp4, or unset for the format of the checkpoint",
        )
        check("kv_cache_dtype", self.kv_cache_dtype in KV_DTYPES, ", ".join(KV_DTYPES))
        processes = self.lowering_processes
        check("lowering_processes", processes is None or 0 <= processes <= 64, "0 to 64 processes, or unset")
        check("block_size", 1 <= self.block_size <= 1024, "1 to 1024 tokens a page")
        check("tensor_parallel_size", self.tensor_parallel_size >= 1, "a positive number of devices")
        check("pipeline_parallel_size", self.pipeline_parallel_size >= 1, "a positive number of stages")
        eplb = self.enable_eplb
        check("enable_eplb", not eplb or self.enable_expert_parallel, "False without enable_expert_parallel")
        one = self.pipeline_parallel_size == 1
        check("enable_eplb", not eplb or one, "False with several pipeline stages")
        check("num_redundant_experts", self.num_redundant_experts >= 0, "0 or more copies")
        check("num_redundant_experts", eplb or not self.num_redundant_experts, "0 without enable_eplb")
        check("eplb_step_interval", self.eplb_step_interval >= 1, "a positive number of steps")
        spans = self.attention_spans
        check("attention_spans", spans != "", "a file, or unset")
        for field in ("tensor_parallel_size", "pipeline_parallel_size"):
            one = getattr(self, field) == 1
            check(field, one or spans is None, "1 with attention_spans: one device holds the groups of heads")
        check("data_parallel_size", self.data_parallel_size >= 1, "a positive number of ranks")
        for field, ok, accepted in RANKED if self.data_parallel_size > 1 else ():
            check(field, ok(getattr(self, field)), f"{accepted} with data_parallel_size over 1")
        ranked_team = self.data_parallel_size > 1 and self.coordinator is not None
        check(
            "kv_offloading_size",
            not (ranked_team and self.kv_offloading_size),
            "0 with data_parallel_size over 1 and several processes",
        )
        for field, ok, accepted in EAGER if self.enforce_eager else ():
            check(field, ok(getattr(self, field)), f"{accepted} with enforce_eager")
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
            "numbers of tokens, as '256,512' or (256, 512)",
        )
        tokens = self.max_num_batched_tokens
        check(
            "max_num_batched_tokens", tokens is None or tokens <= MAX_STEP_TOKENS, f"1 to {MAX_STEP_TOKENS}"
        )
        check("max_num_seqs", self.max_num_seqs is None or self.max_num_seqs <= 4096, "at most 4096")
        check("max_waiting", self.max_waiting >= 1, "a positive number")
        limit = self.batch_tpot_ms
        check(
            "batch_tpot_ms", limit is None or (math.isfinite(limit) and limit > 0), "milliseconds, or unset"
        )
        check(
            "batch_tpot_ms",
            limit is None or self.pipeline_parallel_size == 1,
            "unset with pipeline_parallel_size over 1: the time of a micro-batch is not predicted",
        )
        ratio = self.gpu_memory_utilization
        check("gpu_memory_utilization", math.isfinite(ratio) and 0 < ratio <= 1, "a fraction in (0, 1]")
        size = self.kv_offloading_size
        check("kv_offloading_size", math.isfinite(size) and size >= 0, "GiB of host memory, or 0")
        size, disk = self.kv_disk_size, self.kv_disk_path is not None
        # An empty path would mean the working directory.
        check("kv_disk_path", self.kv_disk_path != "", "a folder, or unset")
        check(
            "kv_disk_path",
            not disk or self.kv_offloading_size > 0,
            "unset without kv_offloading_size, because pages go to disk through host memory",
        )
        check(
            "kv_disk_size",
            disk == (size is not None),
            "GiB of files together with kv_disk_path, unset without kv_disk_path",
        )
        check("kv_disk_size", size is None or (math.isfinite(size) and size > 0), "a positive number of GiB")
        for field in ("join_timeout_s", "step_timeout_s"):
            seconds = getattr(self, field)
            check(field, math.isfinite(seconds) and seconds > 0, "a positive number of seconds")
        check(
            "kernels",
            self.kernels in ("auto", "reference", "mosaic", "triton"),
            "auto, reference, mosaic or triton",
        )


# Settings of vLLM that JaxFlow has under another name or not at all, and what takes the place of each.
OTHER_SETTINGS = {
    "cpu_offload_gb": "`LLM(model, offload=...)` runs a model that does not fit the device",
    "disable_log_requests": "--request_log turns the log of requests on",
    "distributed_executor_backend": "coordinator joins several processes to one engine",
    "enable_chunked_prefill": "prefill is always chunked",
    "enable_lora": "LoRA adapters are not served: merge the adapter into the checkpoint",
    "lora_modules": "LoRA adapters are not served: merge the adapter into the checkpoint",
    "max_lora_rank": "LoRA adapters are not served: merge the adapter into the checkpoint",
    "num_scheduler_steps": "the next step is always scheduled while a step runs",
    "revision": "download the revision, and give its folder as the model",
    "speculative_config": "speculative decoding is not supported",
    "swap_space": "kv_offloading_size keeps pages of the KV cache in host memory",
    "tokenizer_mode": "there is one kind of tokenizer",
    "trust_remote_code": "a checkpoint runs no code here, so no trust is needed",
}


def engine_config(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """Return the settings of an engine from a model and settings by name.

    Raises:
      ConfigError: a setting that does not exist, or as `EngineConfig`.
    """
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name, value in settings.items():
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known)) or "the fields of EngineConfig"
            raise ConfigError(name, value, OTHER_SETTINGS.get(name, f"no such setting; there is {near}"))
    return EngineConfig(model=model, **settings)
