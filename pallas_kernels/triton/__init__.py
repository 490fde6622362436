"""Decode attention, GEMM and grouped GEMM through jax-triton, for GPUs before Hopper. They need the extra
`triton`.
"""
