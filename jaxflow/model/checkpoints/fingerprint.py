"""What tells one model's KV from another's, without reading all of its weights: an engine may be served what
another computed that has the same fingerprint.
"""

import hashlib
from pathlib import Path

from jaxflow.config import EngineConfig
from jaxflow.model.checkpoints.checkpoint import Checkpoint

FINGERPRINT_BYTES = 16
# of what a page's bytes mean: to be raised when `jaxflow.kv.tiers.page_copies` or the cache lays it out
# otherwise
PAGE_FORMAT = 1
_SAMPLES = 64  # of each file, evenly spread
_SAMPLE_BYTES = 4096


def kv_fingerprint(config: EngineConfig, checkpoint: Checkpoint) -> bytes:
    """FINGERPRINT_BYTES of all that a page's content depends on beside its tokens. config: resolved. Raises:
    OSError.
    """
    settings = (
        PAGE_FORMAT,
        config.dtype,
        config.kv_cache_dtype,
        config.quantization,
        config.block_size,
        config.parallel,
    )
    content = fingerprint(checkpoint, config.seed) + repr(settings).encode()
    return hashlib.blake2b(content, digest_size=FINGERPRINT_BYTES, person=b"jaxflow.kv").digest()


def fingerprint(checkpoint: Checkpoint, seed: int) -> bytes:
    """FINGERPRINT_BYTES of the architecture and of every file beside it: its name, size, time and samples of
    its content.

    A file that was written again makes another model, even where nothing changed: better a cache lost than a
    wrong answer. Where it lies does not matter. seed: of dummy weights. Raises: OSError.
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
        found.update(repr((str(file.relative_to(path)), status.st_size, status.st_mtime_ns)).encode())
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
