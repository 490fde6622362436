"""Offloaded execution (FlexGen): a model that does not fit the device, over device, host and disk."""
