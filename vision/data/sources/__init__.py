"""Data sets: labelled images by index, as they are stored."""
