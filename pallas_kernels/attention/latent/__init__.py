"""Attention over a cache of latent vectors, which all heads share."""
