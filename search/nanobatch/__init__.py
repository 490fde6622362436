"""NanoFlow's two-stage search of nano-batch plans (§4.1)."""
