"""Quantization of rows to e4m3."""
