"""The starts whose lowered programs are all in the folder of lowered programs.

Whether a program is there is known only with the weights and the number of pages. A start has to decide
before whether other processes shall lower programs, because they take seconds to import JAX. So a complete
start leaves a file. A wrong file costs time, and changes no program.
"""

import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path

import msgspec

from jaxflow.engine.lowered_cache import code_digest
from pallas_kernels.this_device import this_device


@dataclasses.dataclass(frozen=True)
class KnownStarts:
    """The complete starts with equal settings, code and kind of device."""

    path: Path

    @classmethod
    def of(cls, folder: Path, settings: object) -> "KnownStarts":
        """Return the starts in a folder. `settings`: all that is known at the begin, with a complete repr."""
        made_of = repr((settings, this_device(), code_digest())).encode()
        return cls(folder / f"{hashlib.sha256(made_of).hexdigest()}.starts")

    def sizes(self) -> list[list[int]]:
        """Return the memory of a device and the pages of each layer group, of each start. The latest start
        comes last. The result of a damaged file is [].
        """
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=list[list[int]])
        except (OSError, msgspec.DecodeError):
            return []

    def add(self, sizes: list[int]) -> None:
        """Add a start as the latest one. A folder that cannot be written keeps none."""
        found = self.sizes()
        with contextlib.suppress(OSError):
            if found[-1:] != [sizes]:
                partial = self.path.with_name(f"{self.path.name}.{os.getpid()}")
                earlier = [each for each in found if each != sizes]
                partial.write_bytes(msgspec.json.encode([*earlier, sizes]))
                partial.replace(self.path)
            os.utime(self.path)  # a file that is used for a month stays
