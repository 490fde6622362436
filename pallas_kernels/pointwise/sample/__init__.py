"""Limits of top-k and top-p over rows of logits."""
