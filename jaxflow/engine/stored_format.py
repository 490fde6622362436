"""The format in which an engine keeps the weights of a checkpoint, where the settings name none."""

import dataclasses

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.model.checkpoints.checkpoint import Checkpoint
from jaxflow.model.weights import leaves
from pallas_kernels.kernel_set import has_bounded
from pallas_kernels.this_device import this_device


def with_stored_format(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """Return the config with the format of the loaded weights as its `quantization`.

    Experts of a checkpoint in MXFP4 stay in MXFP4 on a GPU with a kernel for them, if the devices cut between
    groups of 32 columns. They become 16 bits elsewhere, because the reference would convert them each step.
    """
    quantization = checkpoint.quantization_of(config.quantization)
    if config.quantization is None and checkpoint.has_mxfp4 and _keeps_mxfp4(config, checkpoint):
        quantization = "mxfp4"
    return dataclasses.replace(config, quantization=quantization)


def _keeps_mxfp4(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Return whether the devices have a kernel for MXFP4, and hold whole groups of columns."""
    device = this_device()
    if config.kernels == "reference" or device.platform != "gpu" or not has_bounded(device.capability):
        return False
    shares = {"expert_parallel": config.enable_expert_parallel, "ranks": config.data_parallel_size}
    try:
        leaves(checkpoint.model_config, config.tensor_parallel_size, quantization="mxfp4", **shares)
    except ConfigError:
        return False
    return True
