"""Weights of one geometry for another: config from tensors; tables, windows, patches, head."""
