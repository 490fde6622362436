"""FlexGen's search of a placement over device, host and disk (§4.3)."""
