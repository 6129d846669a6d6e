"""Hugging Face transformers: its names, its config.json, and the way back."""
