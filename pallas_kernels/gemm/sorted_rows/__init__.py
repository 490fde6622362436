"""The rows of a mixture's experts, from the rows of its tokens."""
