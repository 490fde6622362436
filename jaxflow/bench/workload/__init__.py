"""Workloads: lengths, arrival times, conversations, and the code that drives them."""
