"""Records of nodes: what each took and gave in a step, so that it can run again alone."""
