"""Matrix products of few rows with 4-bit weights for Hopper."""
