"""One module for each layout in which other projects store ViT and Swin."""
