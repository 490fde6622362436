"""Residual add and norm in one pass."""
