#!/usr/bin/env bash
# Your own photos, from a folder with a folder of images per class to a page of results.
#
#   bash examples/own_photos.sh photos                                # from scratch
#   bash examples/own_photos.sh photos recipe=finetune model=auto \
#       init=timm:vit_small_patch16_224.augreg_in21k_ft_in1k          # downloads weights
#
# Further words are settings of the training, such as duration=5epochs.
set -euo pipefail
photos=$1
shift
settings=(recipe=small_data model=vit_fast model.patch_size=8 data.image_size=64)
if (($#)); then settings=("$@"); fi
data=(data=folder data.root="$photos")

vision data "${data[@]}" check=true || true # 1: there are duplicates or unreadable files
vision train name=photos "${data[@]}" data.val_fraction=0.2 "${settings[@]}"
vision eval checkpoint=outputs/photos
vision visualize checkpoint=outputs/photos images="$photos" count=3 page=true \
    output=outputs/photos/looks
echo "Results: outputs/photos/evaluation/val/report.html, attention: outputs/photos/looks"
