"""Dense bfloat16 matrix products for Hopper."""
