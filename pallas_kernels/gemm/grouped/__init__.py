"""Matrix products of a mixture of experts for Hopper."""
