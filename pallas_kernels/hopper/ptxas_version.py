"""Keeps Mosaic from asking ptxas for its version, by a process of its own, at every cast from or to eight
bits or fewer.

That was a quarter to a third of the time that lowering a step's kernels took, some fifty processes a program
(jax 0.11). The answer cannot change while a process runs. Where JAX has no such function any more, there is
nothing to do.
"""

import functools

from jax.experimental.mosaic.gpu import fragmented_array

_NAME = "_get_ptxas_isa_version"


def ask_once() -> None:
    """Remembers the first answer for the whole process."""
    extension = getattr(getattr(fragmented_array, "mgpu_lib", None), "_mosaic_gpu_ext", None)
    ask = getattr(extension, _NAME, None)
    if ask is not None and not hasattr(ask, "cache_info"):
        setattr(extension, _NAME, functools.cache(ask))
