"""The largest scores of each row."""
