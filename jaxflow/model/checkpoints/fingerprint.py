"""Fingerprints of a model and of its KV pages.

Engines with equal KV fingerprints may share stored KV pages. The weights are sampled, not read in full.
"""

import dataclasses
import hashlib
from pathlib import Path

from jaxflow.config import EngineConfig
from jaxflow.model.checkpoints.checkpoint import Checkpoint

FINGERPRINT_BYTES = 16
# Version of the byte layout of a page. Raise it when `jaxflow.kv.tiers.page_copies` or the cache changes the
# layout.
PAGE_FORMAT = 1
_SAMPLES = 64  # samples of a file, evenly spread
_SAMPLE_BYTES = 4096


def kv_fingerprint(config: EngineConfig, checkpoint: Checkpoint) -> bytes:
    """Return FINGERPRINT_BYTES that identify the KV content of a page, up to its tokens.

    Pipeline stages do not count: a page has the same bytes for any number of stages.

    Args:
      config: the resolved settings.

    Raises:
      OSError: a file of the checkpoint cannot be read.
    """
    settings = (
        PAGE_FORMAT,
        config.dtype,
        config.kv_cache_dtype,
        config.quantization,
        config.block_size,
        dataclasses.replace(config.parallel, pp=1),
        *(("eplb",) if config.enable_eplb else ()),
    )
    content = fingerprint(checkpoint, config.seed) + repr(settings).encode()
    return hashlib.blake2b(content, digest_size=FINGERPRINT_BYTES, person=b"jaxflow.kv").digest()


def fingerprint(checkpoint: Checkpoint, seed: int, *, times: bool = True) -> bytes:
    """Return FINGERPRINT_BYTES that identify the model.

    The fingerprint covers the architecture, and for each file its name, size, time and samples of its
    content. Rewriting a file changes the fingerprint, because a lost cache is better than a wrong answer. The
    location of the folder does not matter.

    Args:
      seed: seed of dummy weights.
      times: False for the same fingerprint of a copy on another host, whose files have other times.

    Raises:
      OSError: a file cannot be read.
    """
    found = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"jaxflow.model")
    found.update(repr(checkpoint.model_config).encode())
    if checkpoint.source is None:
        found.update(b"dummy%d" % seed)
        return found.digest()
    path = checkpoint.source.path
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        status = file.stat()
        written_ns = status.st_mtime_ns if times else 0
        found.update(repr((str(file.relative_to(path)), status.st_size, written_ns)).encode())
        for sample in _samples(file, status.st_size):
            found.update(sample)
    return found.digest()


def _samples(file: Path, size: int) -> list[bytes]:
    with file.open("rb") as content:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            return [content.read()]
        samples = []
        for i in range(_SAMPLES):
            content.seek((size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            samples.append(content.read(_SAMPLE_BYTES))
        return samples
