"""The official pretraining of BEiT, with timm's network of the same names as the peer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import assert_equal_function, drawn
from timm.models.beit import Beit
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.open import open_model

SMALL: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 3,
    "num_classes": 0,
    "global_pool": "token",
    "init_values": 0.1,
}
BIASES: dict[str, dict[str, Any]] = {
    "shared": {"use_shared_rel_pos_bias": True},
    "of each block, and a table": {"use_rel_pos_bias": True, "use_abs_pos_emb": True},
}


@pytest.mark.parametrize("variant", BIASES)
def test_pretraining_of_beit_computes_the_same(variant: str, tmp_path: Path) -> None:
    peer = drawn(Beit(**SMALL, **({"use_abs_pos_emb": False} | BIASES[variant])))

    def stored() -> dict[str, Tensor]:
        extra = {
            "mask_token": torch.ones(1, 1, 48),
            "lm_head.weight": torch.ones(9, 48),
            "cls_pt_layers.0.norm1.weight": torch.ones(48),
            "rel_pos_bias.relative_position_index": torch.zeros(17, 17),
        }
        return peer.state_dict() | extra

    def outputs(images: Tensor) -> Tensor:
        return peer.forward_features(images)[:, 1:].mean(dim=1)

    torch.save({"model": stored(), "optimizer": {"state": {}}}, tmp_path / "weights.pth")
    report = assert_equal_function(
        tmp_path / "weights.pth", outputs, peer, (32, 32), tensors=stored
    )
    assert report.layout == "BEiT" and report.path_taken == ("model",)
    assert report.ignored["lm_head.weight"] == "the head of pretraining"
    assert any("pool=mean" in line for line in report.assumed)
    assert not any("heads" in line for line in report.assumed)  # the table shows them


def test_part_that_is_not_known_is_refused(tmp_path: Path) -> None:
    tensors = Beit(**SMALL, use_shared_rel_pos_bias=True).state_dict()
    tensors |= {"mask_token": torch.ones(1, 1, 48), "blocks.0.attn.gate": torch.ones(3)}
    torch.save({"model": tensors}, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attn\.gate"):
        open_model(tmp_path / "weights.pth")
