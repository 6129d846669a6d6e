"""How good a model is: metrics as sums and counts, every image counted once."""
