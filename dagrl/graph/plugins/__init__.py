"""What users bring themselves: ops, rewards, formulas, tools, environments and judges; found, imported, called."""
