"""Where metrics, samples and spans are written."""
