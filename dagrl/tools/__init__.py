"""Tools that come with dagrl, one a file: what a policy may call in a rollout of several turns."""
