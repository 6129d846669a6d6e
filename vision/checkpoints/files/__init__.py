"""Bytes to named tensors: any checkpoint file, read without executing anything in it."""
