"""Position encodings: added to tokens, rotary, and relative biases."""
