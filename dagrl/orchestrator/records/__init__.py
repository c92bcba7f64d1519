"""Records of nodes: the inputs and outputs of each in a step, so that it can run again alone."""
