"""How a pipeline will run: who works where and when, and what that takes. Pure: no torch, no ray, no clock."""
