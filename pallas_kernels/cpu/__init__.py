"""Ops in forms that XLA runs fast on a CPU. Each has the signature of its reference implementation."""
