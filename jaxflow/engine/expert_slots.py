"""The experts of loaded weights in slots of devices, some of them copies."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.expert_balancer import MovedLayer
from jaxflow.model.expert_copies import EXPERT_OF_SLOT, copy_map
from jaxflow.model.expert_placement import place_experts
from jaxflow.model.weights import EXPERT_LEAVES, Weights
from jaxflow.parallel.expert_moves import move_slots
from jaxflow.parallel.mesh import place


def check_slots(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse copies of experts that do not fill the same number of slots on each device.

    Raises:
      ConfigError
    """
    devices = config.tensor_parallel_size * config.data_parallel_size
    experts, more = model.num_experts, config.num_redundant_experts
    if config.enable_eplb and any(layer.experts for layer in model.layers) and (experts + more) % devices:
        accepted = (
            f"a number that makes the {experts} experts and their copies a multiple of the {devices} devices"
        )
        raise ConfigError("num_redundant_experts", more, accepted)


def expert_arrays(layer: Weights) -> Weights:
    """Return the arrays of a layer whose first axis counts experts or slots."""
    return {name: layer[name] for name in EXPERT_LEAVES if name in layer}


def with_slots(weights: Weights, mesh: Mesh, experts: int, more: int) -> Weights:
    """Return the weights with the experts of each mixture layer in `experts` + `more` slots, and their map.

    The experts lie as for even loads. A layer's former arrays are dropped before the next layer is copied.

    Raises:
      DamagedExpert: a copy differs from its source.
    """
    devices = mesh.size
    (placed,) = place_experts(np.ones((1, experts)), devices, (experts + more) // devices)
    everywhere = NamedSharding(mesh, PartitionSpec())
    source, move = place(placed, everywhere), None
    made = jax.tree.map(lambda array: place(array, everywhere), copy_map(placed, experts, devices))
    layers = list(weights.pop("layers"))
    for index, layer in enumerate(layers):
        own = expert_arrays(layer)
        if own:
            specs = jax.tree.map(lambda array: array.sharding.spec, own)
            move = move or move_slots(mesh, specs)
            moved = MovedLayer(index, placed, placed, *move(own, source))
            moved.check()
            layers[index] = layer | moved.arrays | made
            layer.clear()
    return weights | {"layers": layers}


def placed_experts(weights: Weights) -> np.ndarray | None:
    """Return the expert of each slot in each mixture layer, [L, S]; None for experts without copies.

    The result is also None for the shapes of weights, which have no placement.
    """
    maps = [layer[EXPERT_OF_SLOT] for layer in weights["layers"] if EXPERT_OF_SLOT in layer]
    known = [np.asarray(one) for one in maps if isinstance(one, jax.Array)]
    return np.stack(known) if known else None


def source_slots(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return a present slot of the expert of each new slot, int32 [S]: the
    same slot where the expert stays.
    """
    first = {expert: slot for slot, expert in reversed(list(enumerate(before.tolist())))}
    wanted = np.array([first[expert] for expert in after.tolist()], np.int32)
    return np.where(before == after, np.arange(len(before)), wanted).astype(np.int32)
