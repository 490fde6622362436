"""Kernels: arrays in, arrays out. They know no model, no engine and no request."""
