"""Benchmarks of the KV tiers and of prefix reuse."""
