"""JaxFlow's checkpoint format: a folder of weights in their runtime layout, one Orbax checkpoint a layer.

    jaxflow.json     format version, name, dtype, ModelConfig, generation settings
    outer/           weights outside the layers
    layer_00000/     weights of layer 0, and so on
    tokenizer files: tokenizer.json and others, or tokenizer.gguf (a GGUF file with metadata and no tensors)

Layers are written and read one at a time, so the host needs the memory of one layer. Arrays are stored in the
layout of one device. Each device reads only its shards.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxflow.config import ModelConfig
from jaxflow.model.checkpoints.source import CheckpointError
from jaxflow.model.stage import Stage
from jaxflow.model.weight_spec import Leaf, quantize_leaf
from jaxflow.model.weights import Weights, leaves
from jaxflow.parallel.mesh import TP, place, sharded

if TYPE_CHECKING:  # the import takes about a second, and only checkpoints of this format need Orbax
    import orbax.checkpoint as ocp

HEADER = "jaxflow.json"
VERSION = 1
_CHUNK_BYTES = 16 << 20  # limit of a stored chunk: a device reads its shards without the other shards


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `jaxflow.json`."""

    version: int
    name: str
    dtype: str
    model_config: ModelConfig
    generation_config: dict[str, Any]


def read_header(folder: Path) -> Header:
    """Return the content of `jaxflow.json`.

    Raises: CheckpointError if it is damaged or of another version.
    """
    path = folder / HEADER
    try:
        header = msgspec.json.decode(path.read_bytes(), type=Header)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if header.version != VERSION:
        raise CheckpointError(
            f"{path}: version={header.version} is not supported; accepted: {VERSION}. Convert the checkpoint "
            "again"
        )
    return header


def write_folder(
    folder: Path, header: Header, make: Callable[[Leaf], np.ndarray], others: Callable[[Path], None]
) -> None:
    """Write a checkpoint. The folder gets its name after it is complete.

    Args:
      make: assembles a leaf in host memory.
      others: writes the tokenizer files into the folder that it receives.

    Raises:
      CheckpointError: the folder exists.
    """
    import orbax.checkpoint as ocp

    if folder.exists():
        raise CheckpointError(f"{folder}: exists; convert writes a new folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with ocp.PyTreeCheckpointer(use_compression=False) as checkpointer:
        for name, group in groups(header.model_config, 1):
            arrays = {key: make(leaf) for key, leaf in group.items()}
            chunks = {key: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for key in arrays}
            checkpointer.save((partial / name).absolute(), arrays, save_args=chunks)
    others(partial)
    (partial / HEADER).write_bytes(msgspec.json.format(msgspec.json.encode(header), indent=1))
    partial.rename(folder)


def groups(config: ModelConfig, tp: int, **options: Any) -> Iterator[tuple[str, dict[str, Leaf]]]:
    """Yield (folder, leaves) of the weights outside the layers, then of each layer.

    Args:
      options: options of `jaxflow.model.weights.leaves`.
    """
    tree = leaves(config, tp, **options)
    yield "outer", {key: leaf for key, leaf in tree.items() if key != "layers"}
    for i, layer in enumerate(tree["layers"]):
        yield f"layer_{i:05d}", layer


@dataclasses.dataclass(frozen=True)
class OrbaxFolder:
    """A checkpoint that `write_folder` wrote."""

    path: Path

    def load(
        self,
        config: ModelConfig,
        dtype: Any,
        mesh: Mesh | None,
        progress: Callable[[int], object],
        stage: Stage | None = None,
        **options: Any,
    ) -> Weights:
        """Return the weights. Each device reads its shards. Matrices are quantized layer by layer.

        Args:
          progress: called with the number of arrays that were read.
          stage: the part of the model to load; None for the complete model.
          options: options of `jaxflow.model.weights.leaves`. The scales of a KV cache are 1.

        Raises:
          CheckpointError: a group is missing or damaged, or its arrays do not fit the config.
        """
        stage = stage or Stage(0, config.num_layers, config.num_layers)
        outer, *layers = self.load_groups(config, dtype, mesh, progress, stage, **options)
        tied = config.tie_word_embeddings
        return {name: array for name, array in outer.items() if stage.holds(name, tied)} | {"layers": layers}

    def load_groups(
        self,
        config: ModelConfig,
        dtype: Any,
        mesh: Mesh | None,
        progress: Callable[[int], object],
        stage: Stage | None = None,
        **options: Any,
    ) -> Iterator[dict[str, jax.Array]]:
        """Yield the weights outside the layers, then each layer of the stage.

        Arguments and errors are those of `load`.
        """
        devices = 1 if mesh is None else mesh.shape[TP]
        stored_as, wanted = dict(groups(config, 1)), dict(groups(config, devices, **options))
        if stage is not None:
            outer, *layers = wanted.items()
            wanted = dict([outer, *layers[stage.first : stage.stop]])
        with _reader() as checkpointer:
            for name, leaves_of in wanted.items():
                group = {key: leaf for key, leaf in leaves_of.items() if key in stored_as[name]}
                path = (self.path / name).absolute()
                try:
                    _check_group(path, checkpointer, stored_as[name])
                    arguments = {
                        key: _restore_args(leaf, stored_as[name][key], dtype, mesh)
                        for key, leaf in group.items()
                    }
                    arrays = jax.block_until_ready(checkpointer.restore(path, restore_args=arguments))
                except CheckpointError:
                    raise
                except Exception as error:  # Orbax and TensorStore raise many types
                    raise CheckpointError(
                        f"{path}: cannot be read and may be damaged: {str(error)[:300]}"
                    ) from error
                stored = {key: _copy_rows(arrays[key], leaf, mesh) for key, leaf in group.items()}
                yield {key: _finished(leaf, stored.pop(key, None), mesh) for key, leaf in leaves_of.items()}
                progress(len(group))


def _reader() -> "ocp.Checkpointer":
    """Return a reader that waits for no other process: pipeline stages read different groups."""
    import orbax.checkpoint as ocp

    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _check_group(path: Path, checkpointer: "ocp.Checkpointer", group: dict[str, Leaf]) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path}: missing")
    metadata: Any = checkpointer.metadata(path).item_metadata
    stored = {key: tuple(array.shape) for key, array in metadata.tree.items()} if metadata is not None else {}
    expected = {key: leaf.shape for key, leaf in group.items()}
    if stored != expected:
        wrong = sorted(key for key in {*stored, *expected} if stored.get(key) != expected.get(key))
        differences = ", ".join(
            f"{key} is {stored.get(key, 'missing')} and should be {expected.get(key, 'absent')}"
            for key in wrong[:4]
        )
        raise CheckpointError(f"{path}: does not fit {HEADER}: {differences}")


def _restore_args(leaf: Leaf, stored: Leaf, dtype: Any, mesh: Mesh | None) -> "ocp.ArrayRestoreArgs":
    import orbax.checkpoint as ocp

    if mesh is None:
        placed = SingleDeviceSharding(jnp.zeros(()).device)
    else:
        # Repeated rows need the full array on each device.
        placed = sharded(mesh, leaf.spec if leaf.rows is None else jax.sharding.PartitionSpec())
    # With strict=False, Orbax fills the padding of a vocabulary or an e4m3 MLP with zeros.
    shape = leaf.shape if leaf.rows is None else stored.shape
    return ocp.ArrayRestoreArgs(sharding=placed, global_shape=shape, dtype=leaf.dtype(dtype), strict=False)


def _finished(leaf: Leaf, array: jax.Array | None, mesh: Mesh | None) -> Any:
    """Return the runtime value of a leaf from its stored array. `array` is None for a scale, which is 1."""
    if array is None:
        ones = np.ones(leaf.shape, np.float32)
        return jax.device_put(ones) if mesh is None else place(ones, sharded(mesh, leaf.spec))
    return array if leaf.quantization is None else jax.block_until_ready(quantize_leaf(leaf, array, mesh))


def _copy_rows(array: jax.Array, leaf: Leaf, mesh: Mesh | None) -> jax.Array:
    if leaf.rows is None or mesh is None:
        return array
    return jax.jit(lambda full: full[leaf.rows], out_shardings=sharded(mesh, leaf.spec))(array)
