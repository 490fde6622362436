"""KV offloading: pages in host memory and on disk."""
