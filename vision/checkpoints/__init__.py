"""Files that hold models and runs."""
