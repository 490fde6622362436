"""The time that vLLM takes to load a checkpoint's weights, told by a plugin of vLLM.

vLLM loads weights in a process of its own and only logs the time. This plugin writes the time to a file.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.offline_rival import module

NAME = "jaxflow-loading-time"
VARIABLE = "JAXFLOW_VLLM_LOADING"  # the path of the file, in the environment of vLLM's processes


@contextlib.contextmanager
def clock() -> Iterator[Path]:
    """Return the path of a file for the time during the `with` block, and tell it to processes of vLLM."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "seconds")
        os.environ[VARIABLE] = str(path)
        try:
            yield path
        finally:
            del os.environ[VARIABLE]


def seconds(path: Path) -> float | None:
    """Return the seconds in a file of `clock`, or None if no process has written them."""
    return float(path.read_text("utf-8")) if path.exists() else None


def register() -> None:
    """Wrap the loading of weights. vLLM calls this in each of its processes."""
    loader = module("vllm.model_executor.model_loader.default_loader").DefaultModelLoader
    own = loader.load_weights

    def load_weights(self: Any, *given: Any, **named: Any) -> Any:
        found = own(self, *given, **named)
        before, after = (getattr(self, f"counter_{at}_loading_weights", 0.0) for at in ("before", "after"))
        if before and after:  # 0 if nothing was read
            Path(os.environ[VARIABLE]).write_text(str(after - before), "utf-8")
        return found

    loader.load_weights = load_weights
