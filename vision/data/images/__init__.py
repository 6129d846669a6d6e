"""From an encoded image to augmented pixels."""
