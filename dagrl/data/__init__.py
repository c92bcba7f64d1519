"""Batches of named ragged columns, their sources and their distribution over ranks."""
