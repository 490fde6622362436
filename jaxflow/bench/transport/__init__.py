"""The servers' cost without a device: an engine of paced steps behind real servers, and its measurement."""
