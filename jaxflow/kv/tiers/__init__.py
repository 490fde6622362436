"""KV tiers below the device cache: host memory, disk, and the policy of the copies between them."""
