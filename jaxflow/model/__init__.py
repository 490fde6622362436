"""The model: its ops, their costs, its weights and checkpoints, and the plain forward."""
