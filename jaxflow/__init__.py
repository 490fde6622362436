"""JaxFlow serves large language models at high total throughput. This module has the public names.

Importing `jaxflow` or `jaxflow.config` does not import JAX, so that a command line refuses a wrong setting at
once. `LLM` is imported at its first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxflow.llm import LLM
    from jaxflow.request import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from jaxflow.llm import LLM

        return LLM
    if name in ("SamplingParams", "StructuredOutputsParams"):
        from jaxflow import request

        return getattr(request, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
