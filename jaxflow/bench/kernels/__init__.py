"""Benchmarks of kernels and of rival implementations."""
