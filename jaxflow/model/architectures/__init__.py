"""Model architectures: configurations and tensor names."""
