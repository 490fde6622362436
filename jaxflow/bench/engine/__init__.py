"""Benchmarks of the whole engine: throughput, latency, load and memory."""
