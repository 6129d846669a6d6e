"""`vision serve`: an HTTP API and a live page for checkpoints."""
