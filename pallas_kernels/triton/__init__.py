"""Decode attention and GEMM through jax-triton, for GPUs before Hopper. They need the extra `triton`."""
