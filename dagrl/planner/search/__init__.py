"""Layouts for a cluster, proposed and ranked: `proposals` is the door."""
