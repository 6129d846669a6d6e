"""Published top-1 accuracies on ImageNet-1k, by timm's names of the weights."""

SOURCES = """\
top-1: % of ImageNet-1k's validation images, as published by github.com/facebookresearch/deit,
github.com/microsoft/Swin-Transformer and, for ViT, timm (results/results-imagenet.csv).
Weights without a number may have a published one that is not recorded here."""

TOP1 = {
    # README_deit.md and README_revenge.md
    "deit_tiny_patch16_224.fb_in1k": 72.2,
    "deit_small_patch16_224.fb_in1k": 79.9,
    "deit_base_patch16_224.fb_in1k": 81.8,
    "deit_tiny_distilled_patch16_224.fb_in1k": 74.5,
    "deit_small_distilled_patch16_224.fb_in1k": 81.2,
    "deit_base_distilled_patch16_224.fb_in1k": 83.4,
    "deit3_small_patch16_224.fb_in1k": 81.4,
    "deit3_medium_patch16_224.fb_in1k": 83.0,
    "deit3_base_patch16_224.fb_in1k": 83.8,
    "deit3_large_patch16_224.fb_in1k": 84.9,
    "deit3_huge_patch14_224.fb_in1k": 85.2,
    "deit3_small_patch16_224.fb_in22k_ft_in1k": 83.1,
    "deit3_medium_patch16_224.fb_in22k_ft_in1k": 84.5,
    "deit3_base_patch16_224.fb_in22k_ft_in1k": 85.7,
    "deit3_large_patch16_224.fb_in22k_ft_in1k": 87.0,
    "deit3_huge_patch14_224.fb_in22k_ft_in1k": 87.2,
    # MODELHUB.md
    "swin_tiny_patch4_window7_224.ms_in1k": 81.2,
    "swin_small_patch4_window7_224.ms_in1k": 83.2,
    "swin_base_patch4_window7_224.ms_in1k": 83.5,
    "swin_base_patch4_window7_224.ms_in22k_ft_in1k": 85.2,
    "swin_base_patch4_window12_384.ms_in22k_ft_in1k": 86.4,
    "swin_large_patch4_window7_224.ms_in22k_ft_in1k": 86.3,
    "swin_large_patch4_window12_384.ms_in22k_ft_in1k": 87.3,
    "swinv2_tiny_window8_256.ms_in1k": 81.8,
    "swinv2_small_window8_256.ms_in1k": 83.7,
    "swinv2_base_window8_256.ms_in1k": 84.2,
    "swinv2_tiny_window16_256.ms_in1k": 82.8,
    "swinv2_small_window16_256.ms_in1k": 84.1,
    "swinv2_base_window16_256.ms_in1k": 84.6,
    "swinv2_base_window12to16_192to256.ms_in22k_ft_in1k": 86.2,
    "swinv2_base_window12to24_192to384.ms_in22k_ft_in1k": 87.1,
    "swinv2_large_window12to16_192to256.ms_in22k_ft_in1k": 86.9,
    "swinv2_large_window12to24_192to384.ms_in22k_ft_in1k": 87.6,
    # timm's own evaluation
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k": 75.452,
    "vit_small_patch16_224.augreg_in21k_ft_in1k": 81.402,
    "vit_base_patch16_224.augreg_in21k_ft_in1k": 84.534,
    "vit_base_patch16_224.augreg2_in21k_ft_in1k": 85.108,
    "vit_large_patch16_224.augreg_in21k_ft_in1k": 85.856,
    "vit_base_patch16_384.augreg_in21k_ft_in1k": 86.010,
    "vit_large_patch16_384.augreg_in21k_ft_in1k": 87.096,
    "vit_small_patch16_224.augreg_in1k": 78.842,
    "vit_base_patch16_224.augreg_in1k": 79.154,
}
