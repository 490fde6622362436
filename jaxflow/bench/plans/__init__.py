"""Benchmarks of plans, and resource use over a step."""
