"""Checks of a `quantization_config` of matrices in 4 bits: AWQ, GPTQ, and `pack-quantized` of
compressed-tensors.

Their groups have 64 or 128 columns with a scale and a zero point. `jaxflow.model.checkpoints.packed_int4`
reads the tensors, whose names decide which matrices have 4 bits. So lists of other modules are not needed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxflow.config import ConfigError
from jaxflow.model.architectures.hf_keys import Keys

GROUPS = (64, 128)  # the accepted columns of a group
_AWQ_NAMES = """
    autoround_version backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse modules_to_not_convert
    provider sym
"""
_GPTQ_NAMES = """
    act_group_aware amp autoround_version backend batch_size block_name_to_quantize cache_block_outputs
    damp_auto_increment damp_percent dataset disable_exllama enable_minmax_tuning enable_norm_bias_tuning
    enable_quanted_input exllama_config gradient_accumulate_steps iters lm_head low_gpu_mem_usage lr
    max_input_length meta method minmax_lr model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize nsamples offload_to_disk
    offload_to_disk_path pack_impl pad_token_id provider scale_dtype seqlen static_groups sym tokenizer
    true_sequential use_cuda_fp16 use_exllama v2 v2_alpha
"""


@dataclasses.dataclass(frozen=True)
class PackedInt4:
    """How a checkpoint stores matrices in 4 bits.

    group: columns with one scale. zero_points: the checkpoint has zero points; False: all are 8. less_one:
    the stored zero points are 1 less than the true ones.
    """

    layout: Literal["awq", "gptq", "pack-quantized"]
    group: int
    zero_points: bool = True
    less_one: bool = False


def awq(keys: Keys) -> PackedInt4:
    """Return the form of an AWQ checkpoint. keys: those of its config but `quant_method`.

    Raises:
      ConfigError: a setting that is not supported. The error names the field.
    """
    keys.one_of("bits", 4)
    keys.one_of("zero_point", True)
    keys.one_of("version", None, "gemm", "GEMM", accepts="gemm")
    keys.one_of("data_type", None, "int")
    group = keys.one_of("group_size", *GROUPS)
    keys.finish(_AWQ_NAMES.split(), {})
    return PackedInt4("awq", group)


def gptq(keys: Keys) -> PackedInt4:
    """Return the form of a GPTQ checkpoint. keys: those of its config but `quant_method`.

    Raises:
      ConfigError: a setting that is not supported. The error names the field.
    """
    keys.one_of("bits", 4)
    keys.one_of("desc_act", None, False, accepts="False, where the columns of a group follow each other")
    keys.one_of("is_marlin_format", None, False)
    keys.one_of("pack_dtype", None, "int32")
    keys.one_of("data_type", None, "int")
    names = ("format", "checkpoint_format")  # GPTQModel writes the one or the other
    versions = {keys.one_of(name, None, "gptq", "gptq_v2", accepts="gptq or gptq_v2") for name in names}
    for rule in keys.mapping("dynamic") or {}:
        if not rule.startswith("-:"):
            accepted = "rules that start with -:, which leave modules in 16 bits"
            raise ConfigError(keys.name("dynamic"), rule, accepted)
    group = keys.one_of("group_size", *GROUPS)
    keys.finish(_GPTQ_NAMES.split(), {})
    return PackedInt4("gptq", group, less_one="gptq_v2" not in versions)


def pack_quantized(groups: Sequence[Keys]) -> PackedInt4:
    """Return the form of a checkpoint of compressed-tensors in `pack-quantized`.

    groups: the keys of each of its `config_groups`, at least one.

    Raises:
      ConfigError: a setting that is not supported, or groups of different weights. The error names the field.
    """
    forms = [_packed_group(group) for group in groups]
    for group, form in zip(groups, forms, strict=True):
        if form != forms[0]:
            raise ConfigError(group.name("weights"), form, f"the weights of all groups alike, as {forms[0]}")
    return forms[0]


def _packed_group(keys: Keys) -> PackedInt4:
    numbers = keys.mapping("weights")
    if numbers is None:
        raise ConfigError(keys.name("weights"), None, "int with 4 bits")
    keys.one_of("input_activations", None, accepts="null, for activations in 16 bits")
    keys.one_of("output_activations", None)
    keys.one_of("format", None, "pack-quantized")
    keys.finish(("targets",), {})
    weights = Keys(numbers, keys.name("weights."))
    weights.one_of("num_bits", 4)
    weights.one_of("type", None, "int")
    weights.one_of("strategy", "group")
    weights.one_of("block_structure", None)
    weights.one_of("dynamic", None, False)
    weights.one_of("actorder", None, False, "weight", "static")  # both keep the columns of a group together
    group, symmetric = weights.one_of("group_size", *GROUPS), weights.flag("symmetric", True)
    weights.finish(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"), {})
    return PackedInt4("pack-quantized", group, zero_points=not symmetric)
