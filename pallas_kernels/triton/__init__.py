"""Decode attention and flat GEMM through jax-triton, for GPUs before Hopper. Imported where they run only:
the extra `triton` brings it.
"""
