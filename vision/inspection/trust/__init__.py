"""Scores of attention maps, and diagnostics of heads and positions."""
