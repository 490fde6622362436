"""Paged decode attention for Hopper: one query row a sequence."""
