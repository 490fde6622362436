"""The tests' platform, set before anything imports JAX, and where their data is."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import paths
import pytest
from absl import flags

from serving.default_model import default_model

assert "jax" not in sys.modules, "JAX was imported before the tests could choose its platform"

# Environment variables, not jax.config, so that the servers and tools which tests start as processes see the same machine.
os.environ.update(
    JAX_PLATFORMS="cpu",  # also keeps the CUDA plugin, installed only to compile, from looking for a GPU
    JAX_NUM_CPU_DEVICES="4",
    JAX_ENABLE_X64="0",
    JAX_COMPILATION_CACHE_DIR=str(paths.ROOT / ".cache" / "compiled-tests"),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.2",
    HF_HUB_OFFLINE="1",
    TF_CPP_MIN_LOG_LEVEL="2",
    # Most of the suite's time is XLA's and LLVM's, over programs that run once: half of it is saved where speed is not made for them.
    XLA_FLAGS=(
        f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
        "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
    ),
)

# The same examples every time, and no deadlines: a busy machine fails no test. A third of the usual number: there are many properties.
hypothesis.settings.register_profile("jaxflow", max_examples=30, deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("jaxflow")


@pytest.fixture(scope="session")
def models_dir() -> Path:
    return paths.MODELS


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    return paths.TRACES


@pytest.fixture(scope="session")
def ppl_dir() -> Path:
    return paths.PPL


@pytest.fixture(scope="session")
def goldens() -> Callable[[str], dict[str, Any]]:
    return paths.golden


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    return default_model()


@pytest.fixture
def no_flags():
    """absl's own flags alone, as in a process of a command's own; all others are back afterwards, with their modules."""
    state = vars(flags.FLAGS)
    before = {name: _copied(value) for name, value in state.items()}
    for name in list(flags.FLAGS):
        if not (flags.FLAGS.find_module_defining_flag(name) or "").startswith("absl"):
            delattr(flags.FLAGS, name)
    yield
    state.clear()
    state.update(before)
    flags.FLAGS.unparse_flags()


def _copied(value):
    """Flags by name, or lists of them by module, in dicts and lists that nobody else changes."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value
