"""JaxFlow as a network service."""
