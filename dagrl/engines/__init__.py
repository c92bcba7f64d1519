"""Models that train, score or generate."""
