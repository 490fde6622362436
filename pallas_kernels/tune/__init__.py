"""Tuning: the fastest kernel of each weight shape on this GPU, as a table."""
