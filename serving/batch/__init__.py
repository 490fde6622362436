"""Batch files: one line a request, answered through a journal that survives a crash at any byte."""
