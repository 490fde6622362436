"""Pipeline parallelism on virtual clocks: the engine's scheduler with the cost model (SARATHI §5.3)."""
