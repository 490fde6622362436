"""Throughput, latency and load measured: workloads, runs, reports."""
