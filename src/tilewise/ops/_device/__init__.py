"""Device helpers that every kernel shares: triton only, no torch."""
