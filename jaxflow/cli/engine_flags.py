"""The settings of the engine as command-line flags, under the names of `EngineConfig`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from absl import flags

from jaxflow.config import EngineConfig

_HELP = {
    "model": (
        "A folder with config.json and safetensors, a .gguf file, a converted checkpoint, a hub id, or "
        "the name of a shipped config."
    ),
    "tokenizer": "A folder or .gguf file to take the tokenizer from instead of the model's own.",
    "dtype": "Of weights and activations: auto (bfloat16 on a GPU, float32 on CPU), bfloat16 or float32.",
    "load_format": "auto: the checkpoint's weights; dummy: random ones, from config.json alone.",
    "quantization": (
        "On load: fp8 (e4m3 weights and activations) or int4 (weights in groups of 64); default: what "
        "the checkpoint is."
    ),
    "kv_cache_dtype": (
        "Of the KV cache: auto (as dtype), bfloat16, float32, fp8 (e4m3; scales are the checkpoint's, or "
        "1) or int8."
    ),
    "block_size": (
        "Tokens in a page of the KV cache. Attention has kernels for 64 alone: on a GPU other sizes run "
        "on the slower reference."
    ),
    "tensor_parallel_size": "Devices to shard the model over.",
    "max_model_len": (
        "Longest sequence, prompt and output together; default: what the checkpoint was made for."
    ),
    "max_num_batched_tokens": "Tokens in a step at most, the dense batch; default: 2048 on a GPU, less where a smaller "
    "step was measured to be better, 256 on CPU.",
    "step_sizes": "Tokens of the steps that are compiled below --max_num_batched_tokens, as 256,512: fewer start sooner, and pad more. "
    "Default: powers of two, and a few that pad little.",
    "max_num_seqs": "Sequences running at once at most; default: 512 on a GPU, 8 on CPU.",
    "max_waiting": "Requests waiting at most; one more is refused.",
    "gpu_memory_utilization": "Share of the device's memory to use.",
    "num_kv_pages": "Pages of KV cache; default: as many as memory allows.",
    "enable_prefix_caching": "Share the KV of equal prompt beginnings between requests.",
    "kv_offloading_size": (
        "GiB of host memory for KV pages: prefixes that left the device, what pre-empted requests go on "
        "from. 0: none."
    ),
    "kv_disk_path": (
        "A folder for KV pages below the host's: prefixes are found there after a restart. One server a "
        "folder."
    ),
    "kv_disk_size": "GiB of files in --kv_disk_path at most.",
    "seed": "Of dummy weights, and of requests that bring none.",
    "calibration": (
        "A file of `python -m jaxflow.model.checkpoints.calibrate`; default: the one beside the model, if there; "
        "empty: none."
    ),
    "plan": "Plans of steps: sequential, searched (those shipped for this model and device), a plan file or a folder of them; auto: "
    "searched where one of those is sure to gain, else sequential.",
    "kernels": "auto: by the device; reference (XLA), mosaic (Hopper) or triton (NVIDIA GPUs, with the extra triton) forces them, "
    "and is refused where they have no attention for the model or its KV cache.",
    "compilation_cache_dir": "Where compiled programs are kept between runs, lowered ones beside them; empty: nowhere. "
    "Default: ~/.cache/jaxflow/compiled.",
}


def define_engine_flags(model: str | None = None) -> None:
    """Defines a flag for every field of `EngineConfig`; `model` is the default of --model, required if None."""
    hints = get_type_hints(EngineConfig)
    define = {
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        bool: flags.DEFINE_bool,
        str: flags.DEFINE_string,
    }
    for field in dataclasses.fields(EngineConfig):
        default = model if field.name == "model" else field.default
        kind = next(t for t in (get_args(hints[field.name]) or (hints[field.name],)) if t is not type(None))
        define[kind](field.name, default, _HELP[field.name])
    if model is None:
        flags.mark_flag_as_required("model")


def engine_config_from_flags() -> EngineConfig:
    """The settings given on the command line. Raises: ConfigError, naming the flag's field."""
    values = flags.FLAGS
    given: dict[str, Any] = {
        field.name: values[field.name].value for field in dataclasses.fields(EngineConfig)
    }
    return EngineConfig(**given)


def parse(argv: Sequence[str]) -> None:
    """Reads a command line of flags alone. Raises: flags.Error, for NaN too: absl finds it within any bounds."""
    rest = flags.FLAGS(argv)[1:]
    if rest:
        raise flags.Error(f"unexpected arguments: {' '.join(rest)}")
    for name, value in flags.FLAGS.flag_values_dict().items():
        if isinstance(value, float) and math.isnan(value):
            raise flags.Error(f"flag --{name}={value}: a number is accepted")
