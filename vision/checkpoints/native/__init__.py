"""This project's own checkpoint format."""
