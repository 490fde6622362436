"""The longest prompt that a memory holds."""
