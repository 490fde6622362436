"""Matrix products of e4m3 activations and e4m3 weights for Hopper."""
