"""timm: its names, its own definitions of architectures, and the way back."""
