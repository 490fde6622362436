"""Matrix products: dense, few rows, fp8, int4 and grouped by expert."""
