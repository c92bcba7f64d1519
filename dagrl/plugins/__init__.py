"""User code: ops, rewards, formulas, tools, environments and parsers."""
