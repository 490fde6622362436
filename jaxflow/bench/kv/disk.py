"""Speed of the KV disk tier on this machine: page writes, page reads, and indexing at start.

  python -m jaxflow.bench disk --model llama-3.1-8b --kv_offloading_size 8 --kv_disk_path /mnt/nvme
  --kv_disk_size 32

The command writes random pages of the model's page size from host memory, as the engine does, until the disk
holds --pages of them. A new tier then builds its index from the folder. The kernel drops the files from its
page cache, and the pages are read ahead into host memory. Each page is compared with the written bytes. Disk
reads pay off only if their tokens per second are close to the device's compute rate. The folder must be empty
of pages at the start.
"""

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

from jaxflow.bench.engine.serve import find_model_config
from jaxflow.bench.report import machine
from jaxflow.bench.report import requests as report
from jaxflow.bench.workload.lengths import WorkloadError
from jaxflow.cli.engine_flags import define_engine_flags, engine_config_from_flags
from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import prepare_process
from jaxflow.kv.tiers.disk_store import DiskStore
from jaxflow.kv.tiers.page import from_bytes, to_bytes
from jaxflow.kv.tiers.page_copies import WORD
from jaxflow.kv.tiers.start import open_disk
from jaxflow.parallel.mesh import TP, make_mesh

DISTINCT = 8  # distinct pages of random bytes, written repeatedly under new names


def define_flags() -> None:
    define_engine_flags()
    flags.DEFINE_integer("pages", 256, "Number of pages to write and read.", lower_bound=DISTINCT)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def key_of(number: int) -> bytes:
    return b"\0" + number.to_bytes(16, "big")


def measure(config: EngineConfig, model: ModelConfig, pages: int) -> dict[str, Any]:
    """Return the GB/s of each stage, and whether every page came back unchanged. config: resolved.

    Raises: ConfigError; WorkloadError if the disk already has pages or is too small for `pages`.
    """
    mesh = make_mesh(config.tensor_parallel_size)
    disk = _open(config, model)
    length = disk.page_bytes[0]
    shape = jax.ShapeDtypeStruct(
        (mesh.size, length // mesh.size // WORD), np.uint32, sharding=NamedSharding(mesh, PartitionSpec(TP))
    )
    if disk.counters().pages:
        disk.close()
        raise WorkloadError(
            f"--kv_disk_path {config.kv_disk_path}: the folder has {disk.counters().pages} pages; "
            "accepted is an empty folder"
        )
    if pages * disk.file_bytes(key_of(0)) > disk.capacity_bytes:
        disk.close()
        raise WorkloadError(
            f"--pages {pages} of {length} bytes exceed --kv_disk_size {config.kv_disk_size} GiB; accepted "
            "are fewer pages or a larger disk size"
        )
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 256, length, dtype=np.uint8) for _ in range(DISTINCT)]
    result: dict[str, Any] = {"page_bytes": length, "pages": pages, "bytes": pages * length}

    def rate(seconds: float, moved: int = pages) -> float:
        return moved * length / seconds / 1e9

    begin = time.perf_counter()
    held = [from_bytes(page, shape) for page in drawn]
    result["into_host_memory_gb_per_s"] = rate(time.perf_counter() - begin, DISTINCT)
    begin = time.perf_counter()
    for page in held:
        np.concatenate([piece.reshape(-1) for piece in to_bytes(page)])
    result["out_of_host_memory_gb_per_s"] = rate(time.perf_counter() - begin, DISTINCT)

    whole = begin = time.perf_counter()
    for i in range(pages):
        while not disk.put(key_of(i), lambda page=held[i % DISTINCT]: to_bytes(page)):
            if not disk.is_writable:
                raise ConfigError("kv_disk_path", config.kv_disk_path, "a writable disk")
            time.sleep(0.001)
    disk.flush(600.0)
    result["written_gb_per_s"] = rate(time.perf_counter() - begin)
    disk.close()
    _forget(disk)
    result["written_to_the_medium_gb_per_s"] = rate(time.perf_counter() - whole)

    begin = time.perf_counter()
    disk = _open(config, model)
    result["index_s"] = time.perf_counter() - begin
    begin = time.perf_counter()
    right, asked, under_way = True, 0, []
    while asked < pages or under_way:
        while asked < pages and (future := disk.prefetch(key_of(asked))) is not None:
            under_way.append((asked, future))
            asked += 1
        i, future = under_way.pop(0)
        found = future.result()
        right &= found is not None and np.array_equal(found, drawn[i % DISTINCT])
        if found is not None:
            from_bytes(found, shape)
    seconds = time.perf_counter() - begin
    result |= {
        "read_gb_per_s": rate(seconds),
        "read_tokens_per_s": pages * config.block_size / seconds,
        "same_bytes": right,
    }
    disk.close()
    for i in range(pages):
        (disk.folder / f"{key_of(i).hex()}.kv").unlink(missing_ok=True)
    return result


def _open(config: EngineConfig, model: ModelConfig) -> DiskStore:
    disk = open_disk(config, model, b"bench")
    if disk is None:
        raise ConfigError("kv_disk_path", None, "a folder")
    return disk


def _forget(disk: DiskStore) -> None:
    """Flush the files to the disk and drop them from the kernel's page
    cache, so that reads reach the disk.
    """
    for file in disk.folder.glob("*.kv"):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, WorkloadError, OSError."""
    f = flags.FLAGS
    config = engine_config_from_flags()
    model = find_model_config(config.model)
    if model is None:
        raise WorkloadError(
            f"--model {config.model}: accepted is a shipped config's name or the path of a configuration"
        )
    prepare_process(config)
    config = resolve(config, model)
    result = {
        "command_name": "disk",
        "model": config.model,
        "engine_config": dataclasses.asdict(config),
        **machine.describe(),
    }
    result |= measure(config, model, f.pages)
    print(text(result))
    return result


def text(result: Mapping[str, Any]) -> str:
    """Return the report as text."""
    rows = [
        ("Pages:", f"{result['pages']} of {result['page_bytes']} bytes"),
        ("Into host memory (GB/s):", result["into_host_memory_gb_per_s"]),
        ("Out of host memory (GB/s):", result["out_of_host_memory_gb_per_s"]),
        ("Written (GB/s):", result["written_gb_per_s"]),
        ("Written to the medium (GB/s):", result["written_to_the_medium_gb_per_s"]),
        ("Read into host memory (GB/s):", result["read_gb_per_s"]),
        ("Read (tokens/s):", result["read_tokens_per_s"]),
        ("Index made (s):", result["index_s"]),
        ("Same bytes:", result["same_bytes"]),
    ]
    lines = [" Disk tier ".center(report.WIDTH, "="), *(report.line(label, value) for label, value in rows)]
    return "\n".join([*lines, machine.where(result)])
