"""Memory-bound ops: norms, rotation and cache append, quantization, sampling limits."""
