"""Attention, taken from the forward pass that gives the logits."""
