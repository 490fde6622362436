"""Paged attention of prefill chunks for Hopper."""
