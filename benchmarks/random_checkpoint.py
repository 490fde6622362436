"""Write a checkpoint with random weights in bfloat16, at the full size of a shipped config.

    python -m benchmarks.random_checkpoint --model llama-3.1-8b --out FOLDER

The folder has safetensors files of about 5 GB, their index, and config.json, as published checkpoints do, and
no tokenizer. It serves to time the start of an engine that reads its weights from a disk. `--forget` writes
nothing: it drops the files of the folder from the system's cache, so that the next start reads the disk.
"""

import argparse
import json
import os
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from jaxflow.cli.exit_status import exit_status
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.checkpoints.model_names import CONFIGS, shipped_configs
from jaxflow.model.checkpoints.safetensors_file import INDEX
from jaxflow.model.weights import leaves
from jaxflow.parallel.mesh import choose_platform

SHARD_BYTES = 5_000_000_000
BLOCK = 8 << 20  # random numbers. Each matrix repeats them from its own offset
STEP = 1_000_003  # numbers between the offsets of two matrices
SCALE = 0.02  # the standard deviation of a matrix
ITEM = 2  # bytes of a number
WRITERS = 4
FORMATS = ("quantization_config", "compression_config")  # of weights that are not in 16 bits

Shapes = Mapping[str, tuple[int, ...]]


def shards(shapes: Shapes, most: int) -> list[dict[str, tuple[int, ...]]]:
    """Return the tensors of each file, in order.

    A file has at most `most` bytes of tensors, or one tensor.
    """
    found: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        size = ITEM * int(np.prod(shape))
        if found[-1] and used + size > most:
            found.append({})
            used = 0
        found[-1][name] = shape
        used += size
    return found


def header(shapes: Shapes) -> bytes:
    """Return the head of a safetensors file of bfloat16 tensors."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + ITEM * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def pieces(size: int, first: int, numbers: memoryview) -> Iterator[memoryview]:
    """Yield `size` bytes of `numbers`, again and again, from byte `first` on."""
    while size:
        piece = numbers[first : first + size]
        yield piece
        size, first = size - len(piece), 0


def write(model: str, folder: Path, most: int = SHARD_BYTES, seed: int = 0) -> int:
    """Write the checkpoint into a new folder and return the bytes of its tensors.

    Norms are 1, biases 0. most: bytes of the tensors of one file.
    """
    path = CONFIGS / f"{model}.json"
    keys = json.loads(path.read_text("utf-8"))
    keys = {name: value for name, value in keys.items() if name not in FORMATS} | {"torch_dtype": "bfloat16"}
    tree = jax.tree.leaves(leaves(open_checkpoint(str(path), load_format="dummy").model_config))
    inits = {piece.name: leaf.init for leaf in tree for piece in leaf.pieces}
    shapes = {piece.name: piece.shape for leaf in tree for piece in leaf.pieces}
    drawn = SCALE * np.random.default_rng(seed).standard_normal(BLOCK, np.float32)
    values = {"matrix": drawn, "zero": np.zeros(BLOCK), "norm": np.ones(BLOCK), "one": np.ones(BLOCK)}
    numbers = {
        init: memoryview(each.astype(ml_dtypes.bfloat16).view(np.uint8)) for init, each in values.items()
    }
    order = {name: number for number, name in enumerate(shapes)}
    files = shards(shapes, most)
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    folder.mkdir(parents=True)

    def write_file(name: str, own: Shapes) -> None:
        with (folder / name).open("wb") as file:
            file.write(header(own))
            for tensor, shape in own.items():
                first = ITEM * (order[tensor] * STEP % BLOCK)
                for piece in pieces(ITEM * int(np.prod(shape)), first, numbers[inits[tensor]]):
                    file.write(piece)

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write_file, names, files))
    size = ITEM * sum(int(np.prod(shape)) for shape in shapes.values())
    where = {tensor: name for name, own in zip(names, files, strict=True) for tensor in own}
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=1), "utf-8")
    (folder / "config.json").write_text(json.dumps(keys, indent=1), "utf-8")
    return size


def forget(folder: Path) -> int:
    """Write the files of a folder to the disk and drop them from the system's cache. Return their bytes."""
    size = 0
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            size += os.fstat(file).st_size
        finally:
            os.close(file)
    return size


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.random_checkpoint", description="Writes a checkpoint with random weights."
    )
    parser.add_argument("--model", choices=shipped_configs(), metavar="NAME", help="a shipped config")
    parser.add_argument("--out", type=Path, required=True, help="the folder, a new one unless --forget")
    parser.add_argument(
        "--forget", action="store_true", help="write nothing: drop the folder's files from the cache"
    )
    options = parser.parse_args(arguments)
    if options.forget == (options.model is not None):
        parser.error("give one of --model and --forget")
    choose_platform()
    begin_s = time.perf_counter()
    try:
        size = forget(options.out) if options.forget else write(options.model, options.out)
    except OSError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - begin_s
    done = "dropped from the cache" if options.forget else f"written, {size / seconds / 1e9:.1f} GB/s"
    print(f"{options.out}: {size / 1e9:.1f} GB in {seconds:.1f} s, {done}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv[1:]))
