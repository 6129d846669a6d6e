"""Training runs: one command from a laptop to a cluster, resumable to the bit."""
