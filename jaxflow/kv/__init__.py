"""Pages of the KV cache: their holders on the host, the arrays on the device, and the tiers below."""
