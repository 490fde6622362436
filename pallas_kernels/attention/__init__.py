"""Attention over the paged KV cache: decode steps and prefill chunks."""
