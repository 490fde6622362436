"""Both products of a mixture's experts in one kernel for Hopper."""
