"""Weighted sums of rows that lie in another order."""
