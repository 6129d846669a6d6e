"""Data sets: labelled images by index, not yet decoded."""
