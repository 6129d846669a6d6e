"""How good a model is: metrics as sums and counts, every picture counted once."""
