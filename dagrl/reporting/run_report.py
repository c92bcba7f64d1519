"""Summarizes a run, compares it with its plan, and writes both as Chrome traces."""

from __future__ import annotations
