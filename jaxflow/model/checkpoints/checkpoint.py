"""Open a checkpoint by path, hub id or name, and load its weights to their devices.

    checkpoint = open_checkpoint("path/to/folder")
    weights = checkpoint.load(jnp.bfloat16, mesh)

`python -m jaxflow.model.checkpoints.checkpoint convert SRC DST` writes a checkpoint in JaxFlow's format
(`jaxflow.model.checkpoints.orbax_file`).
"""

import argparse
import dataclasses
import functools
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from tqdm import tqdm

from jaxflow.cli.exit_status import exit_status
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.architectures.hf_config import model_config_from_hf
from jaxflow.model.architectures.hf_packed_int4 import PackedInt4
from jaxflow.model.architectures.hf_quantization import Stored, stored_format
from jaxflow.model.architectures.tensor_names import model_names, unread_prefixes
from jaxflow.model.checkpoints import orbax_file
from jaxflow.model.checkpoints.model_names import CONFIGS, check_name, shipped_configs
from jaxflow.model.checkpoints.mxfp4 import Mxfp4Tensors
from jaxflow.model.checkpoints.packed_int4 import PackedInt4Tensors
from jaxflow.model.checkpoints.reading import (
    ReusedMemory,
    new_memory,
    read_ahead,
    read_side_by_side,
    readers,
)
from jaxflow.model.checkpoints.safetensors_file import (
    BlockFp8Tensors,
    Fp8Tensors,
    SafetensorsFolder,
    weight_files,
)
from jaxflow.model.checkpoints.source import (
    CheckpointError,
    TensorSource,
    check_tensors,
    generation_settings,
    read_json,
)
from jaxflow.model.stage import Stage
from jaxflow.model.weight_spec import (
    FP8_PER_BLOCK,
    INT4_ZERO_POINT,
    Leaf,
    assemble,
    blocks_of_leaf,
    pack_leaf,
    quantize_leaf,
    shard_maker,
)
from jaxflow.model.weights import Weights, dummy_groups, dummy_weights, has_whole_blocks, leaves, tensors
from jaxflow.parallel.mesh import TP, choose_platform, sharded
from pallas_kernels.quantized import BlockFp8, Mxfp4, Quantized

__all__ = ["Checkpoint", "CheckpointError", "convert", "open_checkpoint", "shipped_configs"]

log = logging.getLogger(__name__)
_TOKENIZER_FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer.model",
    ),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
_GGUF_TOKENIZER = "tokenizer.gguf"
_HUB_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_HUB_OTHERS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose config is read and whose weights are not read yet."""

    name: str
    model_config: ModelConfig
    tokenizer_path: Path | None  # a folder or a .gguf file; None: the checkpoint has no tokenizer
    generation_config: dict[str, Any]  # sampling defaults that the checkpoint names, and always eos_token_ids
    source: TensorSource | orbax_file.OrbaxFolder | None  # None: dummy weights
    # fp8: the checkpoint stores its matrices in e4m3. fp8_per_block: its experts, with scales of blocks.
    # int4_zero_point: its matrices in 4 bits.
    quantization: str | None = None
    has_mxfp4: bool = False  # all its experts are in MXFP4; they become 16 bits unless a setting keeps them

    def quantization_of(self, setting: str | None) -> str | None:
        """Return the format of the loaded weights. setting: `EngineConfig.quantization`.

        A checkpoint in 4 bits keeps its numbers with int4.
        """
        kept = setting is None or (setting == "int4" and self.quantization == INT4_ZERO_POINT)
        return self.quantization if kept else setting

    def stored_bytes(self) -> int:
        """Return the bytes of the files with the weights; 0 for dummy weights."""
        if self.source is None:
            return 0
        path = self.source.path
        if isinstance(self.source, orbax_file.OrbaxFolder):
            files = [file for file in path.rglob("*") if file.is_file()]
        else:
            files = [path] if path.is_file() else [path / name for name in weight_files(path)[0]]
        return sum(file.stat().st_size for file in files)

    def load(
        self,
        dtype: Any,
        mesh: Mesh | None = None,
        tp: int | None = None,
        progress: bool = True,
        seed: int = 0,
        *,
        quantization: str | None = None,
        kv_scales: bool = False,
        expert_parallel: bool = False,
        ranks: int = 1,
        stage: Stage | None = None,
    ) -> Weights:
        """Return the weights in the layout of `jaxflow.model.weights`, on the devices of the mesh.

        Tensors go one at a time from the file through host memory to the device, and are quantized there. The
        host never holds a full copy of the model.

        Args:
          mesh: None for the default device.
          progress: show a progress bar if loading takes more than a second.
          seed: seed of dummy weights.
          quantization: fp8 or int4 for the matrices; fp8_per_block for experts; mxfp4 keeps experts in MXFP4,
            which become `dtype` otherwise; None keeps the checkpoint's format. A checkpoint in e4m3 keeps its
            16-bit matrices in 16 bits with fp8, one in blocks of e4m3 its 16-bit experts with fp8_per_block,
            and one in 4 bits its 16-bit matrices with int4. A fused matrix in 4 bits has all of its parts in
            4 bits.
          kv_scales: add the scales of an e4m3 KV cache. A scale that the checkpoint lacks is 1.
          expert_parallel: each device holds some experts whole.
          ranks: the data-parallel ranks of the mesh, over which whole experts are spread.
          stage: the part of the model to load; None for the complete model.

        Raises:
          CheckpointError: missing, unexpected or misshapen tensors, or damaged files.
          ConfigError: the model cannot be sharded over `tensor_parallel_size` devices, has no experts to
            spread, or has no experts in MXFP4 to keep.
        """
        dtype, devices = jnp.dtype(dtype), 1 if mesh is None else mesh.shape[TP]
        if tp not in (None, devices):
            raise ConfigError("tensor_parallel_size", tp, f"{devices}, the size of the mesh")
        options: dict[str, Any] = {"quantization": self.quantization_of(quantization), "kv_scales": kv_scales}
        options |= {"expert_parallel": expert_parallel, "ranks": ranks}
        if self.source is None:
            return dummy_weights(self.model_config, dtype, mesh, seed, stage=stage, **options)
        tree = leaves(self.model_config, devices, **options)
        if quantization == "mxfp4":
            _check_packed(self.source, tree)
        tree = tree if stage is None else stage.weights(tree)
        with tqdm(
            total=len(jax.tree.leaves(tree)),
            desc="Loading weights",
            unit="array",
            delay=1,
            disable=not progress,
        ) as bar:
            if isinstance(self.source, orbax_file.OrbaxFolder):
                return self.source.load(self.model_config, dtype, mesh, bar.update, stage=stage, **options)
            _check(self.source, self.model_config)
            return _load(self.source, self.model_config, tree, dtype, mesh, bar.update)

    def stream(
        self, dtype: Any, mesh: Mesh | None = None, *, seed: int = 0, quantization: str | None = None
    ) -> Iterator[Weights]:
        """Yield the weights in groups: the weights outside the layers, then each layer.

        Raises:
          CheckpointError: as `load`.
          ConfigError: the checkpoint is stored in 8 or 4 bits.
        """
        if self.quantization in ("fp8", INT4_ZERO_POINT):
            raise ConfigError(
                "quantization",
                self.quantization,
                "a checkpoint of 16-bit or 32-bit weights, which may be quantized to int4",
            )
        config, source, options = self.model_config, self.source, {"quantization": quantization}
        if source is None:
            yield from dummy_groups(config, jnp.dtype(dtype), mesh, seed, quantization=quantization)
        elif isinstance(source, orbax_file.OrbaxFolder):
            yield from source.load_groups(
                config, jnp.dtype(dtype), mesh, lambda _: None, quantization=quantization
            )
        else:
            _check(source, config)
            for _, group in orbax_file.groups(config, 1 if mesh is None else mesh.shape[TP], **options):
                yield _load(source, config, group, jnp.dtype(dtype), mesh, lambda _: None)


def _load(
    source: TensorSource,
    config: ModelConfig,
    tree: Weights,
    dtype: Any,
    mesh: Mesh | None,
    progress: Callable[[int], object],
) -> Weights:
    read_experts = source.read_experts if isinstance(source, Mxfp4Tensors) else None
    memory = new_memory if _on_cpu(mesh) else ReusedMemory()  # a CPU device may keep an array itself

    def put(
        leaf: Leaf,
        read: Callable[[str], np.ndarray],
        as_dtype: Any,
        spec: PartitionSpec,
        read_experts: Callable[[str, range], np.ndarray] | None = read_experts,
    ) -> jax.Array:
        sharding = None if mesh is None else sharded(mesh, spec)
        if sharding is None or sharding.is_fully_addressable:
            array = assemble(leaf, lambda name: read_ahead(read(name)), as_dtype, memory)
            return jax.block_until_ready(jax.device_put(array, sharding))
        shard = shard_maker(leaf, read, as_dtype, read_experts)  # other processes make the other shards
        return jax.make_array_from_callback(leaf.shape, sharding, shard)  # pyright: ignore[reportArgumentType]

    def make(leaf: Leaf) -> Any:
        if leaf.key in ("k_scale", "v_scale"):
            heads = leaf.pieces[0].shape[0]
            return put(leaf, functools.partial(_kv_scale, source, heads), np.float32, leaf.spec)
        if leaf.scale is not None and isinstance(source, Fp8Tensors):
            if all(source.is_e4m3(piece.name) for piece in leaf.pieces):
                return Quantized(
                    put(leaf, source.stored, jnp.float8_e4m3fn, leaf.specs.values),
                    put(leaf.scale, source.row_scale, np.float32, leaf.specs.scale),
                )
            leaf = dataclasses.replace(leaf, quantization=None, scale=None)
        if leaf.quantization == FP8_PER_BLOCK and isinstance(source, BlockFp8Tensors):
            assert leaf.scale is not None
            if all(source.is_e4m3(piece.name) for piece in leaf.pieces):
                return BlockFp8(
                    put(leaf, source.stored, jnp.float8_e4m3fn, leaf.specs.values),
                    put(leaf.scale, source.block_scales, np.float32, leaf.specs.scale),
                )
            leaf = dataclasses.replace(leaf, quantization=None, scale=None)
        if leaf.quantization == INT4_ZERO_POINT and isinstance(source, PackedInt4Tensors):
            factors = leaf.scale
            if factors is not None and all(source.is_packed(piece.name) for piece in leaf.pieces):
                codes = put(leaf, source.codes, np.uint8, leaf.spec)
                scale = put(factors, source.scales, jnp.bfloat16, factors.spec)
                return pack_leaf(
                    leaf, codes, scale, put(factors, source.zero_points, np.int16, factors.spec), mesh
                )
            leaf = dataclasses.replace(leaf, quantization=None, scale=None)
        if leaf.stored is not None:
            assert isinstance(source, Mxfp4Tensors)  # `_check_packed`
            read = source.stored
            experts = Mxfp4(*(put(part, read, np.uint8, part.spec, read) for part in leaf.stored))
            return blocks_of_leaf(leaf, experts, mesh)
        array = put(leaf, source.read, leaf.dtype(dtype), leaf.spec)
        return array if leaf.quantization is None else quantize_leaf(leaf, array, mesh)

    def place(leaf: Leaf) -> Any:
        return jax.block_until_ready(make(leaf))

    every, structure = jax.tree.flatten(tree)
    made = []
    # Several processes run the programs that quantize in the same order.
    threads = readers() if mesh is None or not mesh.is_multi_process else 1
    for array in read_side_by_side(place, every, lambda leaf: _host_bytes(leaf, dtype), threads):
        made.append(array)
        progress(1)
    return jax.tree.unflatten(structure, made)


def _on_cpu(mesh: Mesh | None) -> bool:
    """Return True if the devices are CPUs. mesh: None for the default device."""
    device = mesh.devices.flat[0] if mesh is not None else next(iter(jnp.zeros(()).devices()))
    return device.platform == "cpu"


def _host_bytes(leaf: Leaf, dtype: Any) -> int:
    """Return the bytes of a leaf before it is quantized. dtype: of the weights."""
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype(dtype)).itemsize


def _kv_scale(source: TensorSource, heads: int, name: str) -> np.ndarray:
    return source.kv_scale(name, heads) if isinstance(source, Fp8Tensors) else np.ones(heads, np.float32)


def _check(source: TensorSource, config: ModelConfig) -> None:
    """Check that `source` has exactly the tensors of the model.

    Rotary frequencies of old files are ignored, a copy of the embeddings as a tied output head, the layers
    after the last one that predict further tokens, and what only images need.

    Raises:
      CheckpointError: the tensors differ from those of the config.
    """
    tied = config.tie_word_embeddings and "lm_head.weight" in source.shapes
    layer, first = model_names(config)["layer"], config.num_layers
    ignored = tuple(layer.format(i) for i in range(first, first + config.prediction_layers))
    images = unread_prefixes(config)
    check_tensors(
        source,
        tensors(config),
        lambda name: (
            name.endswith("rotary_emb.inv_freq")
            or (tied and name == "lm_head.weight")
            or (isinstance(source, PackedInt4Tensors) and source.is_zero_bias(name))
            or name.startswith(ignored + images)
        ),
    )
    if unread := [prefix for prefix in ignored if any(name.startswith(prefix) for name in source.shapes)]:
        log.info("%s: ignored: layers that predict further tokens, %s", source.path, ", ".join(unread))
    if tied and not np.array_equal(
        source.read("lm_head.weight"), source.read(leaves(config)["embed"].pieces[0].name)
    ):
        raise CheckpointError(
            f"{source.path}: tie_word_embeddings is true, but lm_head.weight differs from the embeddings"
        )


def _check_packed(source: Any, tree: Weights) -> None:
    """Refuse to keep experts in MXFP4 that a checkpoint has in another format. Raises: ConfigError."""
    kept = [leaf for layer in tree["layers"] for leaf in layer.values() if leaf.stored is not None]
    for name in (piece.name for leaf in kept for piece in leaf.pieces):
        if not (isinstance(source, Mxfp4Tensors) and source.is_packed(name)):
            accepted = f"fp8, int4 or unset: {source.path} has {name} in another format"
            raise ConfigError("quantization", "mxfp4", accepted)


def open_checkpoint(model: str, *, load_format: str = "auto") -> Checkpoint:
    """Open a checkpoint and read its config.

    Args:
      model: a folder in Hugging Face's or JaxFlow's format, a .gguf file, or a hub id. With
        `load_format="dummy"` also a config.json or the name of a shipped config.
      load_format: "auto" for the weights of the checkpoint, "dummy" for random weights.

    Raises:
      CheckpointError: the checkpoint is missing, unreadable, damaged, or has no weights. The error names the
        file.
      ConfigError: the architecture or one of its settings is not supported. The error names the field.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigError("load_format", load_format, "auto or dummy")
    dummy, path = load_format == "dummy", Path(model).expanduser()
    check_name(model, dummy=dummy)
    if path.is_file():
        opened = _open_file(path, dummy)
    elif path.is_dir():
        opened = _open_folder(path, path.resolve().name, dummy)
    elif model in shipped_configs():
        opened, _ = _from_config(CONFIGS / f"{model}.json", model)
    else:
        opened = _open_folder(download(model, weights=not dummy), model, dummy)
    return dataclasses.replace(opened, source=None) if dummy else opened


def download(repo: str, *, weights: bool) -> Path:
    """Download the files of a hub repository ("owner/name") that JaxFlow reads. Return their folder.

    Raises:
      CheckpointError: the repository does not exist, access is denied, or there is no connection and the
        files are not in the hub's cache.
    """
    from huggingface_hub import snapshot_download  # its import is slow, and most models are on this machine

    patterns = [*_HUB_OTHERS, "chat_template*", *(_HUB_WEIGHTS if weights else ())]
    try:
        return Path(
            snapshot_download(repo, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"])
        )
    except Exception as error:  # errors of the library, of its HTTP client and of the system
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{repo}: not a folder, and the download from the Hugging Face hub failed ({reason}). "
            "Without a connection, give a folder or a .gguf file, or download it into the hub's cache before"
        ) from error


def _open_file(path: Path, dummy: bool) -> Checkpoint:
    if path.suffix == ".gguf":
        from jaxflow.model.checkpoints.gguf_file import GgufFile  # imports gguf, which few starts need

        file = GgufFile(path)
        return _checkpoint(path.stem, file.config, path, file.generation_config, file)
    if path.suffix == ".json" and dummy:
        return _from_config(path, path.resolve().parent.name)[0]
    if path.suffix == ".json":
        raise CheckpointError(
            f"{path}: a config has no weights; give its folder, or load_format=dummy for random weights"
        )
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: give the folder of this file, which contains config.json")
    raise CheckpointError(
        f"{path}: neither a .gguf file nor a folder; pickled weights (.bin, .pt) are never read"
    )


def _open_folder(folder: Path, name: str, dummy: bool) -> Checkpoint:
    if (folder / orbax_file.HEADER).exists():
        header = orbax_file.read_header(folder)
        source = orbax_file.OrbaxFolder(folder)
        gguf = folder / _GGUF_TOKENIZER
        tokenizer = gguf if gguf.exists() else _tokenizer(folder)
        return _checkpoint(header.name, header.model_config, tokenizer, header.generation_config, source)
    if not (folder / "config.json").exists():
        inside = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; for a GGUF file give its path, as {folder / inside[0]}" if inside else ""
        raise CheckpointError(f"{folder}: config.json is missing{hint}")
    opened, stored = _from_config(folder / "config.json", name)
    if dummy:
        return opened
    if isinstance(stored, PackedInt4):
        return dataclasses.replace(
            opened, source=PackedInt4Tensors(SafetensorsFolder(folder, whole=True), stored)
        )
    source = SafetensorsFolder(folder, e4m3=stored in ("fp8", "fp8 blocks"), unsigned=stored == "mxfp4")
    if stored == "mxfp4":
        packed = Mxfp4Tensors(source)
        return dataclasses.replace(opened, source=packed, has_mxfp4=packed.has_all_experts)
    made = {"fp8": Fp8Tensors, "fp8 blocks": BlockFp8Tensors}
    return dataclasses.replace(opened, source=source if stored is None else made[stored](source))


def _from_config(path: Path, name: str) -> tuple[Checkpoint, Stored | None]:
    """Return the checkpoint of a config without its weights, and the format of quantized weights."""
    keys = read_json(path)
    scheme = keys.pop("quantization_config", None) or keys.pop("compression_config", None)
    config = model_config_from_hf(keys)
    stored = None if scheme is None else stored_format(scheme, config.architecture)
    generation = path.with_name("generation_config.json")
    settings = generation_settings(generation, read_json(generation)) if generation.exists() else {}
    opened = _checkpoint(name, config, _tokenizer(path.parent), settings, None)
    kept = "fp8" if stored == "fp8" else None
    if stored == "fp8 blocks" and has_whole_blocks(config):
        kept = FP8_PER_BLOCK
    if isinstance(stored, PackedInt4):
        kept = INT4_ZERO_POINT
    return dataclasses.replace(opened, quantization=kept, has_mxfp4=stored == "mxfp4"), stored


def _tokenizer(folder: Path) -> Path | None:
    return (
        folder
        if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
        else None
    )


def _checkpoint(
    name: str, config: ModelConfig, tokenizer: Path | None, settings: dict[str, Any], source: Any
) -> Checkpoint:
    """Return a checkpoint. Its end-of-sequence tokens are those of the generation config, then of the config.

    Raises:
      ConfigError: an end-of-sequence token outside the vocabulary.
    """
    eos = tuple(dict.fromkeys((*settings.get("eos_token_ids", ()), *config.eos_token_ids)))
    if max(eos, default=0) >= config.vocab_size:
        raise ConfigError("eos_token_id", max(eos), f"below vocab_size={config.vocab_size}")
    return Checkpoint(
        name,
        dataclasses.replace(config, eos_token_ids=eos),
        tokenizer,
        settings | {"eos_token_ids": eos},
        source,
    )


def convert(source: str, target: str | Path, dtype: str = "bfloat16") -> None:
    """Write a model as a new folder in JaxFlow's format.

    Args:
      source: a model that `open_checkpoint` opens.

    Raises:
      CheckpointError: the source cannot be read, or the target exists.
    """
    opened = open_checkpoint(source)
    tensor_source = opened.source
    if tensor_source is None or isinstance(tensor_source, orbax_file.OrbaxFolder):
        raise CheckpointError(f"{source}: is already in JaxFlow's format, or has no weights")
    if opened.quantization in ("fp8", INT4_ZERO_POINT):
        stored = "e4m3" if opened.quantization == "fp8" else "4 bits"
        raise CheckpointError(
            f"{source}: is stored in {stored} and cannot be converted; it loads without conversion"
        )
    _check(tensor_source, opened.model_config)
    settings = {key: value for key, value in opened.generation_config.items() if key != "eos_token_ids"}
    header = orbax_file.Header(orbax_file.VERSION, opened.name, dtype, opened.model_config, settings)

    def add_tokenizer(folder: Path) -> None:
        path = opened.tokenizer_path
        if path is not None and path.is_file():
            from jaxflow.model.checkpoints.gguf_file import write_metadata_only

            write_metadata_only(path, folder / _GGUF_TOKENIZER)
        elif path is not None:
            for name in _TOKENIZER_FILES:
                if (path / name).exists():
                    shutil.copyfile(path / name, folder / name)

    total = len(jax.tree.leaves(leaves(opened.model_config)))
    with tqdm(total=total, desc="Converting", unit="array", delay=1) as bar:

        def make(leaf: Leaf) -> np.ndarray:
            array = assemble(leaf, tensor_source.read, leaf.dtype(jnp.dtype(dtype)))
            bar.update()
            return array

        orbax_file.write_folder(Path(target).expanduser(), header, make, add_tokenizer)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxflow.model.checkpoints.checkpoint", description="Converts checkpoints."
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "convert", help="write a model in JaxFlow's format, where each device reads only its shards"
    )
    command.add_argument("source", metavar="SRC", help="a Hugging Face folder, a .gguf file or a hub id")
    command.add_argument("target", metavar="DST", help="new folder for the converted checkpoint")
    command.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="dtype of the stored weights (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    choose_platform()
    try:
        convert(options.source, options.target, options.dtype)
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(f"{options.target}: written, {options.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv[1:]))
