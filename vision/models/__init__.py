"""ViT, Swin and Swin V2, and any timm model beside them."""
