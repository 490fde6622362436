"""Pages of the key/value cache: who owns which (host), and the arrays themselves (device)."""
