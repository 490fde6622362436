"""Draws of a token from each row of logits, by Gumbel-max."""
