"""Batches of named ragged columns, where they come from and how they are shared out."""
