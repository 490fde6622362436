"""Report fields, machine description and charts of the benchmarks."""
