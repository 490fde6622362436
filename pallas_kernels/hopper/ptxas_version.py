"""A cache for the version of ptxas that Mosaic asks for while it lowers kernels.

Mosaic (JAX 0.11) starts a process for this query at every cast from or to 8 bits or fewer: about fifty
processes a program, a quarter to a third of the lowering time of a step's kernels.
"""

import functools

from jax.experimental.mosaic.gpu import fragmented_array

_NAME = "_get_ptxas_isa_version"


def cache_version() -> None:
    """Cache the first answer for the life of this process. Do nothing if JAX has no such query."""
    extension = getattr(getattr(fragmented_array, "mgpu_lib", None), "_mosaic_gpu_ext", None)
    ask = getattr(extension, _NAME, None)
    if ask is not None and not hasattr(ask, "cache_info"):
        setattr(extension, _NAME, functools.cache(ask))
