"""Matrix products of few rows for Hopper (FlashDecoding++Next §4)."""
