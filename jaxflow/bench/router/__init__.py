"""The router over simulated replicas."""
