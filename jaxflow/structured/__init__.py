"""Structured outputs: answers of a given form, by the tokens that may follow."""
