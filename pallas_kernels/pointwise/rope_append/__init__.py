"""Rotation of queries and keys, and the append of keys and values to their pages."""
