"""Offline generation with a model that does not fit the device: weights, KV and activations on device, host
and disk.
"""
