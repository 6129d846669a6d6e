"""One HTML page in which the attention of a model can be explored: no server, no network."""
