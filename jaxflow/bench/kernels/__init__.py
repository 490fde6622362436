"""Benchmarks of kernels beside their rivals."""
