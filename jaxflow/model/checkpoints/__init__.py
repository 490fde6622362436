"""Checkpoints: safetensors, GGUF and Orbax folders."""
