"""Ways of bringing buckets of weights from a sender to its receivers."""
